"""Any schedule, step by step, over the channels between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcx.schedule.model import Buffer
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import PIECE_NBYTES, PIECES, Arena
from flagcx.transport.shared_memory.channel import RENDEZVOUS_NBYTES, Exchange, Receive, run_exchange
from flagcx.transport.shared_memory.words import SIGNATURE_SHIFT, numbered
from flagcx.transport.steps import Part, StepParts, Steps


class ChannelSteps(Steps):
    """A program over the channels.

    Args:
        arena: The shared memory.
        call: The call.
        signature: Its entry for the call log.
        attach_nbytes: See ``channel.Exchange``.
    """

    def __init__(self, arena: Arena, call: Call, signature: int, attach_nbytes: int) -> None:
        self._attach_nbytes = attach_nbytes
        self._arena, self._signature = arena, signature
        self._kind, self._kinds = signature >> SIGNATURE_SHIFT, (0,) * len(Buffer)
        super().__init__(call, arena.scratch)

    def _messages(self, step: StepParts) -> Exchange:
        sends = tuple((peer, part) for part, peer in step.sends)
        receives: list[Receive] = []
        for part, peer, reduce in step.receives:
            sent_too = reduce and any(self._overlap(part, sent) for _, sent in sends)
            long = sent_too and self._too_long_to_leave(sends)
            after = tuple(i for i, a in enumerate(receives) if self._overlap(a.part, part))
            staged = long or any(receives[i].staged for i in after)
            receives.append(Receive(peer, part, reduce, staged, sent_too and not long, after))
        return Exchange(sends, tuple(receives), self._attach_nbytes)

    def _too_long_to_leave(self, sends: Sequence[tuple[int, Part]]) -> bool:
        """Whether the step's sends may have to wait for the peer to receive."""
        pieces: dict[int, int] = {}
        for peer, (_, start, stop) in sends:
            nbytes = (stop - start) * self._dtype.itemsize
            pieces[peer] = pieces.get(peer, 0) + max(-(-nbytes // PIECE_NBYTES), 1)
            if nbytes >= min(RENDEZVOUS_NBYTES, self._attach_nbytes):
                return True
        return any(n > PIECES for n in pieces.values())

    def _enter(self) -> None:
        signals = self._arena.signals
        kind = numbered(self._kind, signals.sequence)
        self._kinds = (kind,) * len(Buffer)
        signals.enter(self._signature)

    def _exchange(self, messages: Exchange, arrays: Sequence[np.ndarray]) -> None:
        run_exchange(self._arena, messages, arrays, self._kinds, self._ufunc)
