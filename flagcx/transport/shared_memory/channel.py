"""Channels: how the messages of one step travel between pairs of ranks.

A message goes in pieces through the slots of its channel, each with a header that says how long the
whole message is and what call it belongs to, so that ranks that make different calls find out. A large
message stays where it is: its header tells the receiver where to read it, by cross-memory attach or, for an
array of ``comm.empty``, through its mapping; one copy instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns as now
from typing import Any

import numpy as np

from flagcx.errors import CommunicationError
from flagcx.transport.shared_memory.arena import PIECE_NBYTES, PIECES, Arena, Lane
from flagcx.transport.shared_memory.heap import SHARED
from flagcx.transport.shared_memory.words import (
    ABORTED,
    IN_PLACE,
    header_index,
    header_of,
    received_index,
    sent_index,
)
from flagcx.transport.steps import Part

RENDEZVOUS_NBYTES = 256 << 10
_READ_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Receive:
    """A receive, compiled.

    Attributes:
        peer: The rank that sends it.
        part: Where it lands, in elements.
        reduce: Whether it is combined with what is there.
        staged: Whether it must wait in memory of its own until the step's transfers are done.
        after_sends: Whether it must wait until this rank's sends have left.
        after: Positions of the receives of this step that are applied before.
    """

    peer: int
    part: Part
    reduce: bool
    staged: bool
    after_sends: bool
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of one step.

    Attributes:
        sends: The rank that each message goes to, and the part that is sent.
        receives: What is received, in the order in which it is applied.
        attach_nbytes: Messages of this size on are read where they lie, in the sender's private memory.
    """

    sends: tuple[tuple[int, Part], ...]
    receives: tuple[Receive, ...]
    attach_nbytes: int = RENDEZVOUS_NBYTES


def run_exchange(
    arena: Arena,
    step: Exchange,
    arrays: Sequence[np.ndarray],
    kinds: Sequence[int],
    ufunc: np.ufunc | None = None,
    point_to_point: bool = False,
) -> None:
    """Sends and receives all messages of a step, whichever can move first.

    Args:
        arena: The shared memory.
        step: The messages.
        arrays: One-dimensional arrays that the messages are parts of.
        kinds: For each, the signature of the call that its messages belong to; see ``CallLog.kind``.
        ufunc: Combines what is received with what is there.
        point_to_point: Whether only the ranks named take part.
    """
    lane = arena.steps
    sends = [
        Sending(arena, lane, peer, arrays[a][start:stop], kinds[a], step.attach_nbytes)
        for peer, (a, start, stop) in step.sends
    ]
    receives: list[Receiving] = []
    for plan in step.receives:
        before = [*(receives[i] for i in plan.after), *(sends if plan.after_sends else ())]
        receives.append(Receiving(arena, lane, plan, arrays, kinds, ufunc, point_to_point, before))
    sending, receiving = _advance(sends), receives
    while sending or receiving:
        moved = sum(lane.sent) + sum(lane.received)
        sending, receiving = _advance(sending), _advance(receiving)
        if (sending or receiving) and sum(lane.sent) + sum(lane.received) == moved:
            _pause(arena, _held_up_by_peers([*receiving, *sending]), point_to_point)
    for receive in receives:
        receive.settle()


def _advance(messages: list[Any]) -> list[Any]:
    """Advances messages; those of one peer strictly one after the other. Returns those that are not done."""
    blocked: set[int] = set()
    left = []
    for message in messages:
        if message.peer in blocked or not message.advance():
            blocked.add(message.peer)
            left.append(message)
    return left


def _held_up_by_peers(messages: list[Sending | Receiving]) -> list[Sending | Receiving]:
    """The messages that nothing but a peer holds up, of each peer the first."""
    first: dict[tuple[type, int], Sending | Receiving] = {}
    for message in messages:
        first.setdefault((type(message), message.peer), message)
    return [message for message in first.values() if not message.waits()]


