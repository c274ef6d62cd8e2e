"""Ranks that share cores, started without address-space layout randomisation (ASLR).

A core predicts branches and caches code by address. Where it switches between ranks that run the same
interpreter at the same addresses, each profits from the other's predictions: a small all-reduce of four ranks
on two cores takes about half the time. So ranks that outnumber the cores are started without randomised
addresses, as a debugger starts a program. (``flagcx run -n 4 bench/facade_cost.py`` shows it; ``setarch -R``
does the same by hand.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_ADDR_NO_RANDOMIZE = 0x0040000
_ASK = 0xFFFFFFFF


@contextlib.contextmanager
def without_aslr(ranks: int) -> Iterator[None]:
    """Has the processes that this thread starts in the block use the same addresses.

    Does nothing where there is a core for each of the host's ``ranks``, and where a sandbox forbids it.
    """
    if ranks <= len(os.sched_getaffinity(0)):
        yield
        return
    personality = ctypes.CDLL(None).personality
    personality.argtypes = [ctypes.c_ulong]
    before = personality(_ASK)
    changed = before >= 0 and personality(before | _ADDR_NO_RANDOMIZE) >= 0
    try:
        yield
    finally:
        if changed:
            personality(before)
