"""Any schedule, step by step, over the channels between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import PIECE_NBYTES, PIECES
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.channel import (
    RENDEZVOUS_NBYTES,
    Receive,
    Receiving,
    Sending,
)
from flagcx.transport.shared_memory.exchange import Exchange
from flagcx.transport.shared_memory.places import Places
from flagcx.transport.shared_memory.words import SIGNATURE_SHIFT, number_of_header
from flagcx.transport.steps import Part, StepParts, Steps


class ChannelSteps(Steps):
    """A program over the channels.

    Args:
        arena: The shared memory.
        call: The call.
        signature: Its entry for the call log.
        attach_nbytes: See ``flagcx.transport.shared_memory.channel.Sending``.
    """

    def __init__(self, arena: Arena, call: Call, signature: int, attach_nbytes: int) -> None:
        self._attach_nbytes = attach_nbytes
        self._arena, self._signature = arena, signature
        self._number = 0
        self._places = Places(arena)
        self._looks_up = False
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
        return self._exchange_of(sends, receives)

    def _exchange_of(self, sends: Sequence[tuple[int, Part]], receives: Sequence[Receive]) -> Exchange:
        arena, lane, kind = self._arena, self._arena.steps, self._signature >> SIGNATURE_SHIFT
        leaving = [
            Sending(arena, lane, peer, part, self._dtype, kind, self._attach_nbytes) for peer, part in sends
        ]
        coming: list[Receiving] = []
        for plan in receives:
            before = [*(coming[i] for i in plan.after), *(leaving if plan.after_sends else ())]
            coming.append(Receiving(arena, lane, plan, self._dtype, kind, self._ufunc, False, before))
        long = min(RENDEZVOUS_NBYTES, self._attach_nbytes) // self._dtype.itemsize
        parts = [*(part for _, part in sends), *(plan.part for plan in receives)]
        self._looks_up = self._looks_up or any(stop - start >= long for _, start, stop in parts)
        return Exchange(arena, leaving, coming)

    def _too_long_to_leave(self, sends: Sequence[tuple[int, Part]]) -> bool:
        """Whether the step's sends may have to wait for the peer to receive."""
        pieces: dict[int, int] = {}
        for peer, (_, start, stop) in sends:
            nbytes = (stop - start) * self._dtype.itemsize
            pieces[peer] = pieces.get(peer, 0) + max(-(-nbytes // PIECE_NBYTES), 1)
            if nbytes >= min(RENDEZVOUS_NBYTES, self._attach_nbytes):
                return True
        return any(n > PIECES for n in pieces.values())

    def _enter(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray | None) -> None:
        signals = self._arena.signals
        self._number = number_of_header(signals.sequence)
        if self._looks_up:
            self._places.look_up(sendbuf, recvbuf, self._scratch.memory)
        signals.enter(self._signature)

    def _exchange(self, messages: Exchange, arrays: Sequence[np.ndarray]) -> None:
        messages.run(arrays, self._places, self._number)
