"""Pooled communication buffers: blocks of a few large pieces of memory, used again and again.

A ``Pool`` asks the system for few pieces, each at least twice as large as the one before, and hands out
blocks of them. A block that is given back is handed out again, so a training loop asks the system for memory
in its first steps only. There are pools for memory that takes long to allocate: shared memory that peers
map, memory of a GPU, pinned memory of the host.

Fragmentation
-------------
Blocks are whole pages at the lowest address where they fit, and free neighbours are joined at once. With at
most M bytes handed out at a time and no block larger than n pages, such a first fit never needs more than
``M H(n) / ln 2`` bytes, with H(n) = 1 + 1/2 + ... + 1/n, whatever the order of the calls. No allocator that
leaves blocks in place can do better than half of it (Robson 1974). ``fragmentation`` is the share of the free
memory that is not in its largest part.

Source: J. M. Robson, "Worst case fragmentation of first fit and best fit storage allocation strategies",
    The Computer Journal 20 (1977).
"""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from flagcx.report import Report, Reported

ALIGNMENT = 4096
SHARED, DEVICE, PINNED = "shared", "device", "pinned"
"""The kinds of memory: mapped by peers, of a GPU, and of the host for copies to and from a GPU."""
_MOST_PIECE_NBYTES = 1 << 30