def _pause(arena: Arena, waiting: list[Sending | Receiving], point_to_point: bool) -> None:
    def ready() -> bool:
        return any(message.ready() for message in waiting)

    signals, start = arena.signals, now()
    for _ in signals.spins:
        if ready():
            signals.waited_ns += now() - start
            return
    words = signals.words[waiting[0].peer]
    what = "send" if isinstance(waiting[0], Sending) else "receive"
    signals.wait_for(words, ready, point_to_point=what if point_to_point else "")
    signals.waited_ns += now() - start


class Sending:
    """A message on its way out.

    Args:
        arena: The shared memory.
        lane: The channels that it takes.
        peer: The rank that it goes to.
        message: The data.
        kind: The signature of the call that it belongs to.
        attach_nbytes: See ``Exchange``.
    """

    sends = True

    __slots__ = (
        "_arena",
        "_attach_nbytes",
        "_header",
        "_lane",
        "_message",
        "_piece",
        "_posted",
        "_start",
        "finished",
        "peer",
    )

    def __init__(
        self, arena: Arena, lane: Lane, peer: int, message: np.ndarray, kind: int, attach_nbytes: int
    ) -> None:
        self._arena, self._lane, self.peer, self._message = arena, lane, peer, message
        self._header = header_of(kind, message.nbytes)
        self._attach_nbytes = attach_nbytes
        self._piece = PIECE_NBYTES // message.itemsize
        self._start = 0
        self._posted = -1
        self.finished = False

    def waits(self) -> bool:
        """Whether another message of the step must go first."""
        return False

    def _free(self) -> bool:
        arena, lane = self._arena, self._lane
        received = arena.signals.words[self.peer][received_index(arena.rank, lane.number)]
        return lane.sent[self.peer] - received < PIECES

    def ready(self) -> bool:
        """Whether ``advance`` could do something."""
        if self._posted >= 0:
            received = received_index(self._arena.rank, self._lane.number)
            return self._arena.signals.words[self.peer][received] > self._posted
        return self._free()

    def advance(self) -> bool:
        """Moves what can be moved now. Returns whether the message has left."""
        if self._posted >= 0:
            self.finished = self.ready()
            return self.finished
        while self._free():
            location = self._location()
            if location is not None:
                self._posted = self._lane.sent[self.peer]
                self._post(self._header | IN_PLACE, location)
                return False
            stop = self._start + self._piece
            part = self._message[self._start : stop]
            if len(part):
                arena, lane = self._arena, self._lane
                at = arena.areas.piece(self.peer, lane.number, lane.sent[self.peer])
                arena.view(arena.rank, at, len(part), part.dtype)[...] = part
            self._post(self._header, 0)
            self._start = stop
            if stop >= len(self._message):
                self.finished = True
                return True
        return False

    def _location(self) -> int | None:
        """Where the receiver may read the message itself; None for one that goes through slots."""
        nbytes = self._message.nbytes
        if nbytes < min(RENDEZVOUS_NBYTES, self._attach_nbytes):
            return None
        location = self._arena.heap.locate(self._message)
        if location is None and self._arena.cross_memory and nbytes >= self._attach_nbytes:
            location = self._message.__array_interface__["data"][0]
        return location

    def _post(self, described: int, location: int) -> None:
        lane, signals = self._lane, self._arena.signals
        number = lane.sent[self.peer]
        index = header_index(self.peer, lane.number, number)
        signals.own[index] = described
        signals.own[index + 1] = location
        if signals.fence:
            signals.fence()
        lane.sent[self.peer] = number + 1
        signals.own[sent_index(self.peer, lane.number)] = number + 1


