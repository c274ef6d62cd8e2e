"""Small messages: every rank leaves its message in a slot, then reads everybody's.

Two slots take turns. A rank that writes a slot for the second time has seen every peer's signal of the
call between, and a peer signals that call only after it has read the slot; so nothing else is needed.
The entry in the ledger is the signal.
"""

from __future__ import annotations

import numpy as np

from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import ONE_SHOT_NBYTES, Arena
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.signals import LEDGER_MASK, SEQUENCE_SHIFT


class OneShot:
    """All-reduce in one exchange. The same bits on every rank: all add in rank order."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        dtype, count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._slots = []
        for turn in (0, 1):
            at = arena.areas.one_shot + turn * ONE_SHOT_NBYTES
            views = [arena.view(q, at, count, dtype) for q in range(arena.size)]
            self._slots.append((views[arena.rank], views))
        self._combine = combiner(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
        wide = accumulator_dtype(call.op, call.dtype)  # type: ignore[arg-type]
        self._accumulator = np.empty(count, wide) if wide != dtype else None

    def run(self, given: np.ndarray, result: np.ndarray) -> None:
        """See ``transport.base.Plan``."""
        arena, signals = self._arena, self._signals
        turn = arena.one_shots
        arena.one_shots = turn + 1
        mine, slots = self._slots[turn & 1]
        if given.ndim != 1:
            given, result = given.reshape(-1), result.reshape(-1)
        mine[...] = given
        if signals.fence:
            signals.fence()
        sequence = signals.sequence
        signals.sequence = sequence + 1
        index = sequence & LEDGER_MASK
        value = sequence << SEQUENCE_SHIFT | self._signature
        signals.own[index] = value
        for words in signals.others:
            if words[index] != value:
                signals.wait_ledger(words, index, value)
        if signals.fence:
            signals.fence()
        self._combine(slots, result, result if self._accumulator is None else self._accumulator)


class Barrier:
    """All ranks enter the call before any leaves it."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._signals, self._signature = arena.signals, signature

    def run(self, given: object, result: object) -> None:
        """See ``transport.base.Plan``."""
        signals = self._signals
        if signals.fence:
            signals.fence()
        value = signals.enter(self._signature)
        index = (signals.sequence - 1) & LEDGER_MASK
        for words in signals.others:
            if words[index] != value:
                signals.wait_ledger(words, index, value)
        if signals.fence:
            signals.fence()