class FreeList:
    """Which parts of one piece of ``nbytes`` bytes are free. First fit; free neighbours are joined."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = [(0, nbytes)] if nbytes else []
        self._used: dict[int, int] = {}

    @property
    def used_nbytes(self) -> int:
        """Bytes handed out."""
        return sum(self._used.values())

    @property
    def blocks(self) -> int:
        """Blocks handed out."""
        return len(self._used)

    @property
    def largest_free_nbytes(self) -> int:
        """Bytes of the largest free part."""
        return max((stop - start for start, stop in self._free), default=0)

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` bytes, rounded up to pages; None where no free part is large enough."""
        nbytes = whole_pages(nbytes)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                self._used[start] = nbytes
                return start
        return None

    def give(self, offset: int) -> int:
        """Takes back the block at ``offset``, and returns its size in bytes."""
        nbytes = self._used.pop(offset)
        start, stop = offset, offset + nbytes
        kept = []
        for a, b in self._free:
            if b == start:
                start = a
            elif a == stop:
                stop = b
            else:
                kept.append((a, b))
        insort(kept, (start, stop))
        self._free = kept
        return nbytes


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to pages; one page at least."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a pool's memory: ``nbytes`` bytes at ``offset`` of piece number ``piece``, ``memory``."""

    memory: Any
    piece: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The statistics of one kind of memory.

    Attributes:
        reserved_nbytes: Bytes taken from the system.
        used_nbytes: Bytes handed out.
        peak_nbytes: The most bytes handed out at a time (where there are several pools, the sum of theirs).
        blocks: Blocks handed out now.
        taken: Blocks handed out so far.
        allocations: How often the system was asked for memory so far.
        largest_free_nbytes: Bytes of the largest free part.
    """

    reserved_nbytes: int = 0
    used_nbytes: int = 0
    peak_nbytes: int = 0
    blocks: int = 0
    taken: int = 0
    allocations: int = 0
    largest_free_nbytes: int = 0

    @property
    def fragmentation(self) -> float:
        """The share of the free memory that is not in its largest part: near 1 for splinters."""
        free = self.reserved_nbytes - self.used_nbytes
        return 1 - self.largest_free_nbytes / free if free > 0 else 0.0

    def __add__(self, other: PoolStats) -> PoolStats:
        sums = PoolStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        largest = max(self.largest_free_nbytes, other.largest_free_nbytes)
        return replace(sums, largest_free_nbytes=largest)


class Pool:
    """Memory of one kind, taken from the system in few large pieces and handed out in blocks.

    Any thread may take and give, and the garbage collector may call ``give`` at any point: blocks that are
    given back wait in a queue until the next call.

    Args:
        kind: ``SHARED``, ``DEVICE`` or ``PINNED``; for the statistics.
        allocate: ``allocate(nbytes)`` asks the system for a piece of at least ``nbytes`` bytes, and returns
            the piece and its size.
        least_nbytes: Size of the first piece.

    Example:
        >>> pool = Pool("shared", lambda nbytes: (bytearray(nbytes), nbytes), least_nbytes=1 << 20)
        >>> block = pool.take(5000)
        >>> pool.stats().used_nbytes, pool.stats().allocations
        (8192, 1)
        >>> pool.give(block)
        >>> pool.stats().used_nbytes
        0
    """

    def __init__(
        self, kind: str, allocate: Callable[[int], tuple[Any, int]], least_nbytes: int = 8 << 20
    ) -> None:
        self.kind, self._allocate, self._least = kind, allocate, least_nbytes
        self._pieces: list[tuple[Any, FreeList]] = []
        self._given: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._used = self._peak = self._taken = self._allocations = 0
        track_memory(self)

    def take(self, nbytes: int) -> Block:
        """Hands out at least ``nbytes`` bytes, at a multiple of 4096 bytes from the start of their piece.

        Raises:
            ResourceError: The system has no room left.
        """
        with self._lock:
            self._take_back()
            block = self._find(nbytes) or self._grow(nbytes)
            self._taken += 1
            self._used += whole_pages(nbytes)
            self._peak = max(self._peak, self._used)
            return block

    def _find(self, nbytes: int) -> Block | None:
        for number, (memory, free) in enumerate(self._pieces):
            offset = free.take(nbytes)
            if offset is not None:
                return Block(memory, number, offset, nbytes)
        return None

    def _grow(self, nbytes: int) -> Block:
        doubled = 2 * self._pieces[-1][1].nbytes if self._pieces else 0
        memory, size = self._allocate(max(whole_pages(nbytes), min(doubled, _MOST_PIECE_NBYTES), self._least))
        self._allocations += 1
        free = FreeList(size)
        self._pieces.append((memory, free))
        offset = free.take(nbytes)
        assert offset is not None
        return Block(memory, len(self._pieces) - 1, offset, nbytes)

    def give(self, block: Block) -> None:
        """Takes a block back, which nothing uses any more, no work that is enqueued on a GPU either."""
        self._given.append((block.piece, block.offset))

    def _take_back(self) -> None:
        while self._given:
            piece, offset = self._given.popleft()
            if self._pieces:  # else the pool was closed in between
                self._used -= self._pieces[piece][1].give(offset)

    def stats(self) -> PoolStats:
        """The statistics as they are now."""
        with self._lock:
            self._take_back()
            frees = [free for _, free in self._pieces]
            return PoolStats(
                sum(free.nbytes for free in frees),
                self._used,
                self._peak,
                sum(free.blocks for free in frees),
                self._taken,
                self._allocations,
                max((free.largest_free_nbytes for free in frees), default=0),
            )

    def close(self) -> None:
        """Frees all pieces. May be called again."""
        with self._lock:
            self._pieces, self._used = [], 0
            self._given.clear()

    def __repr__(self) -> str:
        now = self.stats()
        return f"<Pool of {self.kind} memory, {now.used_nbytes:,} of {now.reserved_nbytes:,} bytes in use>"


class MemoryHolder(Protocol):
    """An object that holds communication memory of one kind, and has statistics of it."""

    @property
    def kind(self) -> str:
        """The kind of memory."""

    def stats(self) -> PoolStats:
        """The statistics as they are now."""


class MemoryReport(Reported, Mapping[str, PoolStats]):
    """Statistics by kind of memory: "shared", "device", "pinned". Prints as a table, in a notebook too."""

    def __init__(self, kinds: Mapping[str, PoolStats]) -> None:
        self._kinds = dict(kinds)

    def __getitem__(self, kind: str) -> PoolStats:
        return self._kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Everything as plain values."""
        return {k: {**asdict(s), "fragmentation": s.fragmentation} for k, s in self._kinds.items()}

    def report(self) -> Report:
        """The statistics as a table; sizes in bytes."""
        columns = ("memory", "reserved", "used", "peak", "blocks", "allocations", "fragmentation")
        rows = []
        for kind, s in self._kinds.items():
            sizes = (f"{n:,}" for n in (s.reserved_nbytes, s.used_nbytes, s.peak_nbytes))
            rows.append((kind, *sizes, str(s.blocks), str(s.allocations), f"{s.fragmentation:.0%}"))
        return Report("communication memory of this process, in bytes", columns, rows, words=(0,))

    def __str__(self) -> str:
        return "\n".join(self.report().lay_out())

    __repr__ = __str__


def memory_stats() -> MemoryReport:
    """The communication memory of this process, by kind: shared with peers, of the GPU, pinned.

    Counts arrays of ``comm.empty``, fused messages, buckets of gradients and the buffers of plans; the
    caller's own arrays are not counted.

    Returns:
        A mapping from kind to ``PoolStats``, which prints as a table.

    Example:
        >>> before = memory_stats()["shared"].allocations
        >>> # ... steps of a training ...
        >>> memory_stats()["shared"].allocations - before
        0
    """
    found = {kind: PoolStats() for kind in (SHARED, DEVICE, PINNED)}
    for one in list(_holders()):
        found[one.kind] = found[one.kind] + one.stats()
    return MemoryReport(found)


def track_memory(holder: MemoryHolder) -> None:
    """Lets ``memory_stats`` count a holder of memory as long as it lives."""
    _holders().add(holder)


@lru_cache(maxsize=1)
def _holders() -> weakref.WeakSet:
    """The holders of this process."""
    return weakref.WeakSet()
