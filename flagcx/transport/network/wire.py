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
from typing import Any, NoReturn

import numpy as np

from flagcx.errors import CommunicationError, MismatchError
from flagcx.transport.network.engine import Engine
from flagcx.transport.network.flight import Flight, Messages
from flagcx.transport.network.message import SAME_CALLS, Message, Slot, in_words, put, stamp_of
from flagcx.transport.network.watch import Wait, Watch

COLLECTIVE_TAG, TRANSFER_TAG, _NOTICE_TAG, MESSAGE_TAG = 2, 4, 6, 8
_LAST_LOOK_S = 1.0
_DRAIN_S, _DRAIN_POLL_S = 1.0, 1e-3
"""How long, after an error, messages may take that are just being written to arrays of the caller's."""


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
        flights: What was begun and is under way, in this order; messages of ``messenger.py`` aside.
    """

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine, self._watch, self.error, self.rank = engine, watch, engine.error, engine.rank
        self._send, self._receive = engine.send, engine.receive
        self.moved, self.is_done, self._all_done = engine.some_done, engine.is_done, engine.all_done
        self.sending: list[Slot] = []
        self.landing: list[Slot] = []
        self.flights: list[Flight] = []

    def exchange(
        self,
        sends: Messages,
        receives: Messages,
        tag: int,
        what: str = "",
        number: int = 0,
        ufunc: Any = None,
    ) -> None:
        """Sends and receives messages, all at once; see ``begin`` and ``end``."""
        self.end(self.begin(sends, receives, tag, what, number), ufunc)

    def begin(self, sends: Messages, receives: Messages, tag: int, what: str = "", number: int = 0) -> Flight:
        """Begins to send and receive messages. What is begun is ended in the same order.

        Args:
            sends: Messages that this rank sends.
            receives: Messages to this rank, in the order in which they are added.
            tag: ``COLLECTIVE_TAG`` or ``TRANSFER_TAG``.
            what: The call that all ranks make, in words; empty for one of two ranks.
            number: The number of that call.

        Raises:
            CommunicationError: The engine failed.
        """
        flight = Flight(sends, receives, tag, what, stamp_of(number))
        self.flights.append(flight)
        requests = flight.requests
        try:
            for message, _ in receives:
                if message.long:
                    flight.heads.append(len(flight.landed))
                    flight.long = True
                flight.landed.append(self.land(message.peer, tag, requests))
            for message, array in sends:
                if message.long:
                    flight.long = True
                flight.sent.append(self.send(message, flight.stamp, array, tag, requests))
        except BaseException as error:
            self.fail(error, flight.name)
        return flight

    def end(self, flight: Flight, ufunc: Any = None) -> None:
        """Waits until the messages have come and gone, and puts the short ones where they belong.

        Args:
            flight: What was begun.
            ufunc: Adds what comes to what is there.

        Raises:
            MismatchError: A rank sent something else.
            CommunicationError: A rank died, gave up or came too late.
        """
        rank, long = self.rank, flight.long
        try:
            if long or not self._all_done(flight.requests):
                self._wait(flight)
            if long and self.noticed():
                # A rank that gave up may have gone on to change the array of which the last data came.
                self._watch.check_failures(flight.name)
            for (message, _), slot in zip(flight.receives, flight.landed, strict=True):
                if not message.long:
                    message.check(rank, flight.stamp, slot)
            for (message, array), slot in zip(flight.receives, flight.landed, strict=True):
                if not message.long:
                    put(message, array, slot, ufunc)
        except BaseException as error:
            self.fail(error, flight.name)
        self.flights.remove(flight)
        self.sending += reversed(flight.sent)  # so that the same call gets the same memory
        self.landing += reversed(flight.landed)

    def swap(
        self,
        given: tuple[Message, np.ndarray],
        wanted: tuple[Message, np.ndarray],
        tag: int,
        what: str,
        number: int,
        ufunc: Any,
    ) -> None:
        """Sends one short message of a collective and receives one, as ``exchange`` does, in less Python.

        Right after system calls a line of Python takes several times as long as in a loop, so that what
        ``begin`` and ``end`` do for any number of messages took longer than one message.

        Args:
            given: The message that this rank sends, and its data.
            wanted: The message to this rank, and where it goes.
            tag, what, number: As ``begin`` takes them.
            ufunc: Adds what comes to what is there.
        """
        (message, data), (awaited, array) = given, wanted
        stamp, requests = stamp_of(number), list[Any]()
        try:
            landed, sent = self.landing.pop(), self.sending.pop()  # which another thread may do too
        except IndexError:
            landed, sent = Slot(self._engine.memory), Slot(self._engine.memory)
        try:
            if sent.message is not message:
                sent.prepare(message)
            sent.stamp[:] = stamp
            sent.data[...] = data
            requests.append(self._send(sent.piece, message.peer, tag))  # for which the peer waits
            requests.insert(0, self._receive(landed.whole, awaited.peer, tag))
            all_done = self._all_done
            if not (all_done(requests) or all_done(requests) or all_done(requests)):
                flight = Flight((given,), (wanted,), tag, what, stamp)
                flight.requests, flight.landed, flight.sent = requests, [landed], [sent]
                self._wait(flight)
            if landed.head.tobytes() != stamp + awaited.kind:
                awaited.check(self.rank, stamp, landed)
            put(awaited, array, landed, ufunc)
        except BaseException as error:
            self.abandon(requests, (landed, sent))
            self.fail(error, what)
        self.sending.append(sent)
        self.landing.append(landed)

    def fail(self, error: BaseException, what: str) -> NoReturn:
        """Leaves all that was begun to the engine, and raises what ``error`` means.

        Args:
            error: The error.
            what: What this rank was in.
        """
        flights, self.flights = self.flights, []
        for flight in flights:
            self.abandon(flight.requests, flight, flight.requests[flight.after_first :])
        if isinstance(error, self.error):
            raise self.failed(error, what) from error
        raise error

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

    # -- waiting ---------------------------------------------------------------------------------------

    def _wait(self, flight: Flight) -> None:
        """Waits until all messages of a flight have come and gone."""
        wait, done = Wait(self._watch, flight.what, self.noticed), len(flight.requests)

        def held_up() -> tuple[int, bool]:
            nonlocal done
            pending = [not self.is_done(request) for request in flight.requests]
            flight.check_short(self.rank, pending)
            before, done = done, pending.count(False)
            if done > before and flight.long:
                wait.moved()
            return flight.ends()[pending.index(True)] if True in pending else (self.rank, False)

        self.advance()
        while flight.heads or not self._all_done(flight.requests):
            wait.pause(held_up)
            self.advance()
        wait.end()

    def advance(self) -> None:
        """Begins to receive what follows those heads of long messages that have come.

        Heads of a rank come in the order of flights, and so does what follows them.
        """
        late: set[int] = set()  # ranks whose first head has not come
        for flight in self.flights:
            for number in [*flight.heads]:
                message, array = flight.receives[number]
                if message.peer in late or not self.is_done(flight.requests[number]):
                    late.add(message.peer)
                    continue
                message.check(self.rank, flight.stamp, flight.landed[number])
                flight.heads.remove(number)
                flight.followed += [(message.peer, True)] * len(message.rest)
                self.receive_rest(message, array, flight.tag, flight.requests)

    def keep_moving(self) -> None:
        """Lets what is under way move while this rank waits for something else."""
        self.advance()
        for flight in self.flights:
            self._all_done(flight.requests)

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
