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

import numpy as np

from flagcx.errors import CommunicationError
from flagcx.transport.shared_memory.arena import PIECE_NBYTES, PIECES, Arena
from flagcx.transport.shared_memory.heap import SHARED
from flagcx.transport.shared_memory.signals import (
    ABORTED,
    IN_PLACE,
    NBYTES_BITS,
    header_index,
    sent_index,
    taken_index,
)

RENDEZVOUS_NBYTES = 256 << 10
_READ_NBYTES = 256 << 10

Part = tuple[int, int, int]
"""Which array, and its elements from start to stop."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A receive, compiled.

    Attributes:
        peer: Who sends.
        part: Where it lands, in elements.
        reduce: Whether it is combined with what is there.
        staged: Whether it must wait in memory of its own until the step's transfers are done.
        after_sends: Whether it must wait until this rank's sends have left.
        after: Positions of the arrivals of this step that are applied before.
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
        departures: The rank each goes to, and what it is.
        arrivals: What comes.
        attach_nbytes: Messages of this size on are read where they lie, in the sender's private memory.
    """

    departures: tuple[tuple[int, Part], ...]
    arrivals: tuple[Arrival, ...]
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
        kinds: For each, the signature of what its messages belong to; see ``Signals.kind``.
        ufunc: What combines an arrival with what is there.
        point_to_point: Whether only the ranks named take part.
    """
    departures = [
        _Outgoing(arena, peer, arrays[a][start:stop], kinds[a], step.attach_nbytes)
        for peer, (a, start, stop) in step.departures
    ]
    arrivals = [_Incoming(arena, plan, arrays, kinds, ufunc, point_to_point) for plan in step.arrivals]
    leaving, coming = _advance_in_order(departures), arrivals
    while leaving or coming:
        before = _moves(departures, arrivals)
        leaving = _advance_in_order(leaving)
        coming = _take_in_order(coming, arrivals, bool(leaving))
        if (leaving or coming) and _moves(departures, arrivals) == before:
            _pause(arena, _unblocked(leaving, coming, arrivals), point_to_point)
    for arrival in arrivals:
        arrival.settle()


def _moves(departures: list[_Outgoing], arrivals: list[_Incoming]) -> int:
    return sum(d.moved for d in departures) + sum(a.moved for a in arrivals)


def _take_in_order(coming: list[_Incoming], arrivals: list[_Incoming], leaving: bool) -> list[_Incoming]:
    """Takes what has come; of one peer strictly one message after the other."""
    blocked: set[int] = set()
    still = []
    for arrival in coming:
        plan = arrival.plan
        waits = plan.peer in blocked or (plan.after_sends and leaving)
        if waits or not all(arrivals[i].finished for i in plan.after) or not arrival.advance():
            blocked.add(plan.peer)
            still.append(arrival)
    return still


def _unblocked(
    leaving: list[_Outgoing], coming: list[_Incoming], arrivals: list[_Incoming]
) -> list[_Outgoing | _Incoming]:
    """Those that only a peer holds up. Others may be ready for long, and nothing comes of it."""
    first: dict[tuple[bool, int], _Outgoing | _Incoming] = {}
    for arrival in coming:
        first.setdefault((False, arrival.peer), arrival)
    for departure in leaving:
        first.setdefault((True, departure.peer), departure)
    return [message for message in first.values() if not _is_blocked(message, bool(leaving), arrivals)]


def _is_blocked(message: _Outgoing | _Incoming, leaving: bool, arrivals: list[_Incoming]) -> bool:
    if isinstance(message, _Outgoing):
        return False
    plan = message.plan
    return (plan.after_sends and leaving) or not all(arrivals[i].finished for i in plan.after)


def _pause(arena: Arena, waiting: list[_Outgoing | _Incoming], point_to_point: bool) -> None:
    def ready() -> bool:
        return any(w.ready() for w in waiting)

    signals, start = arena.signals, now()
    for _ in signals.spins:
        if ready():
            signals.waited_ns += now() - start
            return
    words = signals.words[waiting[0].peer]
    signals.wait_for(words, ready, point_to_point=point_to_point)
    signals.waited_ns += now() - start


def _advance_in_order(leaving: list[_Outgoing]) -> list[_Outgoing]:
    """Advances messages; those to one peer strictly one after the other."""
    blocked: set[int] = set()
    still = []
    for departure in leaving:
        if departure.peer in blocked or not departure.advance():
            blocked.add(departure.peer)
            still.append(departure)
    return still


class _Outgoing:
    """A message on its way out."""

    __slots__ = (
        "_arena",
        "_attach_nbytes",
        "_header",
        "_message",
        "_piece",
        "_posted",
        "_start",
        "moved",
        "peer",
    )

    def __init__(self, arena: Arena, peer: int, message: np.ndarray, kind: int, attach_nbytes: int) -> None:
        self._arena, self.peer, self._message = arena, peer, message
        self._header = message.nbytes | kind << NBYTES_BITS
        self._attach_nbytes = attach_nbytes
        self._piece = PIECE_NBYTES // message.itemsize
        self._start = 0
        self._posted = -1
        self.moved = 0

    def _free(self) -> bool:
        arena = self._arena
        taken = arena.signals.words[self.peer][taken_index(arena.rank)]
        return arena.sent[self.peer] - taken < PIECES

    def ready(self) -> bool:
        """Whether ``advance`` could do something."""
        if self._posted >= 0:
            return self._arena.signals.words[self.peer][taken_index(self._arena.rank)] > self._posted
        return self._free()

    def advance(self) -> bool:
        """Moves what can be moved now. Returns whether the message has left."""
        if self._posted >= 0:
            return self.ready()
        while self._free():
            location = self._location()
            if location is not None:
                self._posted = self._arena.sent[self.peer]
                self._post(self._header | IN_PLACE, location)
                return False
            stop = self._start + self._piece
            part = self._message[self._start : stop]
            if len(part):
                arena = self._arena
                at = arena.areas.piece(self.peer, arena.sent[self.peer])
                arena.view(arena.rank, at, len(part), part.dtype)[...] = part
            self._post(self._header, 0)
            self._start = stop
            if stop >= len(self._message):
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
        arena, signals = self._arena, self._arena.signals
        number = arena.sent[self.peer]
        index = header_index(self.peer, number)
        signals.own[index] = described
        signals.own[index + 1] = location
        if signals.fence:
            signals.fence()
        arena.sent[self.peer] = number + 1
        signals.own[sent_index(self.peer)] = number + 1
        self.moved += 1


class _Incoming:
    """A message on its way in."""

    __slots__ = (
        "_arena",
        "_combines",
        "_dst",
        "_header",
        "_point_to_point",
        "_start",
        "_target",
        "_ufunc",
        "finished",
        "moved",
        "peer",
        "plan",
    )

    def __init__(
        self,
        arena: Arena,
        plan: Arrival,
        arrays: Sequence[np.ndarray],
        kinds: Sequence[int],
        ufunc: np.ufunc | None,
        point_to_point: bool,
    ) -> None:
        buffer, start, stop = plan.part
        self._point_to_point = point_to_point
        self._arena, self.plan, self.peer = arena, plan, plan.peer
        self._target = arrays[buffer][start:stop]
        self._header = self._target.nbytes | kinds[buffer] << NBYTES_BITS
        self._dst = np.empty_like(self._target) if plan.staged else self._target
        self._ufunc = ufunc if plan.reduce else None
        self._combines = plan.reduce and not plan.staged
        self._start = 0
        self.finished = False
        self.moved = 0

    def ready(self) -> bool:
        """Whether a piece is there."""
        arena = self._arena
        return arena.signals.words[self.peer][sent_index(arena.rank)] > arena.taken[self.peer]

    def advance(self) -> bool:
        """Takes what is there. Returns whether the message is complete."""
        while self.ready():
            signals = self._arena.signals
            if signals.fence:
                signals.fence()
            index = header_index(self._arena.rank, self._arena.taken[self.peer])
            described, location = signals.words[self.peer][index], signals.words[self.peer][index + 1]
            if described & ~IN_PLACE != self._header:
                signals.refuse(self.peer, described, self._header)
            if described & IN_PLACE:
                self._read_in_place(location)
                self._start = len(self._dst)
            else:
                self._take_piece()
            self._tell_taken()
            if self._start >= len(self._dst):
                self.finished = True
                return True
        return False

    def _take_piece(self) -> None:
        arena = self._arena
        stop = min(self._start + PIECE_NBYTES // self._dst.itemsize, len(self._dst))
        if stop > self._start:
            at = arena.areas.piece(arena.rank, arena.taken[self.peer])
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
        attached = arena.attached[self.peer]
        if not self._combines:
            attached.read(dst.__array_interface__["data"][0], location, dst.nbytes)
            return
        piece = _READ_NBYTES // dst.itemsize
        buffer = np.empty(piece, dst.dtype)
        near = buffer.__array_interface__["data"][0]
        for start in range(0, len(dst), piece):
            part = dst[start : start + piece]
            attached.read(near, location + start * dst.itemsize, part.nbytes)
            self._ufunc(part, buffer[: len(part)], out=part)  # type: ignore[misc]

    def _tell_taken(self) -> None:
        arena, signals = self._arena, self._arena.signals
        if signals.fence:
            signals.fence()
        arena.taken[self.peer] += 1
        signals.own[taken_index(self.peer)] = arena.taken[self.peer]
        self.moved += 1

    def settle(self) -> None:
        """Applies what waited for the end of the step."""
        if not self.plan.staged:
            return
        if self._ufunc is not None:
            self._ufunc(self._target, self._dst, out=self._target)
        else:
            self._target[...] = self._dst
