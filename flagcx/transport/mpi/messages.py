"""Sends and receives that ranks make on their own, with tags apart from those of collectives.

A message is on its way from when it is the first of its peer and direction: what a rank sends to another one,
pieces included, then arrives in order. Heads and memory are those of ``wire.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flagcx.transport.messenger import Message, Messenger
from flagcx.transport.mpi import message as wired
from flagcx.transport.mpi.message import Slot, put, stamp_of
from flagcx.transport.mpi.watch import Watch
from flagcx.transport.mpi.wire import MESSAGE_TAG, Wire

_WINDOW = 4
_LOOK_S = 0.25
_STAMP = stamp_of(0)


class MpiMessenger(Messenger):
    """Carries the messages of one rank.

    Args:
        wire: The rank's MPI.
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
        what = "a send" if message.sends else "a receive"
        self._watch.look_at_message(what, message.peer, waited_s, late, self._wire.noticed())

    def end_wait(self) -> None:
        """A caller's wait is over."""
        self._watch.end_message()

    def abandon(self, messages: Sequence[Message]) -> None:
        """Leaves messages to MPI that won't end."""
        for message in messages:
            assert isinstance(message, _OnItsWay)
            message.abandon()


class _OnItsWay:
    """A message on its way: its first piece, then the rest, of which a few pieces are under way at a time.

    Args:
        wire: The rank's MPI.
        watch: What it knows of the other ranks.
        message: The message.
        array: Its data, or where that goes.
    """

    sends: bool

    def __init__(self, wire: Wire, watch: Watch, message: wired.Message, array: np.ndarray) -> None:
        self._wire, self._watch, self._message, self._array = wire, watch, message, array
        self.peer = message.peer
        self._rest = deque(message.rest)
        self._parts: list[tuple[int, int, Slot | None]] = []
        self._requests: list[Any] = []
        self._done: Sequence[int] | None = None

    def ready(self) -> bool:
        """Whether a piece has come or gone, or none has begun."""
        if self._requests and not self._done:
            self._done = self._wire.test(self._requests)
        return bool(self._done) or not self._requests

    def advance(self) -> bool:
        """Handles the pieces that have come or gone, and begins others; see ``messenger.Message``."""
        if not self._requests:
            self._begin_first()
            if not self.ready():
                return False
        done, self._done = sorted(self._done or ()), None
        for number in done:
            self._handle(*self._parts[number])
        for number in reversed(done):
            del self._parts[number], self._requests[number]
        while self._rest and len(self._requests) < _WINDOW:
            self._begin_next(*self._rest.popleft())
        if self._requests:
            return False
        if self._message.long and self._wire.noticed():
            # A rank that gave up may have gone on to change the array of which the last pieces came.
            self._watch.check_failures("a send or receive")
        return True

    def _begin(self, start: int, stop: int, slot: Slot | None, request: Any) -> None:
        self._parts.append((start, stop, slot))
        self._requests.append(request)

    def _begin_first(self) -> None:
        raise NotImplementedError

    def _begin_next(self, start: int, stop: int) -> None:
        raise NotImplementedError

    def _handle(self, start: int, stop: int, slot: Slot | None) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        """Leaves it to MPI."""
        slots = [slot for _, _, slot in self._parts if slot is not None]
        self._wire.abandon(self._requests, [slots, [self._array]])
        self._requests, self._parts = [], []


class Sent(_OnItsWay):
    """A message that this rank sends."""

    sends = True

    def _begin_first(self) -> None:
        message, slot = self._message, self._wire.slot()
        slot.head[:] = _STAMP + message.kind
        slot.first(message)[...] = self._array[: message.first]
        memory = slot.memory[: message.stop]
        self._begin(0, message.first, slot, self._wire.send(memory, self.peer, MESSAGE_TAG))

    def _begin_next(self, start: int, stop: int) -> None:
        part = self._array[start:stop].view(np.uint8)
        self._begin(start, stop, None, self._wire.send(part, self.peer, MESSAGE_TAG + 1))

    def _handle(self, start: int, stop: int, slot: Slot | None) -> None:
        if slot is not None:
            self._wire.give_slot(slot)


class Received(_OnItsWay):
    """A message that this rank receives."""

    sends = False

    def _begin_first(self) -> None:
        slot = self._wire.slot()
        self._begin(0, self._message.first, slot, self._wire.receive(slot, self.peer, MESSAGE_TAG))

    def _begin_next(self, start: int, stop: int) -> None:
        slot = self._wire.slot()
        self._begin(start, stop, slot, self._wire.receive(slot, self.peer, MESSAGE_TAG + 1))

    def _handle(self, start: int, stop: int, slot: Slot | None) -> None:
        message, array = self._message, self._array
        assert slot is not None
        data = slot.rest(stop - start, message.dtype) if start else slot.first(message)
        if not start:
            message.check(self._wire.rank, _STAMP, slot)
        put(message, array[start:stop], data, None)
        self._wire.give_slot(slot)
