"""Large messages, and arrays that are shared: the two-shot all-reduce straight in the peers' arrays.

Each rank owns a stripe of the message. It reads that stripe of every peer's array, adds in rank order
and writes the sum into every peer's array: an array of ``comm.empty`` through its mapping, any other by
cross-memory attach. A barrier stands before and after.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np

from flagcx.schedule.collectives import cut
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.heap import SHARED
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.signals import ABORTED, DONE, LEDGER_MASK, LOCATIONS, SHARED_BIT
from flagcx.transport.shared_memory.two_shot import TwoShotSlots

_MAPPED_PIECE_NBYTES = 256 << 10
_COPIED_PIECE_NBYTES = 128 << 10  # leaves room in the second-level cache for what is copied in
_STRIPE_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of this rank's stripe, ready to be worked on.

    Attributes:
        fetches: Calls that bring peers' parts here: function, local address, peer's address, bytes.
        sources: Everybody's parts, in rank order.
        out: Where the sum goes.
        accumulator: Where it is made.
        stores: Peers' parts that are mapped here.
        pushes: Calls that bring the sum to the other peers.
    """

    fetches: list[tuple]
    sources: list[np.ndarray]
    out: np.ndarray
    accumulator: np.ndarray
    stores: list[np.ndarray]
    pushes: list[tuple]


class _Last:
    """The call before: its arrays, where all arrays lay, and the pieces prepared for it."""

    __slots__ = ("given", "here", "pieces", "places", "result", "there")

    def __init__(self, given: np.ndarray, result: np.ndarray, here: int, there: int) -> None:
        self.given, self.result = weakref.ref(given), weakref.ref(result)
        self.here, self.there = here, there
        self.places: list[int] = []
        self.pieces: list[_Piece] = []


