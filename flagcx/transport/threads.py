"""NumPy arrays between ranks that are threads of one process, such as ``fc.launch(..., threads=True)`` makes.

A sender leaves a message in the box of a pair of ranks: a copy of it if it is small, else the array itself,
for which it waits until the receiver has read it. Waits are for conditions: no rank spins, and every rank
that ends, gives up or makes another call wakes those that wait.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter_ns
from typing import NoReturn

import numpy as np

from flagcx.bootstrap.thread_rank import thread_rank
from flagcx.errors import AbortedError, ArgumentError, MismatchError, PeerDiedError, PeerTimeoutError
from flagcx.transport.average import averaging
from flagcx.transport.base import Call, Plan, TransportContext
from flagcx.transport.steps import HostTransport, Messages, MessageSteps
from flagcx.transport.waits import ON_HOST

_EAGER_NBYTES = 64 << 10
_MOST_EAGER = 256
"""Messages from one rank to another that are copied at once; a sender that is further ahead waits."""
_SAME = (
    "every rank must make the same calls in the same order, with the same count, dtype, operation, algorithm "
    "and root"
)


@dataclass(slots=True, eq=False)
class _Message:
    """A message on its way.

    Attributes:
        call: The call that it belongs to, in words.
        data: The data.
        taken: Whether the sender may use its array again.
    """

    call: str
    data: np.ndarray
    taken: bool


@dataclass(slots=True)
class _Counts:
    """What the thread of one rank counts."""

    sequence: int = 0
    waited_ns: int = 0
    background: bool = False


class _Room:
    """What the ranks of one communicator share; all of it under ``lock``.

    Attributes:
        wakes: For each rank, what it waits for.
        boxes: The messages to each rank from each that have not been received.
        calls: For each call that not all ranks have made yet: its words, a rank that made it, and how many.
        waiting: The ranks that wait.
        closed: How many calls each rank had made that has closed its communicator.
        failed: Why each rank gave up that did, and the rank at fault.
        joined: How many ranks have come.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.wakes = [threading.Condition(self.lock) for _ in range(size)]
        self.boxes: list[list[deque[_Message]]] = [[deque() for _ in range(size)] for _ in range(size)]
        self.calls: dict[int, list] = {}
        self.waiting: set[int] = set()
        self.closed: dict[int, int] = {}
        self.failed: dict[int, tuple[str, int | None]] = {}
        self.joined = 0

    def wake_all(self) -> None:
        """Lets every rank look again."""
        for wake in self.wakes:
            wake.notify_all()


