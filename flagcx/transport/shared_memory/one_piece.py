"""Middle-sized messages that fit into the slots at once: the two-shot all-reduce with as few steps as can be.

A rank leaves the other ranks' stripes in its slot before it enters the call, so that its word in the call log
announces them too. It reduces its own stripe right into the slot from which the others gather it, and copies
it to its own array when they know of it. One slot does: who writes it again has seen every peer's signal that
it has reduced what lay there; and a reduced stripe is written when all have entered a later call.

Two ranks leave each other the whole of a shorter message, and both add it up: as many bytes, one copy and one
signal less. These slots are those of ``one_shot.py``, which take turns.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise

import numpy as np

from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import STAGES, stripes
from flagcx.transport.shared_memory.arena import MAPPED_PART_NBYTES, Arena
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.words import ARRIVED, CALL_LOG_MASK, REDUCED

_STRIPE_NBYTES = 256 << 10
"""What each rank reduces of a piece at most, where every rank has a core."""
_EXCHANGED_NBYTES = 128 << 10
"""Measured on 2 cores of an AMD EPYC: 34 us beside 45 at 128 KiB, and no slower where caches lie apart."""


def longest_piece(arena: Arena) -> int:
    """The longest piece that goes through the slots at once, in bytes."""
    slot_nbytes = arena.areas.slot_nbytes
    return STAGES * slot_nbytes if arena.signals.crowded else min(slot_nbytes, _STRIPE_NBYTES * arena.size)


class Contributed:
    """An all-reduce in one piece to which a rank contributes before it enters the call."""

    def __init__(self, arena: Arena, signature: int) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        signals, sendbuf = self._signals, sendbuf.reshape(-1)
        self.contribute(sendbuf)
        index = signals.sequence & CALL_LOG_MASK
        if signals.fence:
            signals.fence()
        value, late = signals.enter(self._signature), False
        for words in signals.others:
            if words[index] != value:
                signals.wait_call(words, index, value)
                # A peer whose array is shared enters before it contributes.
                late = late or words[index] != value
        if signals.fence:
            signals.fence()
        if late:
            self._exchange_arrivals()
        self.finish(sendbuf, recvbuf.reshape(-1))

    def run_entered(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call after it is entered in the call log. The arrays are one-dimensional."""
        self.contribute(sendbuf)
        self._exchange_arrivals()
        self.finish(sendbuf, recvbuf)

    def _exchange_arrivals(self) -> None:
        self._signals.count(ARRIVED, self._arena.pieces + 1)
        self._signals.await_counts(ARRIVED, self._arena.pieces + 1)

    @abstractmethod
    def contribute(self, sendbuf: np.ndarray) -> None:
        """Leaves in a slot what the other ranks need. The array is one-dimensional."""

    @abstractmethod
    def finish(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Does the rest, when all have contributed, as they have said."""


class Exchanged(Contributed):
    """All-reduce ``two_shot`` of two ranks: each adds up the whole message, in rank order."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        super().__init__(arena, signature)
        count, dtype = int(call.counts), call.dtype.numpy  # type: ignore[arg-type]
        places = arena.areas.exchanges(count * dtype.itemsize)
        self._slots = [[arena.view(q, at, count, dtype) for q in range(arena.size)] for at in places]
        self._combine = combiner(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
        wide = accumulator_dtype(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
        self._accumulator = arena.accumulator(count, wide)

    @staticmethod
    def serves(nbytes: int, arena: Arena) -> bool:
        """Whether this is quicker than reducing a stripe each."""
        return arena.size == 2 and nbytes <= _EXCHANGED_NBYTES

    def contribute(self, sendbuf: np.ndarray) -> None:
        """Leaves the message in the slot whose turn it is."""
        self._turn()[self._arena.rank][...] = sendbuf

    def finish(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Adds up what both have left."""
        slots, arena = self._turn(), self._arena
        arena.turns += 1
        arena.pieces += 1
        self._combine(slots, recvbuf, self._accumulator)

    def _turn(self) -> list[np.ndarray]:
        return self._slots[self._arena.turns % len(self._slots)]


class OnePiece(Contributed):
    """All-reduce ``two_shot``, a stripe a rank. Sums are made in rank order: the same bits on all."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        super().__init__(arena, signature)
        size, rank, areas, dtype = arena.size, arena.rank, arena.areas, call.dtype.numpy
        count = int(call.counts)  # type: ignore[arg-type]
        bounds = stripes(count, dtype.itemsize, size)
        low, high = bounds[rank : rank + 2]
        slots = [arena.view(q, areas.contributed, count, dtype) for q in range(size)]
        reduced = [arena.view(q, areas.reduced, b - a, dtype) for q, (a, b) in enumerate(pairwise(bounds))]
        others = [slice(a, b) for a, b in ((0, low), (high, count)) if b > a]
        self._contributed = [(part, slots[rank][part]) for part in others]
        self._own, self._reduced = slice(low, high), reduced[rank]
        self._sources = [slot[low:high] for slot in slots]
        self._gathered = [
            (slice(a, b), reduced[q]) for q, (a, b) in enumerate(pairwise(bounds)) if q != rank and b > a
        ]
        self._combine = combiner(call.op, call.dtype, size)  # type: ignore[arg-type]
        wide = accumulator_dtype(call.op, call.dtype, size)  # type: ignore[arg-type]
        self._accumulator = arena.accumulator(high - low, wide)

    @staticmethod
    def serves(nbytes: int, arena: Arena) -> bool:
        """Whether a message is one piece, and its stripes no longer than what is added up at a time."""
        return nbytes <= min(longest_piece(arena), MAPPED_PART_NBYTES * arena.size)

    def contribute(self, sendbuf: np.ndarray) -> None:
        """Leaves the other ranks' stripes in the slot. The array is one-dimensional."""
        for part, slot in self._contributed:
            slot[...] = sendbuf[part]

    def finish(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Reduces and gathers what all ranks have contributed, as they have said."""
        sources, own, reduced, rank = self._sources, self._own, self._reduced, self._arena.rank
        self._arena.pieces = done = self._arena.pieces + 1
        sources[rank] = sendbuf[own]
        self._combine(sources, reduced, self._accumulator)
        sources[rank] = reduced  # let go of the caller's array
        self._signals.count(REDUCED, done)
        recvbuf[own] = reduced
        self._signals.await_counts(REDUCED, done)
        for part, stripe in self._gathered:
            recvbuf[part] = stripe
