"""The all-reduce by a codec with a fixed rate: each number is coded twice, however many ranks there are.

::

    split into one stripe a rank -> code -> all-to-all -> decode, add in rank order (float32)
        -> code the sum -> all-gather -> decode

A rank sends 2 (n-1)/n of the coded message, as the dense two-shot form does of the plain one. The owner of a
stripe adds its own part uncoded, and then keeps what its coded sum decodes to, as all others do: so all
ranks end with the same bits. Long messages go in pieces: on a host, while one is on its way, the next is
coded and the one before decoded; on a GPU they save memory, and each takes three kernels and two collectives.

With a residual (error feedback) each rank adds to its next gradient what coding took from this one, and the
owner of a stripe what coding took from the sum.

Source: ZeRO++ (Wang et al. 2023, section 3.3) for the two steps; Tang et al., "DoubleSqueeze" (2019), for
feedback of both errors.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np

from flagcx.compression.codec import FixedRate
from flagcx.compression.feedback import Slot
from flagcx.compression.peers import Peers, Pending
from flagcx.compression.stripes import Piece, Stripes, stripes_of

PIECE_NBYTES = 4 << 20
"""Bytes of float32 in a piece on a host."""
DEVICE_PIECE_NBYTES = 256 << 20
"""The same on a GPU, where starting kernels costs time of the host."""
_STAGES = 3
_GRAIN = 32


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
        self._factor, self._device = np.float32(factor), device
        nbytes = DEVICE_PIECE_NBYTES if device else PIECE_NBYTES
        self._pieces = cut_in_pieces(count, peers.size, nbytes // 4)
        self._wire = codec.wire_nbytes(self._pieces[0].width)
        # A stream does one thing after the other all the same, so there pieces only save memory.
        self._stages = 1 if device or len(self._pieces) == 1 else _STAGES

    @cached_property
    def _stripes(self) -> Stripes:
        """Made at the first run, when the current device is known to be the right one."""
        return stripes_of(self._codec, self._peers, self._factor, self._device)

    def run(self, given: Any, result: Any) -> None:
        """See ``transport.base.Plan``; the arrays have one dimension."""
        slot, scratch = self._slot, self._peers.scratch
        source = given if slot is None else slot.source(given, scratch, self._peers.size)
        residual = None if slot is None else slot.residual
        if self._stages == 1:
            for turn in range(len(self._pieces)):
                self._run_piece(turn, source, residual, result)
            return
        pending: list[Pending] = []
        with self._peers.beside():
            try:
                self._run_pieces(source, residual, result, pending)
            finally:
                for call in pending:
                    _end(call)

    def _run_piece(self, turn: int, source: Any, residual: Any, result: Any) -> None:
        piece, stripes = self._pieces[turn], self._stripes
        coded, arrived = self._crossing(turn, source)
        stripes.encode(piece, source, residual, coded)
        self._peers.alltoall(coded, arrived)
        reduced, gathered = self._spreading(turn, source)
        stripes.reduce(piece, arrived, source, residual, reduced)
        self._peers.allgather(reduced, gathered)
        stripes.decode(piece, gathered, result)

    def _run_pieces(self, source: Any, residual: Any, result: Any, pending: list[Pending]) -> None:
        """Three pieces are in work at a time; ``pending`` has all calls that may be under way."""
        pieces, behind, stripes = self._pieces, self._peers.behind, self._stripes
        arrived: dict[int, Pending] = {}
        gathered: dict[int, Pending] = {}
        for turn in range(len(pieces) + 2):
            if turn < len(pieces):
                crossing = self._crossing(turn, source)
                stripes.encode(pieces[turn], source, residual, crossing[0])
                arrived[turn] = behind(partial(self._peers.alltoall, *crossing))
                pending.append(arrived[turn])
            if 1 <= turn <= len(pieces):
                done = turn - 1
                arrived.pop(done).result()
                spreading = self._spreading(done, source)
                stripes.reduce(pieces[done], self._crossing(done, source)[1], source, residual, spreading[0])
                gathered[done] = behind(partial(self._peers.allgather, *spreading))
                pending.append(gathered[done])
            if turn >= 2:
                done = turn - 2
                gathered.pop(done).result()
                stripes.decode(pieces[done], self._spreading(done, source)[1], result)
            del pending[: -2 * _STAGES]

    # -- buffers ----------------------------------------------------------------------------------

    def _buffer(self, name: str, turn: int, blocks: int, like: Any) -> Any:
        scratch, nbytes = self._peers.scratch, blocks * self._wire
        whole = scratch.get(f"{name} {turn % self._stages}", nbytes, np.uint8, like)
        return whole[: blocks * self._codec.wire_nbytes(self._pieces[turn].width)]

    def _crossing(self, turn: int, like: Any) -> tuple[Any, Any]:
        """What this rank sends to all, and what it gets from all."""
        size = self._peers.size
        return self._buffer("coded", turn, size, like), self._buffer("arrived", turn, size, like)

    def _spreading(self, turn: int, like: Any) -> tuple[Any, Any]:
        """This rank's coded sum, and everybody's."""
        size = self._peers.size
        return self._buffer("reduced", turn, 1, like), self._buffer("gathered", turn, size, like)


def cut_in_pieces(count: int, size: int, longest: int) -> tuple[Piece, ...]:
    """Cuts a message into pieces of about ``longest`` elements, each of which has one stripe a rank.

    Args:
        count: Elements.
        size: Number of ranks.
        longest: Elements of a piece.
    """
    width = max(-(-longest // size) // 1024 * 1024, 1024)
    pieces = [Piece(i, i + width * size, width) for i in range(0, count - width * size + 1, width * size)]
    start = pieces[-1].stop if pieces else 0
    if start < count or not pieces:
        last = -(-(count - start) // size)
        pieces.append(Piece(start, count, -(-last // _GRAIN) * _GRAIN))
    return tuple(pieces)


def _end(call: Pending) -> None:
    """Waits for a call whose error, if any, is that of the whole, or comes second."""
    cancel = getattr(call, "cancel", None)
    if cancel is not None and cancel():
        return
    with suppress(Exception):
        call.result()
