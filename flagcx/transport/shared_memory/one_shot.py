"""Small messages: every rank leaves its message in a slot, then reads all slots.

Two slots take turns. A rank that writes a slot for the second time has seen every peer's signal of the
call between, and a peer signals that call only after it has read the slot; so nothing else is needed.
The entry in the call log is the signal. Longer messages take turns in as many slots as hold more than a
second-level cache: a rank writes a slot far quicker that the peers' caches have forgotten.
"""

from __future__ import annotations

import numpy as np

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import ONE_SHOT_NBYTES, ONE_SHOTS, Arena
from flagcx.transport.shared_memory.reduction import Combine, accumulator_dtype, combiner
from flagcx.transport.shared_memory.words import CALL_LOG_MASK, SEQUENCE_MASK

_LONG_NBYTES = 32 << 10


class OneShot:
    """A collective in one exchange: all-reduce, all-gather, reduce-scatter or all-to-all.

    The same bits on every rank: sums are made in rank order.
    """

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        dtype, count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        collective = COLLECTIVES[call.schedule.collective]
        blocks = collective.input_blocks(arena.size)
        own_block = arena.rank * count if blocks > 1 else 0  # what this rank reads of each slot
        self._slots = []
        long = blocks * count * dtype.itemsize >= _LONG_NBYTES
        self._turns = (ONE_SHOTS if long else 2) - 1
        for turn in range(self._turns + 1):
            at = arena.areas.one_shot + turn * ONE_SHOT_NBYTES
            mine = arena.view(arena.rank, at, blocks * count, dtype)
            read = at + own_block * dtype.itemsize
            self._slots.append((mine, [arena.view(q, read, count, dtype) for q in range(arena.size)]))
        self._looks_back = collective.name != "allreduce"
        self._combine: Combine | None = None
        self._accumulator: np.ndarray | None = None
        if collective.reduces:
            self._combine = combiner(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
            wide = accumulator_dtype(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
            self._accumulator = arena.accumulator(count, wide) if wide != dtype else None

    @staticmethod
    def serves(call: Call, size: int) -> bool:
        """Whether a call's contribution fits into a slot, and each rank reads from all."""
        schedule = call.schedule
        collective = COLLECTIVES[schedule.collective]
        if size == 1 or not isinstance(call.counts, int) or not call.counts:
            return False
        nbytes = call.counts * collective.input_blocks(size) * call.dtype.numpy.itemsize
        named = "one_shot" if collective.name == "allreduce" else "direct"
        symmetrical = collective.name in ("allreduce", "allgather", "reduce_scatter", "alltoall")
        return symmetrical and schedule.algorithm == named and nbytes <= ONE_SHOT_NBYTES

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        arena, signals = self._arena, self._signals
        turn = arena.one_shots
        arena.one_shots = turn + 1
        mine, slots = self._slots[turn & self._turns]
        if sendbuf.ndim != 1:
            sendbuf = sendbuf.reshape(-1)
        if recvbuf is not sendbuf and recvbuf.ndim != 1:
            recvbuf = recvbuf.reshape(-1)
        mine[...] = sendbuf
        if signals.fence:
            signals.fence()
        sequence = signals.sequence
        signals.sequence = sequence + 1
        index = sequence & CALL_LOG_MASK
        value = self._signature | (sequence & SEQUENCE_MASK) << 1
        signals.own[index] = value
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

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._signals, self._signature = arena.signals, signature

    def run(self, sendbuf: object, recvbuf: object) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        signals = self._signals
        if signals.fence:
            signals.fence()
        value = signals.enter(self._signature)
        index = (signals.sequence - 1) & CALL_LOG_MASK
        for words in signals.others:
            if words[index] != value:
                signals.wait_call(words, index, value)
        if signals.fence:
            signals.fence()
