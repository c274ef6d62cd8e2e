"""Middle-sized messages: the two-shot all-reduce, cut into pieces that flow through a ring of slots.

Each piece has one stripe a rank. Three stages work on three successive pieces: leave the other ranks'
stripes in this rank's slot; reduce this rank's stripe from all slots; gather the reduced stripes. A slot is
written again four pieces later, when the signals already waited for prove that all have read it. (A
call of one piece has waited for the same signals when it ends, so the next may use the same slot.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcx.schedule.collectives import cut
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import STAGES, Arena
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.words import ARRIVED, REDUCED


@dataclass(frozen=True, slots=True)
class _Stage:
    """The slots of one stage, cut for one length of piece.

    Attributes:
        low, high, end: Where this rank's stripe begins and ends, and where the piece ends.
        before, after: This rank's slot for what it contributes to the stripes before and after its own.
        sources: All ranks' parts of this rank's stripe; its own is put in when it is known.
        reduced: This rank's slot for its reduced stripe.
        gathered: The other ranks' reduced stripes: start, stop, slot.
    """

    low: int
    high: int
    end: int
    before: np.ndarray
    after: np.ndarray
    sources: list[np.ndarray]
    reduced: np.ndarray
    gathered: list[tuple[int, int, np.ndarray]]


class TwoShotSlots:
    """All-reduce through slots. The owner of a stripe adds in rank order, so all get the same bits."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._dtype, self._count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        self._piece = min(arena.areas.slot_nbytes // self._dtype.itemsize, self._count)
        pieces = -(-self._count // self._piece)
        last = self._count - (pieces - 1) * self._piece
        self._whole = [self._stage(stage, self._piece) for stage in range(STAGES)]
        self._final = [self._stage(stage, last) for stage in range(STAGES)]
        self._pieces = pieces
        self._combine = combiner(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
        widest = -(-self._piece // arena.size)
        self._accumulator = arena.accumulator(widest, accumulator_dtype(call.op, call.dtype, arena.size))  # type: ignore[arg-type]

    def _stage(self, stage: int, length: int) -> _Stage:
        arena, areas = self._arena, self._arena.areas
        stripes, rank = cut(length, arena.size), arena.rank

        def slots(area: int) -> list[np.ndarray]:
            at = area + stage * areas.slot_nbytes
            return [arena.view(q, at, length, self._dtype) for q in range(arena.size)]

        sendbuf, reduced = slots(areas.contributed), slots(areas.reduced)
        low, high = stripes[rank], stripes[rank + 1]
        return _Stage(
            low,
            high,
            length,
            sendbuf[rank][:low],
            sendbuf[rank][high:],
            [slot[low:high] for slot in sendbuf],
            reduced[rank][: high - low],
            [
                (a, b, slot[: b - a])
                for q, (slot, a, b) in enumerate(zip(reduced, stripes, stripes[1:], strict=False))
                if q != rank and b > a
            ],
        )

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        self._signals.enter(self._signature)
        self.run_entered(sendbuf.reshape(-1), recvbuf.reshape(-1))

    def run_entered(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call after it is entered in the call log. The arrays are one-dimensional."""
        pieces, first = self._pieces, self._arena.pieces
        self._arena.pieces = first + pieces
        for turn in range(pieces + 2):
            if turn < pieces:
                self._contribute(turn, first, sendbuf)
            if 1 <= turn <= pieces:
                self._reduce(turn - 1, first, sendbuf, recvbuf)
            if turn >= 2:
                self._gather(turn - 2, first, recvbuf)

    def _at(self, piece: int, first: int) -> tuple[int, _Stage]:
        if self._pieces == 1:  # no rank is a piece behind, so one slot does, and stays in the cache
            return 0, self._final[0]
        stages = self._final if piece == self._pieces - 1 else self._whole
        return piece * self._piece, stages[(first + piece) % STAGES]

    def _contribute(self, piece: int, first: int, sendbuf: np.ndarray) -> None:
        start, stage = self._at(piece, first)
        if stage.low:
            stage.before[...] = sendbuf[start : start + stage.low]
        if stage.high < stage.end:
            stage.after[...] = sendbuf[start + stage.high : start + stage.end]
        self._signal(ARRIVED, first + piece + 1)

    def _reduce(self, piece: int, first: int, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        start, stage = self._at(piece, first)
        low, high = start + stage.low, start + stage.high
        stage.sources[self._arena.rank] = sendbuf[low:high]
        out = recvbuf[low:high]
        self._await(ARRIVED, first + piece + 1)
        self._combine(stage.sources, out, self._accumulator[: high - low])
        stage.reduced[...] = out
        stage.sources[self._arena.rank] = stage.reduced  # let go of the caller's array
        self._signal(REDUCED, first + piece + 1)

    def _gather(self, piece: int, first: int, recvbuf: np.ndarray) -> None:
        start, stage = self._at(piece, first)
        self._await(REDUCED, first + piece + 1)
        for low, high, slot in stage.gathered:
            recvbuf[start + low : start + high] = slot

    def _signal(self, counter: int, value: int) -> None:
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
