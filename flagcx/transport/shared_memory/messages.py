"""Sends and receives that ranks make on their own, over channels apart from those of collectives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flagcx.transport.messenger import Message, Messenger
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.channel import RENDEZVOUS_NBYTES, Receive, Receiving, Sending
from flagcx.transport.shared_memory.places import Places

_BYTES = np.dtype(np.uint8)


class SharedMemoryMessenger(Messenger):
    """Carries the messages of one rank to and from the others of its host.

    A send ends when its data is in the slots, of which there are 256 KiB for each peer; one of 256 KiB or
    more is read where it lies, and ends with that.

    Args:
        arena: The shared memory.
        kind_of: The signature of messages of a dtype, which the peers know.
    """

    def __init__(self, arena: Arena, kind_of: Callable[[np.dtype], int]) -> None:
        self._arena, self._kind_of, self.timeout_s = arena, kind_of, arena.config.timeout_s

    def begin(self, sends: bool, array: np.ndarray, peer: int) -> Message:
        """Begins a message; see ``Messenger.begin``."""
        arena, kind = self._arena, self._kind_of(array.dtype)
        places = Places(arena)
        arrays = (array.reshape(-1).view(_BYTES),)
        part = (0, 0, len(arrays[0]))
        if sends:
            send = Sending(arena, arena.messages, peer, part, _BYTES, kind, RENDEZVOUS_NBYTES)
            if send.in_place:
                places.look_up(*arrays)
            send.begin(arrays, places, 0)
            return send
        receive = Receiving(arena, arena.messages, Receive(peer, part), _BYTES, kind, None, True)
        receive.begin(arrays, places, 0)
        return receive

    def examine(self, message: Message, waited_s: float, late: bool, caller: bool) -> None:
        """Looks for a peer that died, ended, gave up or is late; see ``Messenger.examine``."""
        what = "send" if message.sends else "receive"
        assert isinstance(message, (Sending, Receiving))
        signals, nbytes = self._arena.signals, message.length
        signals.examine_message(message.peer, message.ready, late, what, nbytes, waited_s, caller)

    def end_wait(self) -> None:
        """A caller's wait is over."""
        self._arena.signals.end_message_wait()
