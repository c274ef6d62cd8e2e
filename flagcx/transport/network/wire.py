"""Sends and receives the messages of a step, and checks what comes before it is used.

A head, and the data of a short message with it, lands in memory of the wire's own. A message whose head is
not the expected one is refused; of any other the data is copied or added to where it belongs. The data of a
long message is sent from where it lies, and received straight into its place once its head has been checked.
Until then the engine knows no array to write to; after an error the array is taken back, or its data waited
for.

Heads and what follows them have tags of their own, and so have collective calls, the messages between two
ranks that are parts of such calls, and what ranks send on their own (``messenger.py``). With each tag, what a
rank sends to another one arrives in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.errors import CommunicationError, MismatchError
from flagcx.transport.network.engine import Engine
from flagcx.transport.network.message import SAME_CALLS, Message, Slot, in_words, put, stamp_of
from flagcx.transport.network.watch import Wait, Watch

COLLECTIVE_TAG, TRANSFER_TAG, _NOTICE_TAG, MESSAGE_TAG = 2, 4, 6, 8
_LAST_LOOK_S = 1.0
_DRAIN_S, _DRAIN_POLL_S = 1.0, 1e-3
"""How long, after an error, messages may take that are just being written to arrays of the caller's."""

Messages = Sequence[tuple[Message, np.ndarray]]
"""Messages, and the one-dimensional array that each brings, or goes to."""


