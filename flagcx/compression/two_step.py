"""The all-reduce by a codec with a fixed rate: each number is coded twice, however many ranks there are.

::

    split into one stripe a rank -> code -> all-to-all -> decode, add in rank order (float32)
        -> code the sum -> all-gather -> decode

A rank sends 2 (n-1)/n of the coded message, as the dense two-shot form does of the plain one. The owner of a
stripe adds its own part uncoded, and then decodes its coded sum as all others do: so all ranks end with the
same bits. Long messages go in pieces: on a host, while one is sent, the next is coded and the one before
decoded; on a GPU they save memory, and each takes three kernels and two collectives. There a second stream
for the collectives gained nothing: beside a computation of 9.3 ms, of two ranks on one H200, six buckets of
256 MiB by int8 took 14.6 ms on one stream, and 20.2 ms in pieces of 64 MiB on two.

With a residual (error feedback) each rank adds the coding error of this gradient to its next one, and the
owner of a stripe the coding error of the sum. Infinity or NaN on any rank, and sums that overflow, decode to
NaN on all ranks, which then leave the residual as it was; on a GPU the last kernel flags it.

Source: ZeRO++ (Wang et al. 2023, section 3.3) for the two steps; Tang et al., "DoubleSqueeze" (2019), for
feedback of both errors.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np

from flagcx.compression.codec import FixedRate
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.slot import Slot
from flagcx.compression.stripes import Piece, Stripes, stripes_of
from flagcx.dtypes import ReduceOp

PIECE_NBYTES = 4 << 20
"""Bytes of float32 in a piece on a host."""
DEVICE_PIECE_NBYTES = 256 << 20
"""Bytes of float32 in a piece on a GPU, where each piece costs the host the launch of its kernels."""
_STAGES = 3
_GRAIN = 32


class TwoStep(CodecReduce[FixedRate]):
    """The all-reduce by a codec with a fixed rate."""

    def __init__(self, peers: Peers, codec: FixedRate, count: int, op: ReduceOp, slot: Slot) -> None:
        super().__init__(peers, codec, count, op, slot)
        nbytes = DEVICE_PIECE_NBYTES if peers.on_device else PIECE_NBYTES
        self._pieces = cut_in_pieces(count, peers.size, nbytes // 4)
        self._wire = codec.wire_nbytes(self._pieces[0].width)
        # The kernels of a stream run one after the other anyway, so there pieces only save memory.
        self._stages = 1 if peers.on_device or len(self._pieces) == 1 else _STAGES

    @cached_property
    def _stripes(self) -> Stripes:
        """Made at the first run, when the current device is known to be the right one."""
        return stripes_of(self._codec, self._peers, np.float32(self._factor))

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        source = self._slot.source(sendbuf, self._peers.scratch, self._peers.size)
        residual = self._slot.residuals
        self.waits, self.spoilt = not self._peers.on_device, False
        if self._stages == 1:
            for turn in range(len(self._pieces)):
                self._run_piece(turn, source, residual, recvbuf)
        else:
            pending: list[Future] = []
            with self._peers.overlap():
                try:
                    self._run_pieces(source, residual, recvbuf, pending)
                finally:
                    for call in pending:
                        _end(call)

    def _run_piece(self, turn: int, source: Any, residual: Any, recvbuf: Any) -> None:
        piece, stripes = self._pieces[turn], self._stripes
        coded, arrived = self._alltoall_buffers(turn, source)
        stripes.encode(piece, source, residual, coded)
        self._peers.alltoall(coded, arrived)
        reduced, gathered = self._allgather_buffers(turn, source)
        stripes.reduce(piece, arrived, source, residual, reduced)
        self._peers.allgather(reduced, gathered)
        self._see(stripes.decode(piece, gathered, recvbuf, self._slot.flag))

    def _run_pieces(self, source: Any, residual: Any, recvbuf: Any, pending: list[Future]) -> None:
        """Works on three pieces at a time; ``pending`` has all calls that may be under way."""
        pieces, submit, stripes = self._pieces, self._peers.submit, self._stripes
        arrived: dict[int, Future] = {}
        gathered: dict[int, Future] = {}
        for turn in range(len(pieces) + 2):
            if turn < len(pieces):
                buffers = self._alltoall_buffers(turn, source)
                stripes.encode(pieces[turn], source, residual, buffers[0])
                arrived[turn] = submit(partial(self._peers.alltoall, *buffers))
                pending.append(arrived[turn])
            if 1 <= turn <= len(pieces):
                done = turn - 1
                arrived.pop(done).result()
                stripe = self._alltoall_buffers(done, source)[1]
                buffers = self._allgather_buffers(done, source)
                stripes.reduce(pieces[done], stripe, source, residual, buffers[0])
                gathered[done] = submit(partial(self._peers.allgather, *buffers))
                pending.append(gathered[done])
            if turn >= 2:
                done = turn - 2
                gathered.pop(done).result()
                self._see(stripes.decode(pieces[done], self._allgather_buffers(done, source)[1], recvbuf))
            del pending[: -2 * _STAGES]

    def _see(self, spoilt: bool | None) -> None:
        """Takes note of what is known of another piece."""
        if spoilt or (spoilt is None and not self.spoilt):
            self.spoilt = spoilt

    def _buffer(self, name: str, turn: int, blocks: int, like: Any) -> Any:
        scratch, nbytes = self._peers.scratch, blocks * self._wire
        whole = scratch.get(f"{name} {turn % self._stages}", nbytes, np.uint8, like)
        return whole[: blocks * self._codec.wire_nbytes(self._pieces[turn].width)]

    def _alltoall_buffers(self, turn: int, like: Any) -> tuple[Any, Any]:
        size = self._peers.size
        return self._buffer("coded", turn, size, like), self._buffer("arrived", turn, size, like)

    def _allgather_buffers(self, turn: int, like: Any) -> tuple[Any, Any]:
        return self._buffer("reduced", turn, 1, like), self._buffer("gathered", turn, self._peers.size, like)


def cut_in_pieces(count: int, size: int, longest: int) -> tuple[Piece, ...]:
    """Cuts ``count`` elements into pieces of about ``longest``, each of one stripe a rank."""
    width = max(-(-longest // size) // 1024 * 1024, 1024)
    pieces = [Piece(i, i + width * size, width) for i in range(0, count - width * size + 1, width * size)]
    start = pieces[-1].stop if pieces else 0
    if start < count or not pieces:
        last = -(-(count - start) // size)
        pieces.append(Piece(start, count, -(-last // _GRAIN) * _GRAIN))
    return tuple(pieces)


def _end(call: Future) -> None:
    """Cancels a call, or waits for it. Its error, if any, is raised already, or follows from another."""
    if not call.cancel():
        with suppress(Exception):
            call.result()
