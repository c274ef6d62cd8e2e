"""Algorithms as pure functions of ranks, and the catalogue of them.

Every function returns a ``Schedule`` and imports no transport and no array library. See ``catalogue`` for
what each serves and costs, ``moves`` for the form they are written in, ``register`` for how to add one.
"""

from flagcx.algorithms.catalogue import AlgorithmEntry
from flagcx.algorithms.counts import count_sent, count_steps
from flagcx.algorithms.names import Algorithm
from flagcx.algorithms.registry import build, catalogue, entries, entry, register, unregister

__all__ = [
    "Algorithm",
    "AlgorithmEntry",
    "build",
    "catalogue",
    "count_sent",
    "count_steps",
    "entries",
    "entry",
    "register",
    "unregister",
]
