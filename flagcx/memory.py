"""Pooled communication buffers: blocks of a few large pieces of memory, used again and again."""

from __future__ import annotations

from bisect import insort

ALIGNMENT = 4096


class FreeList:
    """Which parts of one piece of memory are free. First fit; neighbours that are free are joined.

    Args:
        nbytes: Size of the memory in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = [(0, nbytes)] if nbytes else []
        self._used: dict[int, int] = {}

    @property
    def used_nbytes(self) -> int:
        """Bytes handed out."""
        return sum(self._used.values())

    def take(self, nbytes: int) -> int | None:
        """Hands out ``nbytes`` bytes (rounded up to whole pages).

        Returns:
            Offset of the block, or None where no free part is large enough.
        """
        nbytes = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                self._used[start] = nbytes
                return start
        return None

    def give(self, offset: int) -> None:
        """Takes back the block at ``offset``."""
        start, stop = offset, offset + self._used.pop(offset)
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
