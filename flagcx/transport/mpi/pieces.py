"""The pieces of the longer messages of one step, on their way.

From one rank to another a few pieces are under way at a time, beside the first ones, which all are at once.
Data is copied or added as it comes, once the head of its message was found to be right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.transport.mpi.message import Message, Slot, put

_WINDOW = 4
"""Pieces after the first that are under way from one rank to another."""

Messages = Sequence[tuple[Message, np.ndarray]]
"""Messages, and the one-dimensional array that each brings, or goes to."""


@dataclass(slots=True)
class _Flight:
    """A piece on its way.

    Attributes:
        message: Number of the message, among those sent or among those received.
        receives: Whether it comes here.
        start: Where it starts, in elements.
        stop: Where it stops.
        slot: The memory in which it lands; of a piece that is sent, any.
        lane: The pieces that follow it to or from the same rank.
    """

    message: int
    receives: bool
    start: int
    stop: int
    slot: Slot
    lane: deque[tuple[int, int, int]]


class Pieces:
    """The messages of one step, whose first pieces have been posted.

    Args:
        comm: The MPI communicator.
        byte: MPI's datatype of bytes.
        tag: The tag of the pieces after the first.
        sends: Messages that this rank sends.
        receives: Messages to this rank.
        landed: The memory in which the first piece of each lands.
        requests: The first pieces: those received, then those sent. Those that follow come behind.
        take: Returns memory for a piece.
        give: Takes it back.
        stamp: What the heads begin with; see ``message.stamp_of``.
        ufunc: Adds what comes to what is there.

    Attributes:
        left: How many of ``requests`` are not done.
    """

    def __init__(
        self,
        comm: Any,
        byte: Any,
        tag: int,
        sends: Messages,
        receives: Messages,
        landed: Sequence[Slot],
        requests: list[Any],
        take: Callable[[], Slot],
        give: Callable[[Slot], object],
        stamp: bytes,
        ufunc: Any,
    ) -> None:
        self._comm, self._byte, self._tag, self._ufunc = comm, byte, tag, ufunc
        self._rank, self._stamp = comm.Get_rank(), stamp
        self._take, self._give, self._requests = take, give, requests
        self._messages = {False: sends, True: receives}
        none: deque[tuple[int, int, int]] = deque()
        self._unused = landed[0] if landed else Slot(byte)
        self._flights = [
            _Flight(i, True, 0, message.first, slot, none)
            for i, ((message, _), slot) in enumerate(zip(receives, landed, strict=True))
        ]
        self._flights += [_Flight(i, False, 0, m.first, self._unused, none) for i, (m, _) in enumerate(sends)]
        self._early: dict[int, list[_Flight]] = {i: [] for i in range(len(receives))}
        for receiving, messages in ((True, receives), (False, sends)):
            lanes: dict[int, deque[tuple[int, int, int]]] = {}
            for i, (message, _) in enumerate(messages):
                lanes.setdefault(message.peer, deque()).extend((i, a, b) for a, b in message.rest)
            for lane in lanes.values():
                for _ in range(min(_WINDOW, len(lane))):
                    flight, request = self._next(lane, receiving)
                    self._flights.append(flight)
                    requests.append(request)
        self.left = len(requests)

    def _next(self, lane: deque[tuple[int, int, int]], receives: bool) -> tuple[_Flight, Any]:
        """Begins the next piece of a lane."""
        i, start, stop = lane.popleft()
        message, array = self._messages[receives][i]
        if receives:
            slot = self._take()
            flight = _Flight(i, True, start, stop, slot, lane)
            return flight, self._comm.Irecv(slot.whole, message.peer, self._tag)
        data = [array[start:stop].view(np.uint8), self._byte]
        flight = _Flight(i, False, start, stop, self._unused, lane)
        return flight, self._comm.Isend(data, message.peer, self._tag)

    def done(self, number: int) -> None:
        """Request ``number`` is done: uses what has come, and lets the next piece follow."""
        flight = self._flights[number]
        if flight.receives:
            self._land(flight)
        if flight.lane:
            self._flights[number], self._requests[number] = self._next(flight.lane, flight.receives)
        else:
            self.left -= 1

    def _land(self, flight: _Flight) -> None:
        early = self._early.get(flight.message)
        if early is None:
            self._use(flight)
        elif flight.start:
            early.append(flight)
        else:
            message, _ = self._messages[True][flight.message]
            message.check(self._rank, self._stamp, flight.slot)
            for each in (flight, *self._early.pop(flight.message)):
                self._use(each)

    def _use(self, flight: _Flight) -> None:
        """Copies or adds a piece of a message that is the right one."""
        message, array = self._messages[True][flight.message]
        start, stop, slot = flight.start, flight.stop, flight.slot
        data = slot.rest(stop - start, message.dtype) if start else slot.first(message)
        put(message, array[start:stop], data, self._ufunc)
        if start:
            self._give(slot)

    def held_up(self) -> tuple[int, bool]:
        """The rank that is waited for, and whether to receive."""
        for flight, request in zip(self._flights, self._requests, strict=True):
            if request and not request.Get_status():
                return self._messages[flight.receives][flight.message][0].peer, flight.receives
        return self._rank, False
