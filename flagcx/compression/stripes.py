"""The arithmetic of the two-step all-reduce between its messages: in NumPy, or by three kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flagcx.compression.codec import FixedRate, Scratch
from flagcx.compression.device import StripeKernels

if TYPE_CHECKING:
    from flagcx.compression.carried import Carried
    from flagcx.compression.peers import Peers


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the message.

    Attributes:
        start: Its first element.
        stop: The element after its last.
        width: Elements of a stripe; the last stripes may be shorter, or empty.
    """

    start: int
    stop: int
    width: int

    def stripe(self, rank: int) -> slice:
        """The elements of the message that a rank owns."""
        low = min(self.start + rank * self.width, self.stop)
        return slice(low, min(low + self.width, self.stop))


class Place(Protocol):
    """Who owns which stripe.

    Attributes:
        rank: The stripe of this rank.
        size: How many stripes there are.
        scratch: Arrays for intermediate results.
    """

    rank: int
    size: int
    scratch: Scratch


class LoopedStripes:
    """The arithmetic on NumPy arrays, one stripe after the other, by the codec's own functions.

    Arrays of numbers are those of the whole message; coded arrays are of uint8. The residual is read as it
    was before the step, and written as it is now.

    Args:
        codec: The codec.
        peers: The ranks, or the hosts that they stand for.
        factor: Scales the sum (float32).
    """

    def __init__(self, codec: FixedRate, peers: Place, factor: np.float32) -> None:
        self._codec, self._peers, self._factor = codec, peers, factor

    def encode(self, piece: Piece, source: Any, residual: Carried | None, coded: Any) -> None:
        """Codes the other ranks' stripes, with the residual if any, which is then the coding error."""
        codec, scratch = self._codec, self._peers.scratch
        for q, wire in enumerate(self._blocks(piece, coded)):
            part = piece.stripe(q)
            numbers = source[part]
            if q == self._peers.rank or not numbers.size:
                continue
            if residual is None:
                codec.encode_into(numbers, wire, scratch)
                continue
            kept = residual.now[part]
            np.add(residual.before[part], numbers, out=kept)
            codec.encode_into(kept, wire, scratch)
            decoded = scratch.get("decoded", piece.width, np.float32, source)[: kept.size]
            codec.decode_into(wire, decoded, scratch)
            _keep_lost(kept, decoded, kept)

    def reduce(self, piece: Piece, arrived: Any, source: Any, residual: Carried | None, reduced: Any) -> None:
        """Adds up this rank's stripe in the order of ranks, and codes the sum."""
        codec, scratch, own = self._codec, self._peers.scratch, piece.stripe(self._peers.rank)
        total = scratch.get("total", piece.width, np.float32, source)[: own.stop - own.start]
        if not total.size:
            return
        for q, wire in enumerate(self._blocks(piece, arrived)):
            if q != self._peers.rank:
                codec.decode_into(wire, total, scratch, add=q > 0)
                continue
            mine = source[own]
            if residual is not None:
                mine = np.add(residual.before[own], mine, out=residual.now[own])
            if q:
                total += mine
            else:
                total[...] = mine
        if self._factor != 1:
            total *= self._factor
        codec.encode_into(total, reduced, scratch)
        if residual is not None:
            decoded = scratch.get("decoded", piece.width, np.float32, source)[: total.size]
            codec.decode_into(reduced, decoded, scratch)
            _keep_lost(total, decoded, residual.now[own], self._factor)

    def decode(self, piece: Piece, gathered: Any, recvbuf: Any, spoilt: Any = None) -> bool | None:
        """Decodes all stripes. Returns whether one has infinity or NaN, and None if that is not known."""
        found: set[bool | None] = {False}
        for q, wire in enumerate(self._blocks(piece, gathered)):
            numbers = recvbuf[piece.stripe(q)]
            if numbers.size:
                self._codec.decode_into(wire, numbers, self._peers.scratch)
                found.add(self._codec.is_spoilt(wire, numbers.size))
        return True if True in found else None if None in found else False

    def _blocks(self, piece: Piece, wire: Any) -> Sequence[Any]:
        width = self._codec.wire_nbytes(piece.width)
        return [wire[q * width : (q + 1) * width] for q in range(self._peers.size)]


def _keep_lost(coded: Any, decoded: Any, lost: Any, factor: Any = 1) -> None:
    """Writes the coding error of numbers, over a factor; of numbers times 0 there is none."""
    if factor == 0:
        lost[...] = 0
        return
    with np.errstate(all="ignore"):
        np.subtract(coded, decoded, out=lost)
        if factor != 1:
            lost /= factor


class FusedStripes:
    """The same on a GPU, with one kernel for all stripes of a piece; the last one flags a spoilt step."""

    def __init__(self, codec: FixedRate, kernels: StripeKernels, peers: Peers, factor: np.float32) -> None:
        self._codec, self._kernels, self._peers, self._factor = codec, kernels, peers, factor

    def encode(self, piece: Piece, source: Any, residual: Carried | None, coded: Any) -> None:
        part, peers = slice(piece.start, piece.stop), self._peers
        kept = None if residual is None else residual.part(part)
        stride = self._codec.wire_nbytes(piece.width)
        self._kernels.encode(source[part], kept, coded, piece.width, stride, peers.size, peers.rank)

    def reduce(self, piece: Piece, arrived: Any, source: Any, residual: Carried | None, reduced: Any) -> None:
        own, peers = piece.stripe(self._peers.rank), self._peers
        kept = None if residual is None else residual.part(own)
        stride, ranks = self._codec.wire_nbytes(piece.width), (peers.rank, peers.size)
        self._kernels.reduce(arrived, source[own], kept, reduced, stride, ranks, self._factor)

    def decode(self, piece: Piece, gathered: Any, recvbuf: Any, spoilt: Any = None) -> bool | None:
        stride = self._codec.wire_nbytes(piece.width)
        part = recvbuf[piece.start : piece.stop]
        self._kernels.decode(gathered, part, piece.width, stride, self._peers.size, spoilt=spoilt)
        return None


Stripes = LoopedStripes | FusedStripes


def stripes_of(codec: FixedRate, peers: Peers, factor: np.float32) -> Stripes:
    """The arithmetic for one codec, on the device of the peers' arrays."""
    if not peers.on_device:
        return LoopedStripes(codec, peers, factor)
    kernels = codec.kernels()
    return FusedStripes(codec, kernels.beside() if peers.beside else kernels, peers, factor)
