"""Large messages, and arrays that are shared: the two-shot all-reduce straight in the peers' arrays.

Each rank owns a stripe of the message. It reads that stripe of every peer's array, adds in rank order
and writes the sum into every peer's array: an array of ``comm.empty`` through its mapping, any other by
cross-memory attach. A barrier stands before and after.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from time import perf_counter_ns as now

import numpy as np

from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import stripes
from flagcx.transport.shared_memory.arena import COPIED_PART_NBYTES, MAPPED_PART_NBYTES, Arena
from flagcx.transport.shared_memory.heap import SHARED
from flagcx.transport.shared_memory.in_place import InPlace
from flagcx.transport.shared_memory.quicker import QuickerOfTwo
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.two_shot import through_slots
from flagcx.transport.shared_memory.words import ABORTED, LOCATIONS, SHARED_BIT, WAYS

_SLOTS, _IN_PLACE = range(2)
_LONG_NBYTES = 1 << 20
"""From here on it is worth telling that an array could be shared."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of this rank's stripe, ready to be worked on.

    Attributes:
        fetches: Calls that bring peers' parts here: function, local address, peer's address, bytes.
        sources: All ranks' parts, in rank order.
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


class _Binding:
    """The call before: its arrays, where all arrays lay, and the pieces prepared for it."""

    __slots__ = ("pieces", "places", "received_at", "recvbuf", "sendbuf", "sent_from")

    def __init__(self, sendbuf: np.ndarray, recvbuf: np.ndarray, sent_from: int, received_at: int) -> None:
        self.sendbuf, self.recvbuf = weakref.ref(sendbuf), weakref.ref(recvbuf)
        self.sent_from, self.received_at = sent_from, received_at
        self.places: list[int] = []
        self.pieces: list[_Piece] = []

    def forget(self) -> None:
        """Lets go of the pieces; the next call with these arrays prepares them anew."""
        self.places, self.pieces = [], []