@lru_cache(maxsize=1)
def _rooms() -> dict[str, _Room]:
    """The rooms of this process that not all of their ranks have entered yet."""
    return {}


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
        self._room = _enter_room(context)
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

    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Sends and receives at once; see ``Transport.transfer``."""
        self._exchange(sends, receives, "")

    def _enter(self, words: str) -> None:
        """Counts a call of all ranks, and compares it with what the other ranks called."""
        room, number = self._room, self._counts.sequence
        self._counts.sequence = number + 1
        with room.lock:
            if room.failed:
                self._examine(self.rank, words)
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
        left = [(self._send(array.reshape(-1), peer, words), peer) for array, peer in sends]
        for array, peer in receives:
            box = room.boxes[rank][peer]
            with room.lock:
                if not box:
                    self._wait(lambda box=box: box, peer, words)  # type: ignore[misc]
                message = box.popleft()
            data, target = message.data, array.reshape(-1)
            if message.call != words or data.dtype != target.dtype or data.size != target.size:
                self._refuse(peer, message, words, target)
            target[...] = data
            if not message.taken:
                with room.lock:
                    message.taken = True
                    room.wakes[peer].notify_all()
        for message, peer in left:
            if not message.taken:
                with room.lock:
                    self._wait(lambda message=message: message.taken, peer, words)  # type: ignore[misc]

    def _send(self, array: np.ndarray, peer: int, words: str) -> _Message:
        room = self._room
        box = room.boxes[peer][self.rank]
        eager = array.nbytes <= _EAGER_NBYTES and len(box) < _MOST_EAGER
        message = _Message(words, array.copy() if eager else array, eager)
        with room.lock:
            box.append(message)
            room.wakes[peer].notify_all()
        return message

    def _wait(self, ready: Callable[[], object], peer: int, words: str) -> None:
        """Waits until ``ready()``, with the lock held; ``words`` is empty for a send or receive.

        Raises:
            CommunicationError: A rank ended, gave up or came too late.
        """
        room, start, waits = self._room, time.monotonic(), self._waits
        begun = perf_counter_ns()
        room.waiting.add(self.rank)
        while not ready():
            self._examine(peer, words)
            waited_s, why = time.monotonic() - start, ""
            late = waited_s >= self._timeout_s
            if waits is not None:
                why = waits.look(ON_HOST, _name(words), peer, waited_s, late)
            if late:
                self._give_up_waiting(peer, words, why)
            left = self._timeout_s - waited_s
            room.wakes[self.rank].wait(left if waits is None else min(left, waits.after_s / 5))
        if waits is not None:
            waits.end(ON_HOST)
        room.waiting.discard(self.rank)  # not after an error: a rank that gives up is not the one at fault
        self._counts.waited_ns += perf_counter_ns() - begun

    def _examine(self, peer: int, words: str) -> None:
        for q, (reason, culprit) in self._room.failed.items():
            if q == culprit:
                raise PeerDiedError(
                    f"rank {q} died, so {_name(words)} on rank {self.rank} cannot go on: {reason}", peer=q
                )
            raise AbortedError(f"rank {q} gave up: {reason}", peer=q if culprit is None else culprit)
        for q, calls in self._room.closed.items():
            if (calls < self._counts.sequence) if words else q == peer:
                raise PeerDiedError(
                    f"rank {q} has ended or closed its communicator while rank {self.rank} waited in "
                    f"{_name(words)}; every rank must make the same calls",
                    peer=q,
                )

    def _give_up_waiting(self, peer: int, words: str, why: str) -> NoReturn:
        """Names the ranks that keep the rest waiting: those that do not wait themselves."""
        suspects = [q for q in range(self.size) if q not in self._room.waiting] if words else []
        names = ", ".join(f"rank {q}" for q in suspects) or f"rank {peer}"
        raise PeerTimeoutError(
            f"{names} did not take part within {self._timeout_s:g} s (rank {self.rank} waits for rank {peer} "
            f"in {_name(words)}{why}); it is computing, or stuck elsewhere. A longer time-out: "
            f"fc.init(timeout_s=...) or FLAGCX_TIMEOUT_S",
            peer=suspects[0] if suspects else peer,
        )

    def _refuse(self, peer: int, message: _Message, words: str, target: np.ndarray) -> NoReturn:
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
            for q, box in enumerate(room.boxes[self.rank]):
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


def _enter_room(context: TransportContext) -> _Room:
    """Finds the room that rank 0 makes."""
    token = secrets.token_hex(8)
    if context.rank == 0:
        _rooms()[token] = _Room(context.size)
    try:
        cards = [json.loads(card) for card in context.exchange(json.dumps([os.getpid(), token]).encode())]
    except BaseException:
        _rooms().pop(token, None)
        raise
    elsewhere = [(q, pid) for q, (pid, _) in enumerate(cards) if pid != cards[0][0]]
    room = _rooms().get(cards[0][1])
    if elsewhere or room is None:
        _rooms().pop(token, None)
        q, pid = (elsewhere or [(context.rank, os.getpid())])[0]
        raise ArgumentError(
            f"transport='threads' needs ranks that are threads of one process; rank 0 is in process "
            f"{cards[0][0]}, rank {q} in process {pid}; start them with fc.launch(function, threads=True)"
        )
    with room.lock:
        room.joined += 1
        if room.joined == context.size:
            del _rooms()[cards[0][1]]
    return room


def _describe(data: np.ndarray, words: str) -> str:
    return f"{data.nbytes:,} bytes of {words or f'send and receive of {data.dtype.name}'}"


def _name(words: str) -> str:
    return words or "a send or receive"
