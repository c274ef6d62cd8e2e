"""The all-reduce by a codec with a fixed rate over hosts: coded on the network, and nowhere else.

The ranks of a host add up plain numbers in memory that they share, as without compression. Some of them own a
stripe of that sum; between hosts they do what ``two_step.py`` has all ranks do, each for its host. So numbers
are coded once for all ranks of a host, and cross the network once.

Of the residual, an owner keeps the coding error of its stripe of its host's sum. Where a rank owns nothing
its residual is sent as it is, and is zero afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flagcx.compression.carried import Carried
from flagcx.compression.codec import FixedRate
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.stripes import LoopedStripes, Piece
from flagcx.transport.base import Plan


class OverHosts(CodecReduce[FixedRate]):
    """The all-reduce by a codec with a fixed rate, of hosts whose ranks share memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._plans: dict[bool, Plan] = {}
        self._nothing = np.broadcast_to(np.float32(0), self._count)

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        peers, carried = self._peers, self._slot.residuals
        source = self._slot.source(sendbuf, peers.scratch, peers.size)
        if carried is not None:
            source = np.add(carried.before, source, out=recvbuf)
            carried.now.fill(0)
        in_place = source is recvbuf
        plan = self._plans.get(in_place)
        if plan is None:
            plan = self._plans[in_place] = peers.between_hosts(self._count, in_place, self._coder)
        plan.run(source, recvbuf)

    def _coder(self, host: int, hosts: int) -> HostCoder:
        factor = np.float32(self._factor)
        return HostCoder(host, hosts, self._peers, self._codec, factor, self._residual)

    def _residual(self, at: int, count: int) -> Carried | None:
        """The coding errors of a part of the message; those of the last step are in the numbers already."""
        carried, part = self._slot.residuals, slice(at, at + count)
        return None if carried is None else Carried(carried.now[part], self._nothing[part])


class HostCoder:
    """The arithmetic between the messages of an owner of a stripe; see ``transport.base.Coder``.

    Args:
        host: The owner's host.
        hosts: How many there are.
        peers: The ranks; gets the number of bytes that this one sends.
        codec: The codec.
        factor: Scales the sum.
        residual: ``residual(at, count)``: the coding errors of a part of the message.
    """

    def __init__(
        self,
        host: int,
        hosts: int,
        peers: Peers,
        codec: FixedRate,
        factor: np.float32,
        residual: Callable[[int, int], Carried | None],
    ) -> None:
        self.rank, self.size, self.scratch = host, hosts, peers.scratch
        self._peers, self._codec, self._residual = peers, codec, residual
        self._stripes = LoopedStripes(codec, self, factor)

    def wire_nbytes(self, count: int) -> int:
        return self._codec.wire_nbytes(count)

    def encode(self, at: int, numbers: np.ndarray, width: int, coded: np.ndarray) -> None:
        self._stripes.encode(*self._message(at, numbers, width), coded)
        self._sends(width)

    def reduce(
        self, at: int, numbers: np.ndarray, width: int, arrived: np.ndarray, reduced: np.ndarray
    ) -> None:
        piece, source, residual = self._message(at, numbers, width)
        self._stripes.reduce(piece, arrived, source, residual, reduced)
        self._sends(width)

    def decode(self, numbers: np.ndarray, width: int, gathered: np.ndarray) -> None:
        self._stripes.decode(Piece(0, numbers.size, width), gathered, numbers)

    def _message(self, at: int, numbers: np.ndarray, width: int) -> tuple[Piece, Any, Carried | None]:
        return Piece(0, numbers.size, width), numbers, self._residual(at, numbers.size)

    def _sends(self, width: int) -> None:
        self._peers.sent_nbytes += (self.size - 1) * self._codec.wire_nbytes(width)