class Direct(InPlace):
    """All-reduce in the peers' arrays; through slots where neither way into them is open.

    Args:
        arena: The shared memory.
        call: The call.
        signature: Its signature.
        cross_memory: Whether arrays that are not shared are reached too.
        adapts: Whether they go through slots all the same where that is quicker.
    """

    def __init__(
        self, arena: Arena, call: Call, signature: int, cross_memory: bool, adapts: bool = False
    ) -> None:
        super().__init__(arena, call, signature)
        self._cross_memory = cross_memory
        self._long = self._count * self._dtype.itemsize >= _LONG_NBYTES
        self._quicker, self._way = QuickerOfTwo() if adapts else None, _SLOTS
        self._slots = None if cross_memory and not adapts else through_slots(arena, call, signature)
        self._combine = combiner(call.op, call.dtype, arena.size)  # type: ignore[arg-type]
        part = MAPPED_PART_NBYTES // self._dtype.itemsize
        self._accumulator = arena.accumulator(part, accumulator_dtype(call.op, call.dtype, arena.size))  # type: ignore[arg-type]
        self._incoming = [arena.incoming(q, self._dtype) for q in range(arena.size)]
        bounds = stripes(self._count, self._dtype.itemsize, arena.size)
        self._low, self._high = bounds[arena.rank : arena.rank + 2]
        self._binding: _Binding | None = None

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        binding = self._binding
        if binding is None or binding.sendbuf() is not sendbuf or binding.recvbuf() is not recvbuf:
            binding = self._binding = self._locate(sendbuf, recvbuf)
        shared = binding.sent_from & binding.received_at & SHARED
        if self._long and not shared:
            self._arena.private_calls += 1
        if not (shared or self._cross_memory):
            self._slots.run(sendbuf, recvbuf)  # type: ignore[union-attr]
        elif self._quicker is not None:
            self._run_the_quicker_way(binding, shared, sendbuf, recvbuf)
        else:
            index = self._enter(binding.sent_from, binding.received_at, shared)
            if self._cross_memory or all(words[index] & SHARED_BIT for words in self._signals.words):
                self._finish(self._work_in_arrays, binding, index, sendbuf, recvbuf)
            else:
                self._slots.run_entered(sendbuf.reshape(-1), recvbuf.reshape(-1))  # type: ignore[union-attr]

    def _run_the_quicker_way(
        self, binding: _Binding, shared: int, sendbuf: np.ndarray, recvbuf: np.ndarray
    ) -> None:
        """Through slots or in place, as rank 0 has said in the call before.

        A rank contributes before it enters the call. If one has not, all work in place.
        """
        quicker, slots, signals, way = self._quicker, self._slots, self._signals, self._way
        began = now()
        through, sent = int(way == _SLOTS and not shared), sendbuf.reshape(-1)
        if through:
            slots.contribute(sent)  # type: ignore[union-attr]
        signals.own[WAYS] = through | quicker.next() << 1  # type: ignore[union-attr]
        contributed = now()
        index = self._enter(binding.sent_from, binding.received_at, shared)
        entered = now()
        for words in signals.words:
            through = through and words[WAYS] & 1
        self._way = signals.words[0][WAYS] >> 1
        if through:
            slots.finish(sent, recvbuf.reshape(-1))  # type: ignore[union-attr]
        else:
            self._finish(self._work_in_arrays, binding, index, sendbuf, recvbuf)
        if bool(through) == (way == _SLOTS) and not shared:  # shared arrays take neither way's time
            quicker.note(way, now() - entered + contributed - began)  # type: ignore[union-attr]

    def _locate(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> _Binding:
        heap = self._arena.heap
        sent_from = heap.place(sendbuf)
        received_at = sent_from if recvbuf is sendbuf else heap.place(recvbuf)
        return _Binding(sendbuf, recvbuf, sent_from, received_at)

    def _work_in_arrays(
        self, binding: _Binding, index: int, sendbuf: np.ndarray, recvbuf: np.ndarray
    ) -> None:
        at = LOCATIONS + 2 * index
        places = [words[i] for words in self._signals.words for i in (at, at + 1)]
        if places != binding.places:
            binding.pieces = self._prepare(sendbuf, recvbuf, places)
            binding.places = places
            self._arena.prepared.add(binding)
        self._work(binding.pieces)

    def _work(self, pieces: list[_Piece]) -> None:
        combine = self._combine
        for piece in pieces:
            for fetch, local, remote, nbytes in piece.fetches:
                fetch(local, remote, nbytes)
            out = piece.out
            combine(piece.sources, out, piece.accumulator)
            self._check_peers()
            for store in piece.stores:
                store[...] = out
            for push, local, remote, nbytes in piece.pushes:
                push(local, remote, nbytes)

    def _check_peers(self) -> None:
        """Ends the call where a rank has given up: it may have freed the array that would be written."""
        for q, words in enumerate(self._signals.words):
            if words[ABORTED]:
                self._signals.blame(q, False)

    # -- preparing --------------------------------------------------------------------------------

    def _prepare(self, sendbuf: np.ndarray, recvbuf: np.ndarray, places: list[int]) -> list[_Piece]:
        """Prepares the pieces. Views of the caller's arrays are made by address, so that they keep no
        array alive; they are used only while ``_Binding`` sees the very arrays alive."""
        rank = self._arena.rank
        inputs = [self._map(q, place, self._count) for q, place in enumerate(places[::2])]
        outputs = [self._map(q, place, self._count) for q, place in enumerate(places[1::2])]
        inputs[rank] = _unowned(_address(sendbuf), self._count, self._dtype)
        outputs[rank] = _unowned(_address(recvbuf), self._count, self._dtype)
        copied = any(a is None for a in (*inputs, *outputs))
        piece = (COPIED_PART_NBYTES if copied else MAPPED_PART_NBYTES) // self._dtype.itemsize
        return [
            self._prepare_piece(start, min(start + piece, self._high), inputs, outputs, places)
            for start in range(self._low, self._high, piece)
        ]

    def _prepare_piece(self, start: int, stop: int, inputs, outputs, places: list[int]) -> _Piece:
        rank, attached, size = self._arena.rank, self._arena.steps.attached, self._dtype.itemsize
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


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _unowned(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype)
