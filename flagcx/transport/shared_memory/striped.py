"""Small messages of many ranks: each rank adds up one stripe, in two exchanges.

In one exchange each of n ranks reads n whole messages; here it reads a stripe of each and then n reduced
stripes, two messages in all, for one signal more. The slots are those of ``one_shot.py``, one for each
exchange. A rank that writes its slot of the first exchange again has seen every peer's signal of the second,
which a peer sends after it has read; and one that writes its slot of the second again has seen every peer
enter a later call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import ONE_SHOT_NBYTES
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner, row_combiner
from flagcx.transport.shared_memory.words import REDUCED

LEAST_RANKS = 4
_LINE_NBYTES = 64


class Striped:
    """All-reduce ``two_shot`` of a message that fits into one slot. Sums are made in rank order."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        size, rank, dtype = arena.size, arena.rank, call.dtype.numpy
        self._count = count = int(call.counts)  # type: ignore[arg-type]
        line = _LINE_NBYTES // dtype.itemsize
        self._width = width = -(-count // (size * line)) * line
        low, high = min(rank * width, count), min((rank + 1) * width, count)
        self._whole = count // width  # stripes of full width; at most one that is shorter comes after them
        rows = row_combiner(call.op, call.dtype, size, high - low)  # type: ignore[arg-type]
        self._combine = rows or combiner(call.op, call.dtype, size)  # type: ignore[arg-type]
        wide = accumulator_dtype(call.op, call.dtype, size)  # type: ignore[arg-type]
        self._accumulator = arena.accumulator(high - low, wide) if high > low else None
        self._slots: list[tuple[np.ndarray, Any]] = []
        self._reduced: list[tuple[np.ndarray, np.ndarray]] = []
        for at in arena.areas.exchanges(count * dtype.itemsize):
            start = at + low * dtype.itemsize
            views = [arena.view(q, start, high - low, dtype) for q in range(size)]
            sources = views if rows is None else arena.rows(start, high - low, dtype)
            self._slots.append((arena.view(rank, at, count, dtype), sources))
            self._reduced.append((arena.view(rank, at, high - low, dtype), arena.rows(at, width, dtype)))
        self._turns = len(self._slots) - 1

    @staticmethod
    def serves(nbytes: int, size: int) -> bool:
        """Whether a message fits into a slot, and there are ranks enough for stripes."""
        return size >= LEAST_RANKS and nbytes <= ONE_SHOT_NBYTES

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        arena = self._arena
        turn = arena.turns
        arena.turns = turn + 2
        contributed, sources = self._slots[turn & self._turns]
        reduced, rows = self._reduced[(turn + 1) & self._turns]
        contributed[...] = sendbuf.reshape(-1)
        arena.enter_exchange(turn, self._signature)
        if self._accumulator is not None:
            self._combine(sources, reduced, self._accumulator)
        arena.pieces += 1
        self._signals.count(REDUCED, arena.pieces)
        self._signals.await_counts(REDUCED, arena.pieces)
        whole, width = self._whole, self._width
        out = recvbuf.reshape(-1)
        out[: whole * width].reshape(whole, width)[...] = rows[:whole]
        if whole * width < self._count:
            out[whole * width :] = rows[whole, : self._count - whole * width]