class Wire:
    """One rank's messages to and from the other ranks of a communicator.

    Args:
        engine: Carries the messages.
        watch: Watches the other ranks while this one waits.

    Attributes:
        error: What the engine raises.
        rank: This rank.
        sending: Memory to send from that is free.
        landing: Memory to receive into that is free.
    """

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine, self._watch, self.error, self.rank = engine, watch, engine.error, engine.rank
        self._send, self._receive = engine.send, engine.receive
        self.moved, self.is_done, self._all_done = engine.some_done, engine.is_done, engine.all_done
        self.sending: list[Slot] = []
        self.landing: list[Slot] = []

    def exchange(
        self,
        sends: Messages,
        receives: Messages,
        tag: int,
        what: str = "",
        number: int = 0,
        ufunc: Any = None,
    ) -> None:
        """Sends and receives messages, all at once.

        Args:
            sends: Messages that this rank sends.
            receives: Messages to this rank, in the order in which they are added.
            tag: ``COLLECTIVE_TAG`` or ``TRANSFER_TAG``.
            what: The call that all ranks make, in words; empty for one of two ranks.
            number: The number of that call.
            ufunc: Adds what comes to what is there.

        Raises:
            MismatchError: A rank sent something else.
            CommunicationError: A rank died, gave up or came too late.
        """
        rank, long, stamp = self.rank, False, stamp_of(number)
        requests: list[Any] = []
        landed: list[Slot] = []
        sent: list[Slot] = []
        try:
            for message, _ in receives:
                landed.append(self.land(message.peer, tag, requests))
                long = long or message.long
            for message, array in sends:
                sent.append(self.send(message, stamp, array, tag, requests))
                long = long or message.long
            if long or not self._all_done(requests):
                self._finish(sends, receives, landed, requests, tag, stamp, what)
            if long and self.noticed():
                # A rank that gave up may have gone on to change the array of which the last data came.
                self._watch.check_failures(what or "a send or receive")
            for (message, _), slot in zip(receives, landed, strict=True):
                if not message.long:
                    message.check(rank, stamp, slot)
            for (message, array), slot in zip(receives, landed, strict=True):
                if not message.long:
                    put(message, array, slot, ufunc)
        except BaseException as error:
            arrays = [array for _, array in (*sends, *receives)]
            follow = len(receives) + sum(1 + len(message.rest) for message, _ in sends)
            self.abandon(requests, [sent, landed, arrays], requests[follow:])
            if isinstance(error, self.error):
                raise self.failed(error, what or "a send or receive") from error
            raise
        self.sending += reversed(sent)  # so that the same call gets the same memory
        self.landing += reversed(landed)

    # -- one message ---------------------------------------------------------------------------------

    def send(self, message: Message, stamp: bytes, array: np.ndarray, tag: int, requests: list[Any]) -> Slot:
        """Begins to send a message, and returns the memory from which its head goes.

        Args:
            message: The message.
            stamp: What its head begins with; see ``stamp_of``.
            array: Its data. That of a long message stays as it is until it has gone.
            tag: The tag.
            requests: Gets the engine's requests, one for each piece.
        """
        try:
            slot = self.sending.pop()  # which another thread may do too
        except IndexError:
            slot = Slot(self._engine.memory)
        if slot.message is not message:
            slot.prepare(message)
        slot.stamp[:] = stamp
        send, peer = self._send, message.peer
        if not message.long:
            slot.data[...] = array
        requests.append(send(slot.piece, peer, tag))
        for start, stop in message.rest:
            requests.append(send(self._engine.memory(array[start:stop]), peer, tag + 1))
        return slot

    def land(self, peer: int, tag: int, requests: list[Any]) -> Slot:
        """Begins to receive a head and what comes with it, and returns the memory where it lands."""
        try:
            slot = self.landing.pop()
        except IndexError:
            slot = Slot(self._engine.memory)
        requests.append(self._receive(slot.whole, peer, tag))
        return slot

    def receive_rest(self, message: Message, array: np.ndarray, tag: int, requests: list[Any]) -> None:
        """Begins to receive what follows a head that was checked; ``requests`` gets the engine's."""
        for start, stop in message.rest:
            requests.append(self._receive(self._engine.memory(array[start:stop]), message.peer, tag + 1))

    def failed(self, error: Exception, what: str) -> CommunicationError:
        """What an error of the engine's means for this rank.

        Args:
            error: The error.
            what: What this rank was in.

        Returns:
            PeerDiedError where a rank has died.
        """
        name = self._engine.name
        why = self._watch.explain_failure(what, self._engine.lost(), name)
        return why or CommunicationError(f"rank {self.rank}: {name} failed in {what}: {error}")

    # -- the messages of a step ------------------------------------------------------------------------

    def _finish(
        self,
        sends: Messages,
        receives: Messages,
        landed: list[Slot],
        requests: list[Any],
        tag: int,
        stamp: bytes,
        what: str,
    ) -> None:
        """Waits until all messages have come and gone; receives what follows the heads of long ones.

        Args:
            sends: Messages that this rank sends.
            receives: Messages to this rank.
            landed: Where the heads of the latter land.
            requests: The engine's: the heads received, what is sent, and then what follows the heads.
            tag: The tag of the heads.
            stamp: What they begin with.
            what: The call, in words.
        """
        heads = [number for number, (message, _) in enumerate(receives) if message.long]
        done, is_done = len(requests), self.is_done

        def held_up() -> tuple[int, bool]:
            nonlocal done
            ends = [(message.peer, True) for message, _ in receives]
            ends += [(message.peer, False) for message, _ in sends for _ in range(1 + len(message.rest))]
            ends += followed
            pending = [not is_done(request) for request in requests]
            for (message, _), slot, absent in zip(receives, landed, pending, strict=False):
                if not (absent or message.long):
                    message.check(self.rank, stamp, slot)
            before, done = done, pending.count(False)
            if done > before and any(message.long for message, _ in (*sends, *receives)):
                wait.moved()
            return ends[pending.index(True)] if True in pending else (self.rank, False)

        wait, followed = Wait(self._watch, what, self.noticed), list[tuple[int, bool]]()
        while heads:
            later: list[int] = []
            late: set[int] = set()  # ranks whose first head has not come
            for number in heads:
                message, array = receives[number]
                if message.peer in late or not is_done(requests[number]):
                    late.add(message.peer)
                    later.append(number)
                    continue
                message.check(self.rank, stamp, landed[number])
                followed += [(message.peer, True)] * len(message.rest)
                self.receive_rest(message, array, tag, requests)
            if len(later) == len(heads):
                wait.pause(held_up)
            heads = later
        while not self._all_done(requests):
            wait.pause(held_up)
        wait.end()

    # -- the end -----------------------------------------------------------------------------------

    def abandon(self, requests: list[Any], kept: object, drained: Sequence[Any] = ()) -> None:
        """Leaves messages to the engine that are not done; what it may still read or write is never freed.

        Args:
            requests: The engine's. Those that receive and have met no message are taken back.
            kept: The memory that they read or write.
            drained: Those that write to arrays of the caller's; what has begun to come gets a moment to end.
        """
        with contextlib.suppress(self.error):
            for request in requests:
                if not self.is_done(request):
                    self._engine.cancel(request)
            end = time.monotonic() + _DRAIN_S
            while not self._all_done(drained) and time.monotonic() < end:
                time.sleep(_DRAIN_POLL_S)
            if self._all_done(requests):
                return
        self._engine.stop()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((requests, kept)))

    def notify(self) -> None:
        """Lets the other ranks know that this one has given up, and that the store says why."""
        with contextlib.suppress(self.error):
            none = self._engine.memory(np.empty(0, np.uint8))
            requests = [self._send(none, q, _NOTICE_TAG) for q in self._engine.reached()]
            self.abandon(requests, [])

    def noticed(self) -> bool:
        """Whether another rank has given up, or was lost by the engine."""
        try:
            return self._engine.first(_NOTICE_TAG) is not None
        except self.error:
            return True

    def check_end(self) -> None:
        """Looks for messages that no call of this rank has received.

        Raises:
            MismatchError: There is one.
        """
        with contextlib.suppress(self.error):  # a rank has died, of which no call needed anything
            for tag in (COLLECTIVE_TAG, TRANSFER_TAG, MESSAGE_TAG):
                self._look_for(tag)

    def _look_for(self, tag: int) -> None:
        peer = self._engine.first(tag)
        if peer is not None:
            requests: list[Any] = []
            slot = self.land(peer, tag, requests)
            end = time.monotonic() + _LAST_LOOK_S
            while not (came := self.is_done(requests[0])) and time.monotonic() < end:
                time.sleep(0)
            if not came:
                self.abandon(requests, slot)
            sent = in_words(slot.head.tobytes()) if came else "a message"
            raise MismatchError(
                f"rank {peer} sent {sent}, which rank {self.rank} never received; {SAME_CALLS}", peer=peer
            )
