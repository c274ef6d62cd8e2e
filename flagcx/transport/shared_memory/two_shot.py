"""Middle-sized messages: the two-shot all-reduce, cut into pieces that flow through a ring of slots.

Each piece has one stripe a rank. Three stages work on three successive pieces: leave the other ranks'
stripes in my slot; reduce my stripe from everybody's slot; gather the reduced stripes. A slot is
written again four pieces later, when the signals already waited for prove that all have read it.
"""

from __future__ import annotations

import numpy as np

from flagcx.collectives import cut
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import STAGES, Arena
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.signals import ARRIVED, REDUCED


class TwoShotSlots:
    """All-reduce through slots. The owner of a stripe adds in rank order, so all get the same bits."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        dtype, self._count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._piece = arena.areas.slot_nbytes // dtype.itemsize
        self._given, self._reduced = (
            [
                [
                    arena.view(q, area + s * arena.areas.slot_nbytes, self._piece, dtype)
                    for q in range(arena.size)
                ]
                for s in range(STAGES)
            ]
            for area in (arena.areas.given, arena.areas.reduced)
        )
        self._combine = combiner(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
        self._accumulator = np.empty(
            -(-self._piece // arena.size),
            accumulator_dtype(call.op, call.dtype),  # type: ignore[arg-type]
        )

    def run(self, given: np.ndarray, result: np.ndarray) -> None:
        """See ``transport.base.Plan``."""
        self._signals.enter(self._signature)
        self.run_entered(given.reshape(-1), result.reshape(-1))

    def run_entered(self, given: np.ndarray, result: np.ndarray) -> None:
        """Runs the call once it stands in the ledger. The arrays are one-dimensional."""
        pieces = -(-self._count // self._piece)
        first = self._arena.pieces
        self._arena.pieces = first + pieces
        for turn in range(pieces + 2):
            if turn < pieces:
                self._leave(turn, first, given)
            if 1 <= turn <= pieces:
                self._reduce(turn - 1, first, given, result)
            if turn >= 2:
                self._gather(turn - 2, first, result)

    def _stripes(self, piece: int) -> tuple[int, tuple[int, ...]]:
        start = piece * self._piece
        return start, cut(min(self._piece, self._count - start), self._arena.size)

    def _leave(self, piece: int, first: int, given: np.ndarray) -> None:
        start, stripes = self._stripes(piece)
        low, high, end = stripes[self._arena.rank], stripes[self._arena.rank + 1], stripes[-1]
        slot = self._given[(first + piece) % STAGES][self._arena.rank]
        if low:
            slot[:low] = given[start : start + low]
        if high < end:
            slot[high:end] = given[start + high : start + end]
        self._tell(ARRIVED, first + piece + 1)

    def _reduce(self, piece: int, first: int, given: np.ndarray, result: np.ndarray) -> None:
        rank = self._arena.rank
        start, stripes = self._stripes(piece)
        low, high = stripes[rank], stripes[rank + 1]
        self._await(ARRIVED, first + piece + 1)
        stage = (first + piece) % STAGES
        sources = [slot[low:high] for slot in self._given[stage]]
        sources[rank] = given[start + low : start + high]
        out = result[start + low : start + high]
        self._combine(sources, out, self._accumulator[: high - low])
        self._reduced[stage][rank][: high - low] = out
        self._tell(REDUCED, first + piece + 1)

    def _gather(self, piece: int, first: int, result: np.ndarray) -> None:
        start, stripes = self._stripes(piece)
        self._await(REDUCED, first + piece + 1)
        for q, slot in enumerate(self._reduced[(first + piece) % STAGES]):
            if q != self._arena.rank:
                low, high = stripes[q], stripes[q + 1]
                result[start + low : start + high] = slot[: high - low]

    def _tell(self, counter: int, value: int) -> None:
        signals = self._signals
        if signals.fence:
            signals.fence()
        signals.own[counter] = value

    def _await(self, counter: int, value: int) -> None:
        signals = self._signals
        for words in signals.others:
            if words[counter] < value:
                signals.wait_count(words, counter, value)
        if signals.fence:
            signals.fence()