class Receiving:
    """A message on its way in.

    Args:
        arena: The shared memory.
        lane: The channels that it takes.
        plan: Where it lands.
        arrays: One-dimensional arrays, one of which it lands in.
        kinds: For each, the signature of the call that its messages belong to.
        ufunc: Combines what is received with what is there.
        point_to_point: Whether only the ranks named take part.
        before: The messages that must have ended before.
    """

    sends = False

    __slots__ = (
        "_arena",
        "_before",
        "_combines",
        "_dst",
        "_header",
        "_lane",
        "_point_to_point",
        "_start",
        "_target",
        "_ufunc",
        "finished",
        "peer",
        "plan",
    )

    def __init__(
        self,
        arena: Arena,
        lane: Lane,
        plan: Receive,
        arrays: Sequence[np.ndarray],
        kinds: Sequence[int],
        ufunc: np.ufunc | None,
        point_to_point: bool,
        before: list[Sending | Receiving],
    ) -> None:
        buffer, start, stop = plan.part
        self._before = before
        self._point_to_point = point_to_point
        self._arena, self._lane, self.plan, self.peer = arena, lane, plan, plan.peer
        self._target = arrays[buffer][start:stop]
        self._header = header_of(kinds[buffer], self._target.nbytes)
        self._dst = np.empty_like(self._target) if plan.staged else self._target
        self._ufunc = ufunc if plan.reduce else None
        self._combines = plan.reduce and not plan.staged
        self._start = 0
        self.finished = False

    def waits(self) -> bool:
        """Whether another message of the step must go first."""
        return not all(message.finished for message in self._before)

    def ready(self) -> bool:
        """Whether a piece is there."""
        arena, lane = self._arena, self._lane
        return arena.signals.words[self.peer][sent_index(arena.rank, lane.number)] > lane.received[self.peer]

    def advance(self) -> bool:
        """Receives what is there. Returns whether the message is complete."""
        if self._before and self.waits():
            return False
        while self.ready():
            signals = self._arena.signals
            if signals.fence:
                signals.fence()
            lane = self._lane
            index = header_index(self._arena.rank, lane.number, lane.received[self.peer])
            described, location = signals.words[self.peer][index], signals.words[self.peer][index + 1]
            if described & ~IN_PLACE != self._header:
                signals.log.refuse(self.peer, described, self._header, signals.sequence)
            if described & IN_PLACE:
                self._read_in_place(location)
                self._start = len(self._dst)
            else:
                self._receive_piece()
            self._tell_received()
            if self._start >= len(self._dst):
                self.finished = True
                return True
        return False

    def _receive_piece(self) -> None:
        arena = self._arena
        stop = min(self._start + PIECE_NBYTES // self._dst.itemsize, len(self._dst))
        if stop > self._start:
            at = arena.areas.piece(arena.rank, self._lane.number, self._lane.received[self.peer])
            self._put(arena.view(self.peer, at, stop - self._start, self._dst.dtype), stop)
        self._start = max(stop, 1)

    def _put(self, arrived: np.ndarray, stop: int) -> None:
        part = self._dst[self._start : stop]
        if self._combines:
            self._ufunc(part, arrived, out=part)  # type: ignore[misc]
        else:
            part[...] = arrived

    def _read_in_place(self, location: int) -> None:
        """Reads the message where it lies, unless its sender gave up meanwhile: then it may be gone."""
        signals = self._arena.signals
        try:
            self._read(location)
        except CommunicationError:
            signals.blame(self.peer, self._point_to_point)
            raise
        if signals.words[self.peer][ABORTED]:
            signals.blame(self.peer, self._point_to_point)

    def _read(self, location: int) -> None:
        arena, dst = self._arena, self._dst
        if location & SHARED:
            self._put(arena.peer_heaps.view(self.peer, location, dst.nbytes).view(dst.dtype), len(dst))
            return
        attached = self._lane.attached[self.peer]
        if not self._combines:
            attached.read(dst.__array_interface__["data"][0], location, dst.nbytes)
            return
        piece = _READ_NBYTES // dst.itemsize
        buffer = np.empty(piece, dst.dtype)
        address = buffer.__array_interface__["data"][0]
        for start in range(0, len(dst), piece):
            part = dst[start : start + piece]
            attached.read(address, location + start * dst.itemsize, part.nbytes)
            self._ufunc(part, buffer[: len(part)], out=part)  # type: ignore[misc]

    def _tell_received(self) -> None:
        lane, signals = self._lane, self._arena.signals
        if signals.fence:
            signals.fence()
        lane.received[self.peer] += 1
        signals.own[received_index(self.peer, lane.number)] = lane.received[self.peer]

    def settle(self) -> None:
        """Applies what waited for the end of the step."""
        if not self.plan.staged:
            return
        if self._ufunc is not None:
            self._ufunc(self._target, self._dst, out=self._target)
        else:
            self._target[...] = self._dst