class Direct:
    """All-reduce in the peers' arrays; through slots where neither way into them is open.

    Args:
        arena: The shared memory.
        call: The call.
        signature: Its signature.
        cross_memory: Whether arrays that are not shared are reached too.
    """

    def __init__(self, arena: Arena, call: Call, signature: int, cross_memory: bool) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._dtype, self._count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        self._cross_memory = cross_memory
        self._slots = None if cross_memory else TwoShotSlots(arena, call, signature)
        self._combine = combiner(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
        piece = min(_MAPPED_PIECE_NBYTES // self._dtype.itemsize, self._count)
        self._accumulator = np.empty(piece, accumulator_dtype(call.op, call.dtype))  # type: ignore[arg-type]
        self._incoming = [np.empty(piece if cross_memory else 0, self._dtype) for _ in range(arena.size)]
        self._low, self._high = self._stripe()
        self._last: _Last | None = None

    def _stripe(self) -> tuple[int, int]:
        """This rank's stripe; stripes begin on cache lines, so that no two ranks write one line."""
        line = max(_STRIPE_ALIGNMENT // self._dtype.itemsize, 1)
        bounds = cut(-(-self._count // line), self._arena.size)
        rank = self._arena.rank
        return min(bounds[rank] * line, self._count), min(bounds[rank + 1] * line, self._count)

    def run(self, given: np.ndarray, result: np.ndarray) -> None:
        """See ``transport.base.Plan``."""
        signals = self._signals
        index = signals.sequence & LEDGER_MASK
        last = self._last
        if last is None or last.given() is not given or last.result() is not result:
            last = self._last = self._locate(given, result)
        here, there = last.here, last.there
        shared = here & there & SHARED
        if not (shared or self._cross_memory):
            signals.enter(self._signature)
            self._slots.run_entered(given.reshape(-1), result.reshape(-1))  # type: ignore[union-attr]
            return
        own = signals.own
        own[LOCATIONS + 2 * index] = here
        own[LOCATIONS + 2 * index + 1] = there
        if signals.fence:
            signals.fence()
        value = signals.enter(self._signature | SHARED_BIT if shared else self._signature)
        for words in signals.others:
            if words[index] != value:
                signals.wait_ledger(words, index, value)
        if signals.fence:
            signals.fence()
        at = LOCATIONS + 2 * index
        places = [words[i] for words in signals.words for i in (at, at + 1)]
        if not (self._cross_memory or all(words[index] & SHARED_BIT for words in signals.others)):
            self._slots.run_entered(given.reshape(-1), result.reshape(-1))  # type: ignore[union-attr]
            return
        if places != last.places:
            last.pieces = self._prepare(given, result, places)
            last.places = places
        self._work(last.pieces)
        self._leave()

    def _locate(self, given: np.ndarray, result: np.ndarray) -> _Last:
        heap = self._arena.heap
        here = heap.locate(given) or _address(given)
        there = here if result is given else heap.locate(result) or _address(result)
        return _Last(given, result, here, there)

    def _work(self, pieces: list[_Piece]) -> None:
        combine = self._combine
        for piece in pieces:
            for fetch, near, far, nbytes in piece.fetches:
                fetch(near, far, nbytes)
            out = piece.out
            combine(piece.sources, out, piece.accumulator)
            self._check_peers()
            for store in piece.stores:
                store[...] = out
            for push, near, far, nbytes in piece.pushes:
                push(near, far, nbytes)

    def _check_peers(self) -> None:
        """Ends the call where a rank has given up: it may have freed the array that would be written."""
        for q, words in enumerate(self._signals.words):
            if words[ABORTED]:
                self._signals.blame(q, False)

    # -- preparing --------------------------------------------------------------------------------

    def _prepare(self, given: np.ndarray, result: np.ndarray, places: list[int]) -> list[_Piece]:
        """Prepares the pieces. Views of the caller's arrays are made by address, so that they keep no
        array alive; they are used only while ``_Last`` sees the very arrays alive."""
        rank = self._arena.rank
        inputs = [self._map(q, place) for q, place in enumerate(places[::2])]
        outputs = [self._map(q, place) for q, place in enumerate(places[1::2])]
        inputs[rank] = _unowned(_address(given), self._count, self._dtype)
        outputs[rank] = _unowned(_address(result), self._count, self._dtype)
        copied = any(a is None for a in (*inputs, *outputs))
        piece = (_COPIED_PIECE_NBYTES if copied else _MAPPED_PIECE_NBYTES) // self._dtype.itemsize
        return [
            self._prepare_piece(start, min(start + piece, self._high), inputs, outputs, places)
            for start in range(self._low, self._high, piece)
        ]

    def _prepare_piece(self, start: int, stop: int, inputs, outputs, places: list[int]) -> _Piece:
        rank, attached, size = self._arena.rank, self._arena.attached, self._dtype.itemsize
        nbytes = (stop - start) * size
        out = outputs[rank][start:stop]
        peers = [q for q in range(self._arena.size) if q != rank]
        fetches = [
            (attached[q].read, _address(self._incoming[q]), places[2 * q] + start * size, nbytes)
            for q in peers
            if inputs[q] is None
        ]
        sources = [
            self._incoming[q][: stop - start] if a is None else a[start:stop] for q, a in enumerate(inputs)
        ]
        stores = [outputs[q][start:stop] for q in peers if outputs[q] is not None]
        pushes = [
            (attached[q].write, _address(out), places[2 * q + 1] + start * size, nbytes)
            for q in peers
            if outputs[q] is None
        ]
        return _Piece(fetches, sources, out, self._accumulator[: stop - start], stores, pushes)

    def _map(self, peer: int, location: int) -> np.ndarray | None:
        """A peer's array that is shared, or None for one that only cross-memory attach reaches."""
        if peer == self._arena.rank or not location & SHARED:
            return None
        raw = self._arena.peer_heaps.view(peer, location, self._count * self._dtype.itemsize)
        return raw.view(self._dtype)

    def _leave(self) -> None:
        """The barrier after: nobody touches my array any more."""
        arena, signals = self._arena, self._signals
        arena.done += 1
        if signals.fence:
            signals.fence()
        signals.own[DONE] = arena.done
        for words in signals.others:
            if words[DONE] < arena.done:
                signals.wait_count(words, DONE, arena.done)
        if signals.fence:
            signals.fence()


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _unowned(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype)
