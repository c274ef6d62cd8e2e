"""Small messages: every rank leaves its message in a slot, then reads all slots.

Two slots take turns. A rank that writes a slot for the second time has seen every peer's signal of the
exchange between, and a peer signals that only after it has read the slot; so nothing else is needed.
Longer messages take turns in more slots.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import EXCHANGE_NBYTES, ONE_SHOT_NBYTES
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.reduction import Combine, accumulator_dtype, combiner, row_combiner
from flagcx.transport.shared_memory.words import CALL_LOG_MASK, EXCHANGE, SEQUENCE_MASK

_SERVED = MappingProxyType(
    {
        "allreduce": ("one_shot", ONE_SHOT_NBYTES, ONE_SHOT_NBYTES),
        "allgather": ("direct", 192 << 10, 192 << 10),
        "reduce_scatter": ("direct", 256 << 10, ONE_SHOT_NBYTES),
        "alltoall": ("direct", 256 << 10, ONE_SHOT_NBYTES),
    }
)
"""The algorithm, and the longest message or block of two ranks and of more: from there on two_shot or
cross-memory attach is quicker, measured on 2 cores of an AMD EPYC. None is longer than MAPPED_PART_NBYTES."""
_SKIP_NBYTES = 4 << 10
"""From blocks of so many bytes on, one of two ranks does not leave itself its own."""


class OneShot:
    """A collective in one exchange: all-reduce, all-gather, reduce-scatter or all-to-all.

    The same bits on every rank: sums are made in rank order.
    """

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        dtype, count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        collective, size = COLLECTIVES[call.schedule.collective], arena.size
        self._looks_back = collective.name != "allreduce"
        blocks = collective.input_blocks(size)
        own = arena.rank * count if blocks > 1 else 0  # what this rank reads of each slot begins here
        self._combine: Combine | None = None
        self._accumulator: np.ndarray | None = None
        in_rows = False
        if collective.reduces:
            rows = row_combiner(call.op, call.dtype, size, count)  # type: ignore[arg-type]
            in_rows, self._combine = rows is not None, rows or combiner(call.op, call.dtype, size)  # type: ignore[arg-type]
            wide = accumulator_dtype(call.op, call.dtype, size)  # type: ignore[arg-type]
            self._accumulator = arena.accumulator(count, wide) if wide != dtype else None
        self._left, self._own = slice(None), None
        if size == blocks == 2 and count * dtype.itemsize >= _SKIP_NBYTES:
            self._left, self._own = slice(count - own, 2 * count - own), slice(own, own + count)
        self._slots: list[tuple[np.ndarray, Any]] = []
        for at in arena.areas.exchanges(blocks * count * dtype.itemsize):
            mine = arena.view(arena.rank, at, blocks * count, dtype)[self._left]
            read = at + own * dtype.itemsize
            views = [arena.view(q, read, count, dtype) for q in range(size)]
            self._slots.append((mine, arena.rows(read, count, dtype) if in_rows else views))
        self._turns = len(self._slots) - 1

    @staticmethod
    def serves(collective: str, algorithm: str, nbytes: int, size: int) -> bool:
        """Whether a call's contribution fits into a slot, and each rank reads from all.

        Args:
            collective: What is called.
            algorithm: How.
            nbytes: Bytes of a rank's message, or of each of its blocks.
            size: Number of ranks.
        """
        named, *longest = _SERVED.get(collective, ("", 0, 0))
        fits = nbytes * COLLECTIVES[collective].input_blocks(size) <= EXCHANGE_NBYTES
        return named == algorithm and size > 1 and 0 < nbytes <= longest[size > 2] and fits

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        arena, signals = self._arena, self._signals
        turn = arena.turns
        arena.turns = turn + 1
        mine, slots = self._slots[turn & self._turns]
        if sendbuf.ndim != 1:
            sendbuf = sendbuf.reshape(-1)
        if recvbuf is not sendbuf and recvbuf.ndim != 1:
            recvbuf = recvbuf.reshape(-1)
        if self._own is None:
            mine[...] = sendbuf
        else:
            mine[...] = sendbuf[self._left]
            slots = [*slots]
            slots[arena.rank] = sendbuf[self._own]
        # The lines of arena.enter_exchange, without its frame.
        if signals.fence:
            signals.fence()
        sequence = signals.sequence
        signals.sequence = sequence + 1
        own, index = signals.own, EXCHANGE + (turn & 1)
        own[sequence & CALL_LOG_MASK] = value = self._signature | (sequence & SEQUENCE_MASK) << 1
        own[index] = value = value ^ signals.before
        for words in signals.others:
            if words[index] != value:
                signals.wait_call(words, index, value)
        if self._looks_back and sequence:
            signals.log.compare_last(sequence)
        if signals.fence:
            signals.fence()
        if self._combine is None:
            np.concatenate(slots, 0, recvbuf)
        else:
            self._combine(slots, recvbuf, recvbuf if self._accumulator is None else self._accumulator)


class Barrier:
    """All ranks enter the call before any leaves it."""

    def __init__(self, arena: Arena, signature: int) -> None:
        self._arena, self._signature = arena, signature

    def run(self, sendbuf: object, recvbuf: object) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        arena = self._arena
        turn = arena.turns
        arena.turns = turn + 1
        arena.enter_exchange(turn, self._signature)
