"""Middle-sized messages: the two-shot all-reduce, cut into pieces that flow through slots.

Each piece has one stripe a rank. Three stages work on it: leave the other ranks' stripes in this rank's slot;
reduce this rank's stripe from all slots; gather the reduced stripes. A stripe is reduced right into the slot
from which the others gather it, and copied to its own rank's array when they know of it.

Where every rank has a core, the three stages work on three successive pieces. A slot is written again three
pieces later or more, when the signals already waited for prove that all have read it. Where ranks share
cores, each signal costs a change of the rank that runs, so pieces are as long as the slots together, and each
is done before the next begins; then one slot does, and so it does for a call of one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcx.schedule.collectives import cut
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import STAGES
from flagcx.transport.shared_memory.arena import MAPPED_PART_NBYTES, Arena
from flagcx.transport.shared_memory.one_piece import Contributed, Exchanged, OnePiece, longest_piece
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.words import ARRIVED, REDUCED

_LINE_NBYTES = 64
_LEAST_DEPTH, _MOST_DEPTH = 3, 8
_RING_NBYTES = 2 << 20
"""What the slots that take turns have together: more than a second-level cache. A rank writes a slot far
quicker that the peer's cache has forgotten."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """The slots of one stage, cut for one length of piece.

    Attributes:
        low, high: Where the part that this rank reduces begins and ends.
        contributed: What the others need of this rank's piece: start, stop, slot.
        sources: All ranks' parts of what this rank reduces.
        reduced: This rank's slot for what it has reduced.
        gathered: What the other ranks have reduced: start, stop, slot.
    """

    low: int
    high: int
    contributed: list[tuple[int, int, np.ndarray]]
    sources: list[np.ndarray]
    reduced: np.ndarray
    gathered: list[tuple[int, int, np.ndarray]]


class TwoShotSlots:
    """All-reduce through slots. Sums are made in rank order, so all ranks get the same bits."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._dtype, self._count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        size, itemsize, line = arena.size, self._dtype.itemsize, _LINE_NBYTES
        crowded, slots_nbytes = arena.signals.crowded, STAGES * arena.areas.slot_nbytes
        longest = longest_piece(arena)
        pieces = -(-self._count * itemsize // longest)
        self._piece = min(-(-self._count * itemsize // (pieces * line)) * line // itemsize, self._count)
        self._pieces = -(-self._count // self._piece)
        self._lag = self._pieces > 1 and not crowded
        nbytes = self._piece * itemsize
        depth = _LEAST_DEPTH if self._lag else 1
        if nbytes >= _RING_NBYTES // _MOST_DEPTH // 2:
            most = slots_nbytes if crowded else min(_RING_NBYTES, slots_nbytes)
            depth = max(min(most // nbytes, _MOST_DEPTH), depth)
        last = self._count - (self._pieces - 1) * self._piece
        self._final = [self._stage(stage, last) for stage in range(depth)]
        self._whole = self._final
        if last < self._piece:
            self._whole = [self._stage(stage, self._piece) for stage in range(depth)]
        self._combine = combiner(call.op, call.dtype, size)  # type: ignore[arg-type]
        wide = accumulator_dtype(call.op, call.dtype, size)  # type: ignore[arg-type]
        self._tile = MAPPED_PART_NBYTES // itemsize
        self._accumulator = arena.accumulator(self._tile, wide)

    def _stage(self, stage: int, length: int) -> _Stage:
        arena, areas, size, rank = self._arena, self._arena.areas, self._arena.size, self._arena.rank
        stripes = cut(length, size)
        at = areas.contributed + stage * self._piece * self._dtype.itemsize
        slots = [arena.view(q, at, length, self._dtype) for q in range(size)]
        low, high = stripes[rank], stripes[rank + 1]
        widest = -(-self._piece // size)
        at = areas.reduced + stage * widest * self._dtype.itemsize
        reduced = [arena.view(q, at, widest, self._dtype) for q in range(size)]
        return _Stage(
            low,
            high,
            [(a, b, slots[rank][a:b]) for a, b in ((0, low), (high, length)) if b > a],
            [slot[low:high] for slot in slots],
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
        self.contribute(sendbuf)
        self.finish(sendbuf, recvbuf)

    def contribute(self, sendbuf: np.ndarray, piece: int = 0) -> None:
        """Leaves the other ranks' stripes of a piece in the slot: of the first before the call is entered."""
        start, stage = self._at(piece)
        for low, high, slot in stage.contributed:
            slot[...] = sendbuf[start + low : start + high]

    def finish(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the rest of a call to whose first piece this rank has contributed."""
        pieces, lag = self._pieces, self._lag
        for turn in range(pieces + 2 * lag):
            if turn < pieces:
                if turn:
                    self.contribute(sendbuf, turn)
                self._signals.count(ARRIVED, self._arena.pieces + turn + 1)
            if lag <= turn < pieces + lag:
                self._reduce(turn - lag, sendbuf, recvbuf)
            if turn >= 2 * lag:
                self._gather(turn - 2 * lag, recvbuf)
        self._arena.pieces += pieces

    def _at(self, piece: int) -> tuple[int, _Stage]:
        stages = self._final if piece == self._pieces - 1 else self._whole
        return piece * self._piece, stages[(self._arena.pieces + piece) % len(stages)]

    def _reduce(self, piece: int, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        start, stage = self._at(piece)
        low, high = start + stage.low, start + stage.high
        sources, out, tile = stage.sources, stage.reduced, self._tile
        sources[self._arena.rank] = sendbuf[low:high]
        self._signals.await_counts(ARRIVED, self._arena.pieces + piece + 1)
        for at in range(0, high - low, tile):
            part = slice(at, at + tile)
            into = out[part]
            self._combine([source[part] for source in sources], into, self._accumulator[: len(into)])
        sources[self._arena.rank] = out  # let go of the caller's array
        self._signals.count(REDUCED, self._arena.pieces + piece + 1)
        recvbuf[low:high] = out

    def _gather(self, piece: int, recvbuf: np.ndarray) -> None:
        start, stage = self._at(piece)
        self._signals.await_counts(REDUCED, self._arena.pieces + piece + 1)
        for low, high, slot in stage.gathered:
            recvbuf[start + low : start + high] = slot


def through_slots(arena: Arena, call: Call, signature: int) -> TwoShotSlots | Contributed:
    """The plan of an all-reduce through slots, in as few pieces as it may have."""
    nbytes = int(call.counts) * call.dtype.numpy.itemsize  # type: ignore[arg-type]
    for plan in (Exchanged, OnePiece):
        if plan.serves(nbytes, arena):
            return plan(arena, call, signature)
    return TwoShotSlots(arena, call, signature)
