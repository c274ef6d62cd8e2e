"""Runs schedules step by step over messages between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcx.schedule.model import Buffer
from flagcx.transport.base import Call
from flagcx.transport.network.flight import Flight
from flagcx.transport.network.message import SHORT_NBYTES, Message, kind_of
from flagcx.transport.network.watch import Watch
from flagcx.transport.network.wire import COLLECTIVE_TAG, Wire
from flagcx.transport.scratch import Scratch
from flagcx.transport.steps import Part, StepParts, Steps

_SCRATCH = int(Buffer.SCRATCH)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The messages of one step.

    Attributes:
        sends: What this rank sends, and where it lies.
        receives: What comes, and where it goes.
        late: What is added when all of it has come and gone: the target, and where it waits meanwhile.
        swaps: Whether this rank sends one short message and receives one.
    """

    sends: tuple[tuple[Message, Part], ...]
    receives: tuple[tuple[Message, Part], ...]
    late: tuple[tuple[Part, Part], ...]
    swaps: bool


class NetworkSteps(Steps):
    """A program over messages between hosts.

    What comes is added when all of a step has come. If one of its messages is long, what is added waits in
    memory of the transport: a long one is received straight into its place.

    Args:
        wire: Carries the messages.
        watch: Counts the calls.
        call: The call.
        scratch: The memory that plans share. What is added late follows the schedule's SCRATCH there.
        words: The call in words that are the same on every rank.
    """

    def __init__(self, wire: Wire, watch: Watch, call: Call, scratch: Scratch, words: str) -> None:
        self._wire, self._watch, self._words = wire, watch, words
        super().__init__(call, scratch)

    def _scratch_count(self, steps: Sequence[StepParts]) -> int:
        self._late_at = super()._scratch_count(steps)
        long = (step for step in steps if self._is_long(step))
        added = (sum(b - a for (_, a, b), _, adds in step.receives if adds) for step in long)
        return self._late_at + max(added, default=0)

    def _messages(self, step: StepParts) -> _Exchange:
        sends = [(self._message(part, peer), part) for part, peer in step.sends]
        receives = [(self._message(part, peer, adds), part) for part, peer, adds in step.receives]
        late: list[tuple[Part, Part]] = []
        if self._is_long(step):
            at = self._late_at
            for i, (message, part) in enumerate(receives):
                if message.adds:
                    waiting = _SCRATCH, at, at + message.count
                    receives[i] = self._message(waiting, message.peer), waiting
                    late.append((part, waiting))
                    at += message.count
        swaps = len(sends) == len(receives) == 1 and not self._is_long(step)
        return _Exchange(tuple(sends), tuple(receives), tuple(late), swaps)

    def _is_long(self, step: StepParts) -> bool:
        parts = [*(part for part, _ in step.sends), *(part for part, _, _ in step.receives)]
        return any((stop - start) * self._dtype.itemsize > SHORT_NBYTES for _, start, stop in parts)

    def _message(self, part: Part, peer: int, adds: bool = False) -> Message:
        _, start, stop = part
        kind = kind_of(self._words, (stop - start) * self._dtype.itemsize)
        return Message(peer, kind, stop - start, self._dtype, adds)

    def _enter(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray | None) -> None:
        self._watch.calls += 1

    def _exchange(self, messages: _Exchange, arrays: Sequence[np.ndarray]) -> None:
        if messages.swaps:
            ((sent, (x, a, b)),), ((received, (y, c, d)),) = messages.sends, messages.receives
            self._wire.swap(
                (sent, arrays[x][a:b]),
                (received, arrays[y][c:d]),
                COLLECTIVE_TAG,
                self._words,
                self._watch.calls,
                self._ufunc,
            )
        else:
            self._end(messages, self._begin(messages, arrays), arrays)

    def _begin(self, messages: _Exchange, arrays: Sequence[np.ndarray]) -> Flight:
        return self._wire.begin(
            [(message, arrays[x][a:b]) for message, (x, a, b) in messages.sends],
            [(message, arrays[x][a:b]) for message, (x, a, b) in messages.receives],
            COLLECTIVE_TAG,
            self._words,
            self._watch.calls,
        )

    def _end(self, messages: _Exchange, flight: Flight, arrays: Sequence[np.ndarray]) -> None:
        self._wire.end(flight, self._ufunc)
        for (x, a, b), (_, start, stop) in messages.late:
            target = arrays[x][a:b]
            self._ufunc(target, arrays[_SCRATCH][start:stop], out=target)
