"""Arrays that peers read and write in place: each in a segment of memory that the ranks exchange.

All ranks make an array together, so its segment has the same number on every rank. Segments whose arrays are
gone on all ranks are used again or closed when the next array is made.
"""

from __future__ import annotations

import contextlib
import json
import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.bootstrap.store import Store
from flagcx.errors import ArgumentError, ResourceError
from flagcx.kernels.peer import OFFSET_BITS

_MOST = 1024


def table_nbytes(size: int) -> int:
    """Bytes of the table of all segments of ``size`` ranks."""
    return _MOST * size * 8


class Segments:
    """The arrays of one communicator that peers see.

    Args:
        cupy: The CuPy module.
        store: The communicator's part of the store.
        limit_s: How long to wait for the other ranks, in seconds.
        table: Address of ``table_nbytes`` zeros on the GPU, for the address in this process of each segment
            of each rank.
    """

    def __init__(self, cupy: Any, store: Store, limit_s: float, table: int) -> None:
        self._cupy, self._runtime, self._store, self._limit_s = cupy, cupy.cuda.runtime, store, limit_s
        self.rank, self.size = store.rank, store.size
        self._sizes: dict[int, int] = {}
        self._at: dict[int, list[int]] = {}
        self._starts: list[tuple[int, int]] = []
        self._idle: set[int] = set()
        self._attached = self._open = True
        self._table = table

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """An uninitialised array; all ranks must call this together, with as many bytes.

        Raises:
            ArgumentError: The ranks ask for different sizes.
            ResourceError: A GPU has no memory left, or there are too many such arrays.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        number = self._take(-(-nbytes // 512) * 512)
        at = self._at[number][self.rank]
        memory = self._cupy.cuda.UnownedMemory(at, self._sizes[number], _Use(self, number, at))
        return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    def _take(self, nbytes: int) -> int:
        ours = json.dumps([nbytes, sorted(self._idle)]).encode()
        sizes, idle = zip(*map(json.loads, self._exchange("want", ours)), strict=True)
        if len(set(sizes)) > 1:
            raise ArgumentError(
                f"all ranks must make an array of comm.empty(device='gpu') together and of one size, got "
                f"{', '.join(f'rank {r}: {s} bytes' for r, s in enumerate(sizes))}"
            )
        free = sorted(set.intersection(*map(set, idle)))
        fitting = [n for n in free if self._sizes[n] == nbytes]
        if fitting:
            self._idle.discard(fitting[0])
            self._runtime.deviceSynchronize()  # Enqueued operations may still use it.
            return fitting[0]
        for number in free:
            self._idle.discard(number)
        self._drop(free)
        return self._make(nbytes)

    def _make(self, nbytes: int) -> int:
        """Makes a segment on all ranks, or raises the same error on all."""
        at, problem = [0] * self.size, ""
        try:
            if len(self._sizes) >= _MOST:
                problem = f"there are {_MOST} such arrays already"
            else:
                at[self.rank] = self._runtime.malloc(nbytes)
        except self._runtime.CUDARuntimeError as error:
            problem = str(error)
        try:
            handle = self._runtime.ipcGetMemHandle(at[self.rank]) if at[self.rank] else b""
            for rank, other in enumerate(self._exchange("handles", bytes(handle))):
                if rank != self.rank and other:
                    at[rank] = self._runtime.ipcOpenMemHandle(other)
        except self._runtime.CUDARuntimeError as error:
            problem = problem or str(error)
        problems = [reason.decode() for reason in self._exchange("made", problem.encode())]
        if any(problems):
            self._undo(at)
            rank = next(r for r, reason in enumerate(problems) if reason)
            raise ResourceError(
                f"an array of {nbytes} bytes that peers see cannot be made, rank {rank}: {problems[rank]}; "
                f"use cupy.empty, whose arrays travel through a copy"
            )
        return self._enter(nbytes, at)

    def _undo(self, at: list[int]) -> None:
        for rank, address in enumerate(at):
            if address and rank != self.rank:
                self._quietly(self._runtime.ipcCloseMemHandle, address)
        self._exchange("undone", b"")
        if at[self.rank]:
            self._quietly(self._runtime.free, at[self.rank])

    def _enter(self, nbytes: int, at: list[int]) -> int:
        """Gives a segment its number, the same on all ranks, and enters it in the kernels' table."""
        number = next(n for n in range(_MOST) if n not in self._sizes)
        self._sizes[number], self._at[number] = nbytes, at
        insort(self._starts, (at[self.rank], number))
        row = np.array(at, np.uint64)
        place = self._table + number * self.size * 8
        self._runtime.memcpy(place, row.ctypes.data, row.nbytes, self._runtime.memcpyHostToDevice)
        # No rank may use the segment before all have entered it.
        self._exchange("known", b"")
        return number

    def _exchange(self, name: str, value: bytes) -> list[bytes]:
        return self._store.exchange(f"peer/segments/{name}", value, self._limit_s)

    def handle_of(self, at: int, nbytes: int) -> int:
        """The kernels' handle of the array at an address; 0 if it does not lie in a segment."""
        starts = self._starts
        if not starts:
            return 0
        i = bisect_right(starts, (at, _MOST)) - 1
        if i < 0:
            return 0
        start, number = starts[i]
        offset = at - start
        return (number + 1) << OFFSET_BITS | offset if offset + nbytes <= self._sizes[number] else 0

    def release(self, number: int, at: int) -> None:
        """Notes that this rank's array of a segment is gone; frees the memory after ``close``."""
        if self._open:
            self._idle.add(number)
        else:
            self._quietly(self._runtime.free, at)

    def _drop(self, numbers: Sequence[int]) -> None:
        """Closes segments that no rank uses any more."""
        if not numbers:
            return
        self._runtime.deviceSynchronize()  # Enqueued operations may still use them.
        for number in numbers:
            self._close_views(number)
        self._exchange("closed", b"")
        for number in numbers:
            own = self._at.pop(number)[self.rank]
            del self._sizes[number]
            self._starts.remove((own, number))
            self._quietly(self._runtime.free, own)

    def _close_views(self, number: int) -> None:
        for rank, address in enumerate(self._at[number]):
            if rank != self.rank:
                self._quietly(self._runtime.ipcCloseMemHandle, address)

    def _quietly(self, function: Any, *args: Any) -> None:
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            function(*args)

    def detach(self) -> None:
        """Closes the views of the peers' memory."""
        if self._attached:
            self._attached = False
            self._starts.clear()
            for number in self._at:
                self._close_views(number)

    def close(self) -> None:
        """Frees this rank's memory, except that of arrays that still exist."""
        if not self._open:
            return
        self._open = False
        for number in self._idle:
            self._quietly(self._runtime.free, self._at[number][self.rank])


class _Use:
    """Owned by an array; releases its segment when the array is gone."""

    def __init__(self, segments: Segments, number: int, at: int) -> None:
        self._segments, self._number, self._at = segments, number, at

    def __del__(self) -> None:
        self._segments.release(self._number, self._at)
