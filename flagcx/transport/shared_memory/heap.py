"""Arrays that live in shared memory, so that peers read and write them in place."""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np

from flagcx.errors import ResourceError
from flagcx.memory import FreeList
from flagcx.transport.shared_memory.segment import Handle, Segment
from flagcx.transport.shared_memory.signals import HEAP_COUNT, HEAPS, MOST_HEAPS

_LEAST_NBYTES = 32 << 20
SHARED = 1 << 63
"""Bit of a location word that names shared memory; else the word is an address of its process."""
_OFFSET_BITS = 48


class Heap:
    """The shared arrays of one rank.

    Args:
        words: This rank's words, where it tells its peers of the heap's segments.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._segments: list[tuple[Segment, FreeList, np.ndarray]] = []
        self._homes: dict[int, tuple[int, int]] = {}
        self._lock = threading.RLock()

    def empty(self, shape, dtype) -> np.ndarray:
        """An uninitialised C-contiguous array of shared memory, page-aligned.

        Raises:
            ResourceError: No memory, or too many pieces of it.
        """
        dtype = np.dtype(dtype)
        count = math.prod(shape) if isinstance(shape, tuple) else int(shape)
        with self._lock:
            index, offset = self._take(count * dtype.itemsize)
            memory = self._segments[index][2]
            array = np.frombuffer(memory.data, dtype, count, offset)
            self._homes[id(array)] = (index, offset)
        weakref.finalize(array, self._give, index, offset, id(array)).atexit = False
        return array.reshape(shape)

    def _take(self, nbytes: int) -> tuple[int, int]:
        for index, (_, free, _) in enumerate(self._segments):
            offset = free.take(nbytes)
            if offset is not None:
                return index, offset
        self._grow(nbytes)
        return len(self._segments) - 1, self._segments[-1][1].take(nbytes)  # type: ignore[return-value]

    def _grow(self, nbytes: int) -> None:
        index = len(self._segments)
        if index == MOST_HEAPS:
            raise ResourceError(
                f"{MOST_HEAPS} pieces of shared memory are in use already; make fewer, larger arrays with "
                f"comm.empty, or let go of some"
            )
        doubled = 2 * self._segments[-1][0].handle.nbytes if self._segments else 0
        segment = Segment.create(max(nbytes, min(doubled, 1 << 30), _LEAST_NBYTES))
        handle = segment.handle
        self._segments.append((segment, FreeList(handle.nbytes), np.frombuffer(segment.memory, np.uint8)))
        self._words[HEAPS + 2 * index] = handle.descriptor
        self._words[HEAPS + 2 * index + 1] = handle.nbytes
        self._words[HEAP_COUNT] = index + 1

    def _give(self, index: int, offset: int, key: int) -> None:
        with self._lock:
            self._homes.pop(key, None)
            if self._segments:
                self._segments[index][1].give(offset)

    def locate(self, array: np.ndarray) -> int | None:
        """Where ``array`` lies, as a location word for peers, or None where it is not of this heap."""
        owner = array if array.base is None or id(array) in self._homes else array.base
        home = self._homes.get(id(owner))
        if home is None:
            return None
        start = owner.__array_interface__["data"][0]
        shift = array.__array_interface__["data"][0] - start
        return SHARED | home[0] << _OFFSET_BITS | (home[1] + shift)

    def used_nbytes(self) -> int:
        """Bytes in arrays that are alive."""
        return sum(free.used_nbytes for _, free, _ in self._segments)

    def close(self) -> None:
        """Gives the memory back as soon as no array views it."""
        with self._lock:
            segments, self._segments = self._segments, []
            self._words = memoryview(b"")
            for segment, _, memory in segments:
                del memory
                segment.close()


class PeerHeaps:
    """The heaps of the peers, each piece mapped when an array in it is first met."""

    def __init__(self, words: list[memoryview], pids: list[int]) -> None:
        self._words = words
        self._pids = pids
        self._mapped: dict[tuple[int, int], tuple[Segment, np.ndarray]] = {}

    def view(self, peer: int, location: int, nbytes: int) -> np.ndarray:
        """The ``nbytes`` bytes at ``location`` of rank ``peer``, as an array of uint8."""
        index = location >> _OFFSET_BITS & 0x7FFF
        offset = location & ((1 << _OFFSET_BITS) - 1)
        found = self._mapped.get((peer, index))
        if found is None:
            words = self._words[peer]
            handle = Handle(self._pids[peer], words[HEAPS + 2 * index], words[HEAPS + 2 * index + 1])
            segment = Segment.attach(handle)
            found = self._mapped[peer, index] = (segment, np.frombuffer(segment.memory, np.uint8))
        return found[1][offset : offset + nbytes]

    def close(self) -> None:
        """Unmaps all."""
        self._words = []
        mapped, self._mapped = self._mapped, {}
        for segment, memory in mapped.values():
            del memory
            segment.close()
