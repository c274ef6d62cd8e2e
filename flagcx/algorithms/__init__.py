"""Algorithms as pure functions of ranks, and the catalogue of them.

All-reduces of NumPy arrays on one host are ``one_shot`` where they are small, one exchange through slots in
shared memory, and ``two_shot`` else: each rank reduces one stripe, small messages of four ranks or more in
slots, larger ones straight in the peers' memory (cross-memory attach, or the mapping of arrays from
``comm.empty``), or through slots: up to 16 MiB while the ranks' writes into these are quick, which each job
measures as it runs, and where nothing else is allowed. Of broadcasts up to 64 KiB the root leaves its
message once and all others read it there; all-gather, reduce-scatter and all-to-all exchange blocks of up
to 64 KiB at once. ``ring``, ``chain``, ``tree``, ``binomial``, ``double_binary_tree``,
``recursive_doubling``, ``halving_doubling``, ``bruck`` and ``hierarchical`` run by name: ``algorithm=``.

Every function returns a ``Schedule`` and imports no transport and no array library. ``catalogue`` lists
them, ``flagcx.schedule.compose`` has the vocabulary that they are written in, with an
example, and ``register`` adds one.
"""

from flagcx.algorithms.catalogue import Algorithm, AlgorithmEntry
from flagcx.algorithms.registry import build, catalogue, entries, entry, register, unregister

__all__ = [
    "Algorithm",
    "AlgorithmEntry",
    "build",
    "catalogue",
    "entries",
    "entry",
    "register",
    "unregister",
]
