"""Arrays that live in shared memory, so that peers read and write them in place.

NumPy's own allocations stay private. A handler of them (NEP 49) would have to be made of Python functions:
an array then takes eight times as long to make, an exception that a signal's handler raises inside one is
lost or ends the process, and arrays that live to the end of the interpreter call functions that are gone.
"""

from __future__ import annotations

import math
import re
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np

from flagcx.arguments import check_shape, format_nbytes
from flagcx.errors import ResourceError
from flagcx.memory import SHARED as SHARED_KIND
from flagcx.memory import Block, Pool
from flagcx.transport.shared_memory.segment import Handle, Segment
from flagcx.transport.shared_memory.words import HEAP_COUNT, HEAP_WORDS, HEAPS, MOST_HEAPS

_LEAST_NBYTES = 32 << 20
SHARED = 1 << 63
"""Bit of a location word that names shared memory; else the word is an address of its process."""
_OFFSET_BITS = 48
_MEMORY = Path("/proc/meminfo")
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container's limit of memory stands, by the second version of control groups and by the first."""


class Heap:
    """The shared arrays of one rank.

    Args:
        words: This rank's words, where it tells its peers of the heap's segments.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._segments: list[Segment] = []
        self._pool = Pool(SHARED_KIND, self._announce, _LEAST_NBYTES)
        self._homes: dict[int, tuple[int, int]] = {}

    def empty(self, shape, dtype) -> np.ndarray:
        """An uninitialised C-contiguous array of shared memory, page-aligned.

        Raises:
            ArgumentError: ``shape`` is no shape.
            ResourceError: No memory, or too many pieces of it.
        """
        dtype, shape = np.dtype(dtype), check_shape(shape)
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes > self._pool.stats().largest_free_nbytes:
            _check_room(nbytes, f"shape {shape}, {dtype}")
        block = self._pool.take(nbytes)
        array = np.frombuffer(block.memory.data, dtype, count, block.offset)
        self._homes[id(array)] = (block.piece, block.offset)
        # It must not keep the memory alive: after close, that goes with the last array.
        where = replace(block, memory=None)
        weakref.finalize(array, self._give, where, id(array)).atexit = False
        return array.reshape(shape)

    def _announce(self, nbytes: int) -> tuple[np.ndarray, int]:
        """Makes a segment and tells the peers of it."""
        index = len(self._segments)
        if index == MOST_HEAPS:
            raise ResourceError(
                f"{MOST_HEAPS} pieces of shared memory are in use already; make fewer, larger arrays with "
                f"comm.empty, or let go of some"
            )
        segment = Segment.create(nbytes)
        handle = segment.handle
        self._segments.append(segment)
        for i, value in enumerate(handle[1:], HEAPS + HEAP_WORDS * index):
            self._words[i] = value
        self._words[HEAP_COUNT] = index + 1
        return np.frombuffer(segment.memory, np.uint8), handle.nbytes

    def _give(self, block: Block, key: int) -> None:
        self._homes.pop(key, None)
        self._pool.give(block)

    def locate(self, array: np.ndarray) -> int | None:
        """Where ``array`` lies, as a location word for peers, or None where it is not of this heap."""
        owner = array if array.base is None or id(array) in self._homes else array.base
        home = self._homes.get(id(owner))
        if home is None:
            return None
        start = owner.__array_interface__["data"][0]
        shift = array.__array_interface__["data"][0] - start
        return SHARED | home[0] << _OFFSET_BITS | (home[1] + shift)

    def place(self, array: np.ndarray) -> int:
        """Where ``array`` lies, as a location word for peers, in memory that they map or not."""
        return self.locate(array) or array.__array_interface__["data"][0]

    def close(self) -> None:
        """Gives the memory back as soon as no array views it."""
        self._pool.close()
        self.abandon()

    def abandon(self) -> None:
        """Lets go of the segments in a forked child, where the pool's lock may stay locked."""
        segments, self._segments = self._segments, []
        self._words = memoryview(b"")
        for segment in segments:
            segment.close()


def available_nbytes() -> int | None:
    """Bytes of memory, swap included, that the machine or its container can still give; None if unknown.

    Of a container the limit counts, whatever of it is in use.
    """
    try:
        kib = dict(re.findall(r"^(MemAvailable|SwapFree): +(\d+) kB$", _MEMORY.read_text(), re.MULTILINE))
    except OSError:
        return None
    if "MemAvailable" not in kib:
        return None
    return min([sum(map(int, kib.values())) << 10, *_limits()])


def _limits() -> list[int]:
    found = []
    for path in _LIMITS:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return found


def _check_room(nbytes: int, what: str) -> None:
    """Refuses an array that memory cannot hold: pages are taken when they are first written.

    Then it would be too late for an error; the system ends processes.
    """
    available = available_nbytes()
    if available is not None and nbytes > available:
        raise ResourceError(
            f"there is no room for an array of {format_nbytes(nbytes)} ({what}): {format_nbytes(available)} "
            f"of memory are available; make smaller arrays, or let go of some"
        )


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
            at = HEAPS + HEAP_WORDS * index
            segment = Segment.attach(Handle(self._pids[peer], *self._words[peer][at : at + HEAP_WORDS]))
            found = self._mapped[peer, index] = (segment, np.frombuffer(segment.memory, np.uint8))
        return found[1][offset : offset + nbytes]

    def close(self) -> None:
        """Unmaps all."""
        self._words = []
        mapped, self._mapped = self._mapped, {}
        for segment, memory in mapped.values():
            del memory
            segment.close()
