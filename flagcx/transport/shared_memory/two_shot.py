"""Middle-sized messages: the two-shot all-reduce, cut into pieces that flow through slots.

Each piece has one stripe a rank. Three stages work on it: leave the other ranks' stripes in this rank's slot;
reduce this rank's stripe from all slots; gather the reduced stripes. Of two ranks each reduces the whole
piece, since a copy of a reduced stripe and a sum cost the same; then nothing is gathered.

Where every rank has a core, the three stages work on three successive pieces. A slot is written again three
pieces later or more, when the signals already waited for prove that all have read it. Where ranks share
cores, each signal costs a change of the rank that runs, so pieces are as long as the slots together, and each
is done before the next begins; then one slot does, and so it does for a call of one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time_ns as now

import numpy as np

from flagcx.schedule.collectives import cut
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import STAGES
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.words import ARRIVED, REDUCED

_LINE_NBYTES = 64
_LEAST_DEPTH, _MOST_DEPTH = 3, 8
_RING_NBYTES = 2 << 20
"""What the slots that take turns have together: more than a second-level cache. A rank writes a slot far
quicker that the peer's cache has forgotten."""
_STRIPE_NBYTES = 256 << 10
"""What each rank reduces of a piece at most, where every rank has a core."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """The slots of one stage, cut for one length of piece.

    Attributes:
        low, high: Where the part that this rank reduces begins and ends.
        contributed: What the others need of this rank's piece: start, stop, slot.
        sources: All ranks' parts of what this rank reduces; its own is put in when it is known.
        reduced: This rank's slot for what it has reduced; None where nobody gathers it.
        gathered: What the other ranks have reduced: start, stop, slot.
        nbytes: Bytes that this rank contributes.
    """

    low: int
    high: int
    contributed: list[tuple[int, int, np.ndarray]]
    sources: list[np.ndarray]
    reduced: np.ndarray | None
    gathered: list[tuple[int, int, np.ndarray]]
    nbytes: int


class TwoShotSlots:
    """All-reduce through slots. Sums are made in rank order, so all ranks get the same bits."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._dtype, self._count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        size, itemsize, line = arena.size, self._dtype.itemsize, _LINE_NBYTES
        slots_nbytes = STAGES * arena.areas.slot_nbytes
        longest = (
            slots_nbytes if arena.signals.crowded else min(arena.areas.slot_nbytes, _STRIPE_NBYTES * size)
        )
        pieces = -(-self._count * itemsize // longest)
        self._piece = min(-(-self._count * itemsize // (pieces * line)) * line // itemsize, self._count)
        self._pieces = -(-self._count // self._piece)
        self._lag, self._pace = self._pieces > 1 and not arena.signals.crowded, arena.pace
        nbytes = self._piece * itemsize
        depth = _LEAST_DEPTH if self._lag else 1
        if nbytes >= _RING_NBYTES // _MOST_DEPTH // 2:
            ring = slots_nbytes if arena.signals.crowded else min(_RING_NBYTES, slots_nbytes)
            depth = max(min(ring // nbytes, _MOST_DEPTH), depth)
        last = self._count - (self._pieces - 1) * self._piece
        self._final = [self._stage(stage, last) for stage in range(depth)]
        self._whole = self._final
        if last < self._piece:
            self._whole = [self._stage(stage, self._piece) for stage in range(depth)]
        self._combine = combiner(call.op, call.dtype, size)  # type: ignore[arg-type]
        wide = accumulator_dtype(call.op, call.dtype, size)  # type: ignore[arg-type]
        self._tile = arena.part_nbytes // itemsize
        self._accumulator = arena.accumulator(self._tile, wide)

    def _stage(self, stage: int, length: int) -> _Stage:
        arena, areas, size, rank = self._arena, self._arena.areas, self._arena.size, self._arena.rank
        each = size > 2
        stripes = cut(length, size) if each else [0, length]
        widest = -(-self._piece // size) if each else 0
        at = areas.contributed + stage * self._piece * self._dtype.itemsize
        slots = [arena.view(q, at, length, self._dtype) for q in range(size)]
        low, high = (stripes[rank], stripes[rank + 1]) if each else (0, length)
        contributed = [(0, low), (high, length)] if each else [(0, length)]
        at = areas.reduced + stage * widest * self._dtype.itemsize
        reduced = [arena.view(q, at, widest, self._dtype) for q in range(size)]
        return _Stage(
            low,
            high,
            [(a, b, slots[rank][a:b]) for a, b in contributed if b > a],
            [slot[low:high] for slot in slots],
            reduced[rank][: high - low] if each else None,
            [
                (a, b, slot[: b - a])
                for q, (slot, a, b) in enumerate(zip(reduced, stripes, stripes[1:], strict=False))
                if each and q != rank and b > a
            ],
            sum(b - a for a, b in contributed) * self._dtype.itemsize,
        )

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        self._signals.enter(self._signature)
        self.run_entered(sendbuf.reshape(-1), recvbuf.reshape(-1))

    def run_entered(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call after it is entered in the call log. The arrays are one-dimensional."""
        pieces, first, lag = self._pieces, self._arena.pieces, self._lag
        self._arena.pieces = first + pieces
        for turn in range(pieces + 2 * lag):
            if turn < pieces:
                self._contribute(turn, first, sendbuf)
            if lag <= turn < pieces + lag:
                self._reduce(turn - lag, first, sendbuf, recvbuf)
            if turn >= 2 * lag:
                self._gather(turn - 2 * lag, first, recvbuf)

    def _at(self, piece: int, first: int) -> tuple[int, _Stage]:
        stages = self._final if piece == self._pieces - 1 else self._whole
        return piece * self._piece, stages[(first + piece) % len(stages)]

    def _contribute(self, piece: int, first: int, sendbuf: np.ndarray) -> None:
        start, stage = self._at(piece, first)
        begin = now()
        for low, high, slot in stage.contributed:
            slot[...] = sendbuf[start + low : start + high]
        self._pace.note(stage.nbytes, now() - begin)
        self._signal(ARRIVED, first + piece + 1)

    def _reduce(self, piece: int, first: int, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        start, stage = self._at(piece, first)
        low, high = start + stage.low, start + stage.high
        sources, tile = stage.sources, self._tile
        sources[self._arena.rank] = sendbuf[low:high]
        out = recvbuf[low:high]
        self._await(ARRIVED, first + piece + 1)
        if high - low <= tile:
            self._combine(sources, out, self._accumulator[: high - low])
        else:
            for at in range(0, high - low, tile):
                part = slice(at, at + tile)
                into = out[part]
                self._combine([source[part] for source in sources], into, self._accumulator[: len(into)])
        if stage.reduced is not None:
            stage.reduced[...] = out
        sources[self._arena.rank] = sources[self._arena.rank - 1]  # let go of the caller's array
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
