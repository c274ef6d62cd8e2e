"""What the two-step all-reduce computes between its messages: on a host, and by three kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.codec import FixedRate, namespace
from flagcx.compression.device import StripeKernels
from flagcx.compression.peers import Peers


@dataclass(frozen=True, slots=True)
class Piece:
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


class Stripes(Protocol):
    """The arithmetic on one piece. Arrays of numbers are those of the whole message; ``wire`` is uint8."""

    def encode(self, piece: Piece, source: Any, residual: Any, coded: Any) -> None:
        """Codes the other ranks' stripes; the residual, if there is one, goes in and takes what was lost."""

    def reduce(self, piece: Piece, arrived: Any, source: Any, residual: Any, reduced: Any) -> None:
        """Adds up this rank's stripe in the order of ranks, and codes the sum."""

    def decode(self, piece: Piece, gathered: Any, result: Any) -> None:
        """Writes all stripes."""


def stripes_of(codec: FixedRate, peers: Peers, factor: np.float32, device: bool) -> Stripes:
    """The arithmetic for one codec.

    Args:
        codec: The codec.
        peers: The ranks.
        factor: What the sum is multiplied by.
        device: Whether the arrays are on a GPU.
    """
    kernels = codec.kernels() if device else None
    if kernels is None:
        return LoopedStripes(codec, peers, factor)
    return FusedStripes(codec, kernels, peers, factor)


class LoopedStripes:
    """One stripe after the other, by the codec's own functions; see ``stripes_of``."""

    def __init__(self, codec: FixedRate, peers: Peers, factor: np.float32) -> None:
        self._codec, self._peers, self._factor = codec, peers, factor

    def encode(self, piece: Piece, source: Any, residual: Any, coded: Any) -> None:
        """See ``Stripes``."""
        codec, scratch = self._codec, self._peers.scratch
        for q, wire in enumerate(self._blocks(piece, coded)):
            part = piece.stripe(q)
            numbers = source[part]
            if q == self._peers.rank or not numbers.size:
                continue
            if residual is None:
                codec.encode_into(numbers, wire, scratch)
                continue
            kept = residual[part]
            kept += numbers
            codec.encode_into(kept, wire, scratch)
            said = scratch.get("said", piece.width, np.float32, source)[: kept.size]
            codec.decode_into(wire, said, scratch)
            _keep_lost(kept, said, kept)

    def reduce(self, piece: Piece, arrived: Any, source: Any, residual: Any, reduced: Any) -> None:
        """See ``Stripes``."""
        codec, scratch, own = self._codec, self._peers.scratch, piece.stripe(self._peers.rank)
        total = scratch.get("total", piece.width, np.float32, source)[: own.stop - own.start]
        if not total.size:
            return
        for q, wire in enumerate(self._blocks(piece, arrived)):
            if q != self._peers.rank:
                codec.decode_into(wire, total, scratch, add=q > 0)
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
        codec.encode_into(total, reduced, scratch)
        if residual is not None:
            said = scratch.get("said", piece.width, np.float32, source)[: total.size]
            codec.decode_into(reduced, said, scratch)
            _keep_lost(total, said, residual[own], self._factor)

    def decode(self, piece: Piece, gathered: Any, result: Any) -> None:
        """See ``Stripes``."""
        for q, wire in enumerate(self._blocks(piece, gathered)):
            numbers = result[piece.stripe(q)]
            if numbers.size:
                self._codec.decode_into(wire, numbers, self._peers.scratch)

    def _blocks(self, piece: Piece, wire: Any) -> Sequence[Any]:
        width = self._codec.wire_nbytes(piece.width)
        return [wire[q * width : (q + 1) * width] for q in range(self._peers.size)]


def _keep_lost(coded: Any, said: Any, lost: Any, factor: Any = 1) -> None:
    """Writes what coding took from numbers, over a factor; 0 for infinity and NaN, which no call mends."""
    xp = namespace(coded)
    with np.errstate(all="ignore"):
        xp.subtract(coded, said, out=lost)
        if factor != 1:
            lost /= factor
        if on_device(lost) or not np.isfinite(lost.sum()):
            lost[~xp.isfinite(lost)] = 0


class FusedStripes:
    """All stripes in one kernel; see ``stripes_of``.

    Args:
        codec: The codec.
        kernels: Its kernels.
        peers: The ranks.
        factor: What the sum is multiplied by.
    """

    def __init__(self, codec: FixedRate, kernels: StripeKernels, peers: Peers, factor: np.float32) -> None:
        self._codec, self._kernels, self._peers, self._factor = codec, kernels, peers, factor

    def encode(self, piece: Piece, source: Any, residual: Any, coded: Any) -> None:
        """See ``Stripes``."""
        part, peers = slice(piece.start, piece.stop), self._peers
        kept = None if residual is None else residual[part]
        self._kernels.encode(
            source[part],
            kept,
            coded,
            piece.width,
            self._codec.wire_nbytes(piece.width),
            peers.size,
            peers.rank,
        )

    def reduce(self, piece: Piece, arrived: Any, source: Any, residual: Any, reduced: Any) -> None:
        """See ``Stripes``."""
        own, peers = piece.stripe(self._peers.rank), self._peers
        kept = None if residual is None else residual[own]
        stride, ranks = self._codec.wire_nbytes(piece.width), (peers.rank, peers.size)
        self._kernels.reduce(arrived, source[own], kept, reduced, stride, ranks, self._factor)

    def decode(self, piece: Piece, gathered: Any, result: Any) -> None:
        """See ``Stripes``."""
        stride = self._codec.wire_nbytes(piece.width)
        self._kernels.decode(
            gathered, result[piece.start : piece.stop], piece.width, stride, self._peers.size
        )
