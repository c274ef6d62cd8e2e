"""Sends and receives that ranks make on their own, with tags apart from those of collectives.

A message is on its way from when it is the first of its peer and direction: what a rank sends to another one,
what follows heads included, then arrives in order. Heads and memory are those of ``wire.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flagcx.transport.messenger import Message, Messenger
from flagcx.transport.network import message as wired
from flagcx.transport.network.message import Slot, put, stamp_of
from flagcx.transport.network.watch import Watch
from flagcx.transport.network.wire import MESSAGE_TAG, Wire

_LOOK_S = 0.25
_STAMP = stamp_of(0)


class NetworkMessenger(Messenger):
    """Carries the messages of one rank.

    Args:
        wire: Carries them.
        watch: What it knows of the other ranks.
        describe: Describes a message with a peer.
        timeout_s: How long a caller waits for a peer, in seconds.
    """

    def __init__(
        self,
        wire: Wire,
        watch: Watch,
        describe: Callable[[np.ndarray, int], wired.Message],
        timeout_s: float,
    ) -> None:
        self._wire, self._watch, self._describe, self.timeout_s = wire, watch, describe, timeout_s
        self._looked_at = 0.0

    def begin(self, sends: bool, array: np.ndarray, peer: int) -> Message:
        """Begins a message; see ``Messenger.begin``."""
        kind = Sent if sends else Received
        return kind(self._wire, self._watch, self._describe(array, peer), array.reshape(-1))

    def examine(self, message: Message, waited_s: float, late: bool, caller: bool) -> None:
        """Looks for a rank that died, ended, gave up or is late, now and then; see ``Messenger.examine``."""
        now = time.monotonic()
        if not late and now < self._looked_at + _LOOK_S:
            return
        self._looked_at = now
        assert isinstance(message, _OnItsWay)
        what = f"a {'send' if message.sends else 'receive'} of {message.data}"
        self._watch.look_at_message(what, message.peer, waited_s, late, self._wire.noticed())

    def end_wait(self) -> None:
        """A caller's wait is over."""
        self._watch.end_message()

    def abandon(self, messages: Sequence[Message]) -> None:
        """Leaves messages to the engine that won't end."""
        for message in messages:
            assert isinstance(message, _OnItsWay)
            message.abandon()


class _OnItsWay:
    """A message on its way.

    Args:
        wire: Carries them.
        watch: What it knows of the other ranks.
        message: The message.
        array: Its data, or where that goes.
    """

    sends: bool

    def __init__(self, wire: Wire, watch: Watch, message: wired.Message, array: np.ndarray) -> None:
        self._wire, self._watch, self._message, self._array = wire, watch, message, array
        self.peer = message.peer
        self._slot: Slot | None = None
        self._requests: list[Any] = []

    @property
    def data(self) -> str:
        """Its elements, in words."""
        return f"{self._message.count} {self._message.dtype.name}"

    def ready(self) -> bool:
        """Whether a piece has come or gone, or none has begun."""
        try:
            return self._has_moved()
        except self._wire.error as error:
            raise self._wire.failed(error, "a send or receive") from error

    def _has_moved(self) -> bool:
        return not self._requests or self._wire.moved(self._requests)

    def advance(self) -> bool:
        """Begins the message, or what comes after the pieces that have ended; see ``messenger.Message``."""
        try:
            return self._advance()
        except self._wire.error as error:
            raise self._wire.failed(error, "a send or receive") from error

    def _advance(self) -> bool:
        if not self._requests:
            self._begin()
            if not (self.sends and self._has_moved()):
                return False  # the engine may copy all of a message at once; what this rank sends goes first
        is_done = self._wire.is_done
        self._requests = [request for request in self._requests if not is_done(request)]
        if self._requests:
            return False
        if self._follow():
            return self._has_moved() and self._advance()
        if self._message.long and self._wire.noticed():
            # A rank that gave up may have gone on to change the array of which the last data came.
            self._watch.check_failures("a send or receive")
        return True

    def _begin(self) -> None:
        raise NotImplementedError

    def _follow(self) -> bool:
        """Begins what follows the head, if anything does."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Leaves it to the engine."""
        drained = [] if self.sends or self._slot is not None else self._requests
        self._wire.abandon(self._requests, [self._slot, self._array], drained)
        self._requests = []


class Sent(_OnItsWay):
    """A message that this rank sends."""

    sends = True

    def _begin(self) -> None:
        self._slot = self._wire.send(self._message, _STAMP, self._array, MESSAGE_TAG, self._requests)

    def _follow(self) -> bool:
        assert self._slot is not None
        self._wire.sending.append(self._slot)
        return False


class Received(_OnItsWay):
    """A message that this rank receives."""

    sends = False

    def _begin(self) -> None:
        self._slot = self._wire.land(self._message.peer, MESSAGE_TAG, self._requests)

    def _follow(self) -> bool:
        slot, message = self._slot, self._message
        if slot is None:
            return False  # what followed the head has come
        message.check(self._wire.rank, _STAMP, slot)
        if message.long:
            self._slot, self._requests = None, []
            self._wire.receive_rest(message, self._array, MESSAGE_TAG, self._requests)
        else:
            put(message, self._array, slot, None)
        self._wire.landing.append(slot)
        return message.long
