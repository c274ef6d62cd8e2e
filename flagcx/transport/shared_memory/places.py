"""Where the arrays of a call lie: as peers read it, and in this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from flagcx.transport.shared_memory.arena import Arena


class Places:
    """Where the arrays of a plan lie, looked up anew only where they are not those of the run before.

    Args:
        arena: The shared memory.

    Attributes:
        words: A location word for each array, as peers read it.
        addresses: The address of each in this process.
    """

    def __init__(self, arena: Arena) -> None:
        self._heap = arena.heap
        self._last: list[Callable[[], np.ndarray | None]] = []
        self.words: list[int] = []
        self.addresses: list[int] = []

    def look_up(self, *arrays: np.ndarray | None) -> None:
        """Takes the arrays of a run, each None where the rank has none."""
        last = self._last
        while len(last) < len(arrays):
            last.append(_nothing)
            self.words.append(0)
            self.addresses.append(0)
        for i, array in enumerate(arrays):
            if array is not None and last[i]() is not array:
                last[i] = weakref.ref(array)
                self.addresses[i] = address = array.__array_interface__["data"][0]
                self.words[i] = self._heap.locate(array) or address


def _nothing() -> None:
    return None
