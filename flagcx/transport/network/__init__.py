"""NumPy arrays between any number of hosts: any schedule, step by step, over an engine.

The engine, which is MPI or UCX, only carries the messages. The schedule says which rank sends what and where
it is added up, so results are the same as on one host. Each message says which call it belongs to
(``message.py``), and is checked before its data is used (``wire.py``). Every wait has a deadline, and is
explained before it (``watch.py``).

Inside a host hierarchical collectives go through memory that its ranks share (``hierarchy.py``).
"""

CROSSED = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
"""The collectives that have steps between hosts in ``crossing.py``. They stand here, since the rules that
choose an algorithm need the names alone, also on one host, where no rank imports what makes the steps."""
