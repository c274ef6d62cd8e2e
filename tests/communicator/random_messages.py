"""Random programs of sends, receives and collectives that MPI's rules let no order of, nor buffer for, hang.

All ranks draw one list of events, which can be carried out one after the other even if no send ends before
its receive has begun: a blocking call meets one that has begun before, or its like in the same event, and a
wait comes after both sides have begun. Each rank makes its own calls of it, at its own pace. What a message
holds follows from its number, so that its receiver knows what must come.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import flagcx as fc

COUNTS = (0, 1, 5, 100, 1000, 8192, 20_000, 33_000, 70_000)
DTYPES = ("float64", "float32", "int16", "uint8", "complex64")


@dataclass(slots=True, eq=False)
class Message:
    """A message, and how often it has begun: on neither side, on one, on both."""

    number: int
    source: int
    to: int
    count: int
    dtype: str
    begun: int = 0


@dataclass(slots=True)
class Program:
    """The events, drawn: each is what to call on which ranks, in order.

    Attributes:
        events: For each event a list of (rank, what, message); in a collective, rank -1.
        open: For each pair of ranks what one side has begun, oldest first: True for a send.
        waits: What has begun and not been waited for: (rank, message).
    """

    size: int
    draw: random.Random
    first: int
    events: list[list[tuple[int, str, Any]]] = field(default_factory=list)
    open: dict[tuple[int, int], deque[tuple[bool, Message]]] = field(default_factory=dict)
    waits: list[tuple[int, Message]] = field(default_factory=list)

    def add(self) -> None:
        """Draws one event."""
        draw = self.draw
        kind = draw.random()
        if kind < 0.12:
            self.events.append([(-1, draw.choice(list(COLLECTIVES)), draw.randrange(self.size))])
        elif kind < 0.2:
            self._add_group()
        elif kind < 0.4 and self.waits:
            ready = [one for one in self.waits if one[1].begun == 2]
            if ready:
                self._wait(draw.choice(ready))
        else:
            self._add_message(draw.randrange(self.size), draw.randrange(self.size))

    def end(self) -> None:
        """Begins what is missing, and waits for all, in some order."""
        for pair in sorted(self.open):
            while self.open[pair]:
                sent, message = self.open[pair][0]
                self._begin(pair, not sent, message)
        for one in self.draw.sample(self.waits, len(self.waits)):
            self._wait(one)

    def _new(self, source: int, to: int) -> Message:
        self.first += 1
        return Message(self.first, source, to, self.draw.choice(COUNTS), self.draw.choice(DTYPES))

    def _add_message(self, source: int, to: int) -> None:
        pair, draw = (source, to), self.draw
        begun = self.open.setdefault(pair, deque())
        sends = draw.random() < 0.5
        if not begun and draw.random() < 0.3 and source != to:
            message = self._new(*pair)
            ways = [(source, "send", message), (to, "recv", message)]
            self.events.append(draw.sample(ways, 2))
        elif begun and draw.random() < 0.7:
            sent, message = begun[0]
            if draw.random() < 0.5:
                begun.popleft()
                message.begun = 2
                self.events.append([(to, "recv", message) if sent else (source, "send", message)])
            else:
                self._begin(pair, not sent, message)
        else:  # the first on this side, or one more on the side that is ahead
            sends = begun[0][0] if begun else sends
            self._begin(pair, sends, self._new(*pair))

    def _begin(self, pair: tuple[int, int], sends: bool, message: Message) -> None:
        message.begun += 1
        begun = self.open[pair]
        if message.begun == 2:
            begun.popleft()
        else:
            begun.append((sends, message))
        rank = pair[0] if sends else pair[1]
        self.waits.append((rank, message))
        self.events.append([(rank, "isend" if sends else "irecv", message)])

    def _add_group(self) -> None:
        """Messages of several ranks at once, between pairs where none has begun."""
        messages = []
        for _ in range(self.draw.randrange(1, 5)):
            pair = self.draw.randrange(self.size), self.draw.randrange(self.size)
            if not self.open.get(pair):
                messages.append(self._new(*pair))
        self.events.append([(-1, "group", messages)])

    def _wait(self, one: tuple[int, Message]) -> None:
        self.waits.remove(one)
        self.events.append([(one[0], "wait", one[1])])


def data_of(message: Message) -> np.ndarray:
    """What a message holds."""
    return (np.arange(message.count) * 3 + 11 * message.number).astype(message.dtype)


def _allreduce(comm: fc.Communicator, root: int) -> None:
    x = np.full(300 + root, comm.rank + 1, np.float32)
    assert (comm.allreduce(x) == comm.size * (comm.size + 1) // 2).all()


def _started(comm: fc.Communicator, root: int) -> None:
    x = np.full(9000, comm.rank + 1.0)
    assert (comm.allreduce(x, async_op=True).wait() == comm.size * (comm.size + 1) // 2).all()


def _broadcast(comm: fc.Communicator, root: int) -> None:
    x = np.full(40_000, float(comm.rank))
    assert (comm.broadcast(x, root) == root).all()


def _compressed(comm: fc.Communicator, root: int) -> None:
    x = np.ones(5000, np.float32)
    assert (comm.allreduce(x, compression="fp16") == comm.size).all()


COLLECTIVES: dict[str, Callable[[fc.Communicator, int], object]] = {
    "barrier": lambda comm, root: comm.barrier(),
    "allreduce": _allreduce,
    "started": _started,
    "broadcast": _broadcast,
    "compressed": _compressed,
}


class Runner:
    """Makes one rank's calls of a program."""

    def __init__(self, comm: fc.Communicator) -> None:
        self._comm = comm
        self._under_way: dict[tuple[int, bool], tuple[fc.Work, np.ndarray]] = {}

    def run(self, program: Program, draw: random.Random) -> None:
        for event in program.events:
            for rank, what, message in event:
                if rank == self._comm.rank:
                    self._call(what, message)
                elif rank == -1 and what == "group":
                    self._group(message)
                elif rank == -1:
                    COLLECTIVES[what](self._comm, message)
            if self._under_way and draw.random() < 0.1:
                draw.choice(list(self._under_way.values()))[0].done()
        assert not self._under_way

    def _call(self, what: str, message: Message) -> None:
        comm = self._comm
        if what == "wait":
            for sends in (True, False):
                found = self._under_way.pop((message.number, sends), None)
                if found is not None:
                    work, array = found
                    work.wait()
                    self._compare(array, message)
                    return
            raise AssertionError(f"message {message.number} has not begun")
        sends, starts = what.endswith("send"), what.startswith("i")
        array = data_of(message) if sends else np.zeros(message.count, message.dtype)
        call, peer = (comm.send, message.to) if sends else (comm.recv, message.source)
        work = call(array, peer, async_op=starts)
        if starts:
            self._under_way[message.number, sends] = work, array
        else:
            self._compare(array, message)

    def _group(self, messages: list[Message]) -> None:
        comm, got = self._comm, []
        with comm.group():
            for message in messages:
                if message.source == comm.rank:
                    comm.send(data_of(message), message.to)
            for message in messages:
                if message.to == comm.rank:
                    got.append((comm.recv(np.zeros(message.count, message.dtype), message.source), message))
        for array, message in got:
            self._compare(array, message)

    def _compare(self, array: np.ndarray, message: Message) -> None:
        assert (array == data_of(message)).all(), (self._comm.rank, message)


def run_random(seed: int, programs: int, events: int = 30) -> int:
    """Runs random programs one after the other; returns how many messages they had."""
    comm = fc.init(timeout_s=30)
    own, messages = random.Random(1000 * seed + comm.rank), 0
    for number in range(programs):
        program = Program(comm.size, random.Random(100_000 * seed + number), messages)
        for _ in range(events):
            program.add()
        program.end()
        try:
            Runner(comm).run(program, own)
        except fc.FlagcxError as error:
            raise AssertionError(f"program {number} of seed {seed}: {error}") from error
        messages = program.first
    comm.barrier()
    return messages
