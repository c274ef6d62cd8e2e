"""The all-reduce by a codec with a fixed rate: each number is coded twice, however many ranks there are.

::

    split into one stripe a rank -> code -> all-to-all -> decode, add in rank order (float32)
        -> code the sum -> all-gather -> decode

A rank sends 2 (n-1)/n of the coded message, as the dense two-shot form does of the plain one. The owner of a
stripe adds its own part uncoded, and then keeps what its coded sum decodes to, as all others do: so all
ranks end with the same bits. Long messages go in pieces: while one is on its way, the next is coded and
the one before decoded.

With a residual (error feedback) each rank adds to its next gradient what coding took from this one, and the
owner of a stripe what coding took from the sum.

Source: ZeRO++ (Wang et al. 2023, section 3.3) for the two steps; Tang et al., "DoubleSqueeze" (2019), for
feedback of both errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flagcx.compression.codec import FixedRate
from flagcx.compression.feedback import Slot
from flagcx.compression.peers import Peers, Pending

PIECE_NBYTES = 4 << 20
"""Bytes of float32 in a piece on a host."""
_DEVICE_PIECE_NBYTES = 64 << 20
_STAGES = 3
_GRAIN = 32


@dataclass(frozen=True, slots=True)
class _Piece:
    """One part of the message.

    Attributes:
        start: Its first element.
        stop: The element behind its last.
        width: Elements of a stripe; the last stripes may be shorter, or empty.
    """

    start: int
    stop: int
    width: int

    def stripe(self, rank: int) -> slice:
        """The elements of the message that a rank owns."""
        low = min(self.start + rank * self.width, self.stop)
        return slice(low, min(low + self.width, self.stop))


class TwoStep:
    """A compressed all-reduce of float32 arrays of one length.

    Args:
        peers: The ranks.
        codec: The codec.
        count: Elements.
        factor: What the sum is multiplied by.
        slot: Memory of the array between calls, or None.
        device: Whether the arrays are on a GPU.
    """

    def __init__(
        self, peers: Peers, codec: FixedRate, count: int, factor: float, slot: Slot | None, device: bool
    ) -> None:
        self._peers, self._codec, self._slot = peers, codec, slot
        self._factor = np.float32(factor)
        nbytes = _DEVICE_PIECE_NBYTES if device else PIECE_NBYTES
        self._pieces = cut_in_pieces(count, peers.size, nbytes // 4)
        self._wire = codec.wire_nbytes(self._pieces[0].width)
        self._width = self._pieces[0].width

    def run(self, given: Any, result: Any) -> None:
        """See ``transport.base.Plan``; the arrays have one dimension."""
        slot, scratch = self._slot, self._peers.scratch
        source = given if slot is None else slot.source(given, scratch, self._peers.size)
        residual = None if slot is None else slot.residual
        if len(self._pieces) == 1:
            self._run_whole(source, residual, result)
            return
        pending: list[Pending] = []
        with self._peers.beside():
            try:
                self._run_pieces(source, residual, result, pending)
            finally:
                for call in pending:
                    _end(call)

    def _run_whole(self, source: Any, residual: Any, result: Any) -> None:
        self._encode(0, source, residual)
        self._peers.alltoall(*self._crossing(0))
        self._reduce(0, source, residual)
        self._peers.allgather(*self._spreading(0))
        self._decode(0, result)

    def _run_pieces(self, source: Any, residual: Any, result: Any, pending: list[Pending]) -> None:
        """Three pieces are in work at a time; ``pending`` has all calls that may be under way."""
        pieces, behind = self._pieces, self._peers.behind
        arrived: dict[int, Pending] = {}
        gathered: dict[int, Pending] = {}
        for turn in range(len(pieces) + 2):
            if turn < len(pieces):
                self._encode(turn, source, residual)
                arrived[turn] = behind(partial(self._peers.alltoall, *self._crossing(turn)))
                pending.append(arrived[turn])
            if 1 <= turn <= len(pieces):
                arrived.pop(turn - 1).result()
                self._reduce(turn - 1, source, residual)
                done = turn - 1
                gathered[done] = behind(partial(self._peers.allgather, *self._spreading(done)))
                pending.append(gathered[done])
            if turn >= 2:
                gathered.pop(turn - 2).result()
                self._decode(turn - 2, result)
            del pending[: -2 * _STAGES]

    # -- buffers ----------------------------------------------------------------------------------

    def _buffer(self, name: str, turn: int, blocks: int, like: Any = None) -> Any:
        like = self._like if like is None else like
        whole = self._peers.scratch.get(f"{name} {turn % _STAGES}", blocks * self._wire, np.uint8, like)
        return whole[: blocks * self._codec.wire_nbytes(self._pieces[turn].width)]

    def _crossing(self, turn: int) -> tuple[Any, Any]:
        size = self._peers.size
        return self._buffer("coded", turn, size), self._buffer("arrived", turn, size)

    def _spreading(self, turn: int) -> tuple[Any, Any]:
        return self._buffer("reduced", turn, 1), self._buffer("gathered", turn, self._peers.size)

    def _blocks(self, wire: Any, turn: int) -> Sequence[Any]:
        width = self._codec.wire_nbytes(self._pieces[turn].width)
        return [wire[q * width : (q + 1) * width] for q in range(self._peers.size)]

    # -- the work between the calls ---------------------------------------------------------------

    def _encode(self, turn: int, source: Any, residual: Any) -> None:
        """Codes the other ranks' stripes of a piece."""
        self._like = source
        piece, rank, scratch = self._pieces[turn], self._peers.rank, self._peers.scratch
        for q, wire in enumerate(self._blocks(self._buffer("coded", turn, self._peers.size), turn)):
            part = piece.stripe(q)
            numbers = source[part]
            if q == rank or not numbers.size:
                continue
            if residual is None:
                self._codec.encode_into(numbers, wire, scratch)
                continue
            kept = residual[part]
            kept += numbers
            self._codec.encode_into(kept, wire, scratch)
            said = scratch.get("said", self._width, np.float32, source)[: kept.size]
            self._codec.decode_into(wire, said, scratch)
            kept -= said

    def _reduce(self, turn: int, source: Any, residual: Any) -> None:
        """Adds up this rank's stripe in rank order, and codes the sum."""
        peers, scratch = self._peers, self._peers.scratch
        own = self._pieces[turn].stripe(peers.rank)
        total = scratch.get("total", self._width, np.float32, source)[: own.stop - own.start]
        if not total.size:
            return
        for q, wire in enumerate(self._blocks(self._crossing(turn)[1], turn)):
            if q != peers.rank:
                self._codec.decode_into(wire, total, scratch, add=q > 0)
                continue
            if residual is not None:
                residual[own] += source[own]
            mine = (source if residual is None else residual)[own]
            if q:
                total += mine
            else:
                total[...] = mine
        if self._factor != 1:
            total *= self._factor
        reduced = self._spreading(turn)[0]
        self._codec.encode_into(total, reduced, scratch)
        if residual is not None:
            said = scratch.get("said", self._width, np.float32, source)[: total.size]
            self._codec.decode_into(reduced, said, scratch)
            total -= said
            residual[own] = total if self._factor == 1 else total / self._factor

    def _decode(self, turn: int, result: Any) -> None:
        """Writes all stripes of a piece."""
        piece = self._pieces[turn]
        for q, wire in enumerate(self._blocks(self._spreading(turn)[1], turn)):
            numbers = result[piece.stripe(q)]
            if numbers.size:
                self._codec.decode_into(wire, numbers, self._peers.scratch)


def cut_in_pieces(count: int, size: int, longest: int) -> tuple[_Piece, ...]:
    """Cuts a message into pieces of about ``longest`` elements, each of which has one stripe a rank.

    Args:
        count: Elements.
        size: Number of ranks.
        longest: Elements of a piece.
    """
    width = max(-(-longest // size) // 1024 * 1024, 1024)
    pieces = [_Piece(i, i + width * size, width) for i in range(0, count - width * size + 1, width * size)]
    start = pieces[-1].stop if pieces else 0
    if start < count or not pieces:
        last = -(-(count - start) // size)
        pieces.append(_Piece(start, count, -(-last // _GRAIN) * _GRAIN))
    return tuple(pieces)


def _end(call: Pending) -> None:
    """Waits for a call whose error, if any, is that of the whole, or comes second."""
    cancel = getattr(call, "cancel", None)
    if cancel is not None and cancel():
        return
    with suppress(Exception):
        call.result()
