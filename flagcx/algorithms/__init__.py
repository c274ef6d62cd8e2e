"""Algorithms as pure functions of ranks, and the catalogue of them.

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
