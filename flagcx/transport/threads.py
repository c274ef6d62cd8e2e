"""NumPy arrays between ranks that are threads of one process, such as ``fc.launch(..., threads=True)`` makes.

A sender leaves a message in the box of a pair of ranks: a copy of it if it is small, else the array itself,
for which it waits until the receiver has read it. Waits are for conditions: no rank spins, and every rank
that ends, gives up or makes another call wakes those that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import NoReturn

import numpy as np

from flagcx.bootstrap.clock import TICK_S, ActiveClock
from flagcx.bootstrap.thread_rank import thread_rank
from flagcx.errors import AbortedError, MismatchError, PeerDiedError, PeerTimeoutError
from flagcx.transport.average import averaging
from flagcx.transport.base import Call, Plan, TransportContext
from flagcx.transport.messenger import Message, Messenger
from flagcx.transport.steps import HostTransport, Messages, MessageSteps
from flagcx.transport.thread_room import MESSAGES, STEPS, Room, Sent, enter_room
from flagcx.transport.waits import IN_MESSAGES, ON_HOST

_EAGER_NBYTES = 64 << 10
_LONGEST_REST_S = 0.1
_MOST_EAGER = 256
"""Messages from one rank to another that are copied at once; a sender that is further ahead waits."""
_SAME = (
    "every rank must make the same calls in the same order, with the same count, dtype, operation, algorithm "
    "and root"
)


@dataclass(slots=True)
class _Counts:
    """What the thread of one rank counts."""

    sequence: int = 0
    waited_ns: int = 0
    background: bool = False


class ThreadsTransport(HostTransport):
    """Carries NumPy arrays between the threads of one process.

    Args:
        context: The communicator.

    Raises:
        ArgumentError: The ranks are not threads of one process.
    """

    name = "threads"

    def __init__(self, context: TransportContext) -> None:
        self.rank, self.size = context.rank, context.size
        self._timeout_s, self._waits = context.config.timeout_s, context.waits
        self._room = enter_room(context)
        self.messenger = ThreadsMessenger(self, self._room, context)
        self.progress = counts = self._counts = _Counts()
        if context.waits is not None:
            context.waits.calls[ON_HOST] = lambda: counts.sequence
        own = thread_rank.get()
        if own is not None:
            own.on_failure.append(lambda reason: self.abort(reason, self.rank))

    def _compile(self, call: Call) -> Plan:
        words = call.describe()
        exchange, enter = partial(self._exchange, words=words), partial(self._enter, words)
        return averaging(call, lambda call: MessageSteps(call, self.scratch, exchange, enter))

    def has_lost(self) -> bool:
        """Whether a rank has given up; see ``Transport.has_lost``."""
        return bool(self._room.failed)

    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Sends and receives at once; see ``Transport.transfer``."""
        self._exchange(sends, receives, "")

    def _enter(self, words: str) -> None:
        """Counts a call of all ranks, and compares it with what the other ranks called."""
        room, number = self._room, self._counts.sequence
        self._counts.sequence = number + 1
        with room.lock:
            if room.failed:
                self.examine(self.rank, words)
            entered = room.calls.setdefault(number, [words, self.rank, 0])
            entered[2] += 1
            if entered[2] == self.size:
                del room.calls[number]
        if entered[0] != words:
            raise MismatchError(
                f"ranks disagree on call {number}: rank {self.rank} called {words}, rank {entered[1]} called "
                f"{entered[0]}; {_SAME}",
                peer=entered[1],
            )

    def _exchange(self, sends: Messages, receives: Messages, words: str) -> None:
        room, rank = self._room, self.rank
        left = [(self.put(STEPS, array.reshape(-1), peer, words), peer) for array, peer in sends]
        for array, peer in receives:
            box = room.boxes[STEPS][rank][peer]
            with room.lock:
                if not box:
                    self._wait(lambda box=box: box, peer, words)  # type: ignore[misc]
                message = box.popleft()
            self.take_message(message, array.reshape(-1), peer, words)
        for message, peer in left:
            if not message.taken:
                with room.lock:
                    self._wait(lambda message=message: message.taken, peer, words)  # type: ignore[misc]

    def put(self, lane: int, array: np.ndarray, peer: int, words: str) -> Sent:
        """Leaves a message for a peer."""
        room = self._room
        box = room.boxes[lane][peer][self.rank]
        eager = array.nbytes <= _EAGER_NBYTES and len(box) < _MOST_EAGER
        message = Sent(words, array.copy() if eager else array, eager)
        with room.lock:
            box.append(message)
            room.wake(peer)
        return message

    def take_message(self, message: Sent, target: np.ndarray, peer: int, words: str) -> None:
        """Copies a message that a peer has left, and lets the peer use its array again."""
        room, data = self._room, message.data
        if message.call != words or data.dtype != target.dtype or data.size != target.size:
            self._refuse(peer, message, words, target)
        target[...] = data
        if not message.taken:
            with room.lock:
                message.taken = True
                room.wake(peer)

    def _wait(self, ready: Callable[[], object], peer: int, words: str) -> None:
        """Waits until ``ready()``, with the lock held; ``words`` is empty for a send or receive.

        Raises:
            CommunicationError: A rank ended, gave up or came too late.
        """
        room, clock, waits = self._room, ActiveClock(), self._waits
        begun = perf_counter_ns()
        room.waiting.add((self.rank, STEPS))
        while not ready():
            self.examine(peer, words)
            waited_s, why = clock.now(), ""
            late = waited_s >= self._timeout_s
            if waits is not None:
                why = waits.look(ON_HOST, _name(words), peer, waited_s, late)
            if late:
                self.give_up_waiting(peer, words, why)
            left = min(self._timeout_s - waited_s, TICK_S)
            room.wakes[self.rank].wait(left if waits is None else min(left, waits.after_s / 5))
        if waits is not None:
            waits.end(ON_HOST)
        room.waiting.discard(
            (self.rank, STEPS)
        )  # not after an error: a rank that gives up is not the one at fault
        self._counts.waited_ns += perf_counter_ns() - begun

    def examine(self, peer: int, words: str, name: str = "") -> None:
        """Raises if a rank ended, gave up or died; with the lock held.

        Args:
            peer: The rank that is waited for.
            words: The call of all ranks that waits; empty where only the two ranks take part.
            name: What to call it; ``words`` by default.
        """
        name = name or _name(words)
        for q, (reason, culprit) in self._room.failed.items():
            if q == culprit:
                raise PeerDiedError(
                    f"rank {q} died, so {name} on rank {self.rank} cannot go on: {reason}", peer=q
                )
            raise AbortedError(f"rank {q} gave up: {reason}", peer=q if culprit is None else culprit)
        for q, calls in self._room.closed.items():
            if (calls < self._counts.sequence) if words else q == peer:
                raise PeerDiedError(
                    f"rank {q} has ended or closed its communicator while rank {self.rank} waited in "
                    f"{name}; every rank must make the same calls",
                    peer=q,
                )

    def give_up_waiting(self, peer: int, words: str, why: str, name: str = "") -> NoReturn:
        """Names the ranks that keep the rest waiting: those that do not wait themselves."""
        waiting = {q for q, _ in self._room.waiting}
        suspects = [q for q in range(self.size) if q not in waiting] if words else []
        names = ", ".join(f"rank {q}" for q in suspects) or f"rank {peer}"
        raise PeerTimeoutError(
            f"{names} did not take part within {self._timeout_s:g} s (rank {self.rank} waits for rank {peer} "
            f"in {name or _name(words)}{why}); it is computing, or stuck elsewhere. A longer time-out: "
            f"fc.init(timeout_s=...) or FLAGCX_TIMEOUT_S",
            peer=suspects[0] if suspects else peer,
        )

    def _refuse(self, peer: int, message: Sent, words: str, target: np.ndarray) -> NoReturn:
        raise MismatchError(
            f"ranks disagree: rank {peer} sent {_describe(message.data, message.call)}, and rank {self.rank} "
            f"expects {_describe(target, words)}; {_SAME}",
            peer=peer,
        )

    def check_end(self) -> None:
        """Checks that the peers have made the same calls; see ``Transport.check_end``."""
        room, made = self._room, self._counts.sequence
        with room.lock:
            if room.failed:
                return  # The error of the rank that failed says more.
            further = [(q, f"called {words}") for n, (words, q, _) in room.calls.items() if n >= made]
            for boxes in room.boxes:
                for q, box in enumerate(boxes[self.rank]):
                    further += [(q, f"sent {_describe(message.data, message.call)}") for message in box]
        for q, what in further:
            raise MismatchError(
                f"rank {q} {what}, and rank {self.rank} never did the like; every rank must make the same "
                f"calls",
                peer=q,
            )

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers why this rank cannot go on; a rank that names itself as the culprit has died."""
        with self._room.lock:
            if self.rank not in self._room.closed:
                self._room.failed.setdefault(self.rank, (reason, culprit))
                self._room.wake_all()

    def close(self) -> None:
        """Tells the peers that this rank makes no further call."""
        with self._room.lock:
            self._room.closed.setdefault(self.rank, self._counts.sequence)
            self._room.wake_all()


class ThreadsMessenger(Messenger):
    """Carries the messages of one rank to and from the other threads.

    Args:
        transport: The rank's.
        room: What the ranks share.
        context: The communicator.
    """

    def __init__(self, transport: ThreadsTransport, room: Room, context: TransportContext) -> None:
        self._transport, self._room = transport, room
        self._rank, self._waits, self.timeout_s = context.rank, context.waits, context.config.timeout_s
        self._seen = {True: -1, False: -1}

    def begin(self, sends: bool, array: np.ndarray, peer: int) -> Message:
        """Begins a message; see ``Messenger.begin``."""
        flat = array.reshape(-1)
        if sends:
            return _Outgoing(peer, self._transport.put(MESSAGES, flat, peer, ""))
        return _Incoming(peer, flat, self._room.boxes[MESSAGES][self._rank][peer], self._transport)

    def examine(self, message: Message, waited_s: float, late: bool, caller: bool) -> None:
        """Looks for a rank that ended, gave up or is late; see ``Messenger.examine``."""
        transport, peer = self._transport, message.peer
        name = "a send" if message.sends else "a receive"
        with self._room.lock:
            if message.ready():
                return
            transport.examine(peer, "", name)
            if not caller:
                return
            self._room.waiting.add((self._rank, MESSAGES))
        why = "" if self._waits is None else self._waits.look(IN_MESSAGES, name, peer, waited_s, late)
        if late:
            transport.give_up_waiting(peer, "", why, name)

    def end_wait(self) -> None:
        """A caller's wait is over."""
        self._room.waiting.discard((self._rank, MESSAGES))
        if self._waits is not None:
            self._waits.end(IN_MESSAGES)

    def rest(self, looks: int, waited_s: float, caller: bool) -> None:
        """Waits until another rank has done something, unless one has since the last rest."""
        room, rank = self._room, self._rank
        with room.lock:
            if room.changes[rank] == self._seen[caller]:
                room.wakes[rank].wait(_LONGEST_REST_S)
            self._seen[caller] = room.changes[rank]


@dataclass(slots=True)
class _Outgoing:
    """A message that this rank sends; see ``messenger.Message``."""

    peer: int
    _message: Sent
    sends: bool = True

    def ready(self) -> bool:
        return self._message.taken

    def advance(self) -> bool:
        return True


@dataclass(slots=True)
class _Incoming:
    """A message that this rank receives; see ``messenger.Message``."""

    peer: int
    _target: np.ndarray
    _box: deque[Sent]
    _transport: ThreadsTransport
    sends: bool = False

    def ready(self) -> bool:
        return bool(self._box)

    def advance(self) -> bool:
        self._transport.take_message(self._box.popleft(), self._target, self.peer, "")
        return True


def _describe(data: np.ndarray, words: str) -> str:
    return f"{data.nbytes:,} bytes of {words or f'send and receive of {data.dtype.name}'}"


def _name(words: str) -> str:
    return words or "a send or receive"
