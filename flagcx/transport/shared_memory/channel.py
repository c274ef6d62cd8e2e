"""Channels: how a message travels between a pair of ranks.

A message goes in pieces through the slots of its channel, each with a header that says how long the
whole message is and what call it belongs to, so that ranks that make different calls find out. A large
message stays where it is: its header tells the receiver where to read it, by cross-memory attach or, for
an array of ``comm.empty``, through its mapping; one copy instead of two.

Messages are made once for a plan and begun anew in each run, so a run works out nothing but what differs
between runs: the number of the call, and the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.errors import CommunicationError
from flagcx.transport.shared_memory.areas import PIECE_NBYTES, PIECES
from flagcx.transport.shared_memory.arena import Arena, Lane
from flagcx.transport.shared_memory.heap import SHARED
from flagcx.transport.shared_memory.places import Places
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
"""From this size on a message is read where it lies, where it can be and nothing says otherwise."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A receive, as a step's schedule has it.

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
    reduce: bool = False
    staged: bool = False
    after_sends: bool = False
    after: tuple[int, ...] = ()


class Sending:
    """A message on its way out.

    Args:
        arena: The shared memory.
        lane: The channels that it takes.
        peer: The rank that it goes to.
        part: Which part of which array it is.
        dtype: The element type.
        kind: The signature of the call that it belongs to; see ``CallLog.kind``.
        attach_nbytes: From this size on it is read where it lies, in private memory.

    Attributes:
        in_place: Whether it may be read where it lies, so that ``begin`` needs to know where that is.
        finished: Whether it has left.
        length: Its elements.
    """

    sends = True

    __slots__ = (
        "_arena",
        "_buffer",
        "_described",
        "_fence",
        "_header",
        "_headers",
        "_low",
        "_message",
        "_own",
        "_piece",
        "_place",
        "_posted",
        "_received_at",
        "_sent",
        "_sent_at",
        "_shift",
        "_slots",
        "_start",
        "_theirs",
        "_where",
        "finished",
        "in_place",
        "length",
        "peer",
    )

    def __init__(
        self, arena: Arena, lane: Lane, peer: int, part: Part, dtype: np.dtype, kind: int, attach_nbytes: int
    ) -> None:
        self._arena, self.peer = arena, peer
        self._buffer, self._low, stop = part
        self.length = stop - self._low
        nbytes = self.length * dtype.itemsize
        self._header, self._shift = header_of(kind, nbytes), self._low * dtype.itemsize
        self.in_place = nbytes >= min(RENDEZVOUS_NBYTES, attach_nbytes)
        self._where = arena.cross_memory and nbytes >= attach_nbytes
        self._piece, self._slots = PIECE_NBYTES // dtype.itemsize, arena.slots(arena.rank, peer, lane, dtype)
        signals = arena.signals
        self._own, self._theirs, self._fence = signals.own, signals.words[peer], signals.fence
        self._sent, self._sent_at = lane.sent, sent_index(peer, lane.number)
        self._headers = header_index(peer, lane.number, 0)
        self._received_at = received_index(arena.rank, lane.number)
        self._message: np.ndarray | None = None
        self.finished = False

    def begin(self, arrays: Sequence[np.ndarray], places: Places, number: int) -> None:
        """Begins the message of one run.

        Args:
            arrays: One-dimensional arrays that messages are parts of.
            places: Where they lie; needed for messages that may be read in place alone.
            number: What the number of the call adds to headers; see ``words.number_of_header``.
        """
        self._described = self._header ^ number
        self._start, self._posted, self.finished, self._place = 0, -1, False, -1
        if self.in_place:
            place = places.words[self._buffer]
            if self._where or place & SHARED:
                # The peer reads this very memory, which must not be freed where the caller drops the array.
                self._place, self._message = place + self._shift, arrays[self._buffer]
                return
        self._message = arrays[self._buffer][self._low : self._low + self.length]

    def waits(self) -> bool:
        """Whether another message of the step must go first."""
        return False

    def ready(self) -> bool:
        """Whether ``advance`` could do something."""
        received = self._theirs[self._received_at]
        return received > self._posted if self._posted >= 0 else self._sent[self.peer] - received < PIECES

    def advance(self) -> bool:
        """Moves what can be moved now. Returns whether the message has left."""
        own, theirs, peer = self._own, self._theirs, self.peer
        if self._posted >= 0:
            if theirs[self._received_at] > self._posted:
                self._message, self.finished = None, True
            return self.finished
        number = self._sent[peer]
        while number - theirs[self._received_at] < PIECES:
            slot = number % PIECES
            if self._place >= 0:
                own[self._headers + 2 * slot] = self._described | IN_PLACE
                own[self._headers + 2 * slot + 1] = self._place
                self._posted = number
            else:
                start, stop = self._start, self._start + self._piece
                whole = not start and stop >= self.length
                part = self._message if whole else self._message[start:stop]  # type: ignore[index]
                self._slots[slot][: len(part)] = part  # type: ignore[arg-type]
                own[self._headers + 2 * slot] = self._described
                self._start = stop
            if self._fence:
                self._fence()
            self._sent[peer] = number = number + 1
            own[self._sent_at] = number
            if self._posted >= 0:
                return False
            if stop >= self.length:
                self._message, self.finished = None, True
                return True
        return False


class Receiving:
    """A message on its way in.

    Args:
        arena: The shared memory.
        lane: The channels that it takes.
        plan: Where it lands.
        dtype: The element type.
        kind: The signature of the call that it belongs to; see ``CallLog.kind``.
        ufunc: Combines what is received with what is there.
        point_to_point: Whether only the ranks named take part.
        before: The messages that must have ended before.

    Attributes:
        length: Its elements.
    """

    sends = False

    __slots__ = (
        "_arena",
        "_attached",
        "_before",
        "_buffer",
        "_combines",
        "_dst",
        "_expected",
        "_header",
        "_headers",
        "_low",
        "_piece",
        "_places",
        "_point_to_point",
        "_received",
        "_received_at",
        "_sent_at",
        "_signals",
        "_slots",
        "_staged",
        "_start",
        "_target",
        "_theirs",
        "_ufunc",
        "finished",
        "length",
        "peer",
    )

    def __init__(
        self,
        arena: Arena,
        lane: Lane,
        plan: Receive,
        dtype: np.dtype,
        kind: int,
        ufunc: np.ufunc | None = None,
        point_to_point: bool = False,
        before: Sequence[Sending | Receiving] = (),
    ) -> None:
        self._arena, self.peer, self._before = arena, plan.peer, before
        self._point_to_point = point_to_point
        self._buffer, self._low, stop = plan.part
        self.length = stop - self._low
        self._header = header_of(kind, self.length * dtype.itemsize)
        self._ufunc: Any = ufunc if plan.reduce else None
        self._staged, self._combines = plan.staged, plan.reduce and not plan.staged
        self._piece = PIECE_NBYTES // dtype.itemsize
        self._slots = arena.slots(plan.peer, arena.rank, lane, dtype)
        signals = arena.signals
        self._signals, self._theirs, self._attached = (
            signals,
            signals.words[plan.peer],
            lane.attached[plan.peer],
        )
        self._received, self._received_at = lane.received, received_index(plan.peer, lane.number)
        self._headers, self._sent_at = (
            header_index(arena.rank, lane.number, 0),
            sent_index(arena.rank, lane.number),
        )
        self._dst: Any = None
        self._target: Any = None
        self.finished = False

    def begin(self, arrays: Sequence[np.ndarray], places: Places, number: int) -> None:
        """Begins the message of one run; see ``Sending.begin``."""
        self._expected, self._places = self._header ^ number, places
        self._start, self.finished = 0, False
        self._target = self._dst = arrays[self._buffer][self._low : self._low + self.length]
        if self._staged:
            self._dst = np.empty_like(self._target)

    def waits(self) -> bool:
        """Whether another message of the step must go first."""
        return not all(message.finished for message in self._before)

    def ready(self) -> bool:
        """Whether a piece is there."""
        return self._theirs[self._sent_at] > self._received[self.peer]

    def advance(self) -> bool:
        """Receives what is there. Returns whether the message is complete."""
        if self._before and self.waits():
            return False
        theirs, signals, peer = self._theirs, self._signals, self.peer
        number = self._received[peer]
        while theirs[self._sent_at] > number:
            if signals.fence:
                signals.fence()
            slot = number % PIECES
            described = theirs[self._headers + 2 * slot]
            if described == self._expected:
                self._receive_piece(self._slots[slot])
            elif described == self._expected | IN_PLACE:
                self._read_in_place(theirs[self._headers + 2 * slot + 1])
                self._start = max(self.length, 1)
            else:
                signals.log.refuse(peer, described, self._expected, signals.sequence)
            if signals.fence:
                signals.fence()
            self._received[peer] = number = number + 1
            signals.own[self._received_at] = number
            if self._start >= self.length:
                self.finished = True
                if not self._staged:
                    self._dst = self._target = None
                return True
        return False

    def _receive_piece(self, slot: np.ndarray) -> None:
        dst, length, start = self._dst, self.length, self._start
        self._start = stop = start + self._piece
        if stop < length or start:
            dst = dst[start:stop]
        if len(dst) < self._piece:
            slot = slot[: len(dst)]
        if self._combines:
            self._ufunc(dst, slot, out=dst)
        else:
            dst[...] = slot

    def _read_in_place(self, location: int) -> None:
        """Reads the message where it lies, unless its sender gave up meanwhile: then it may be gone."""
        signals = self._signals
        try:
            self._read(location)
        except CommunicationError:
            signals.blame(self.peer, self._point_to_point)
            raise
        if self._theirs[ABORTED]:
            signals.blame(self.peer, self._point_to_point)

    def _read(self, location: int) -> None:
        dst, read = self._dst, self._attached.read
        if location & SHARED:
            arrived = self._arena.peer_heaps.view(self.peer, location, dst.nbytes).view(dst.dtype)
            if self._combines:
                self._ufunc(dst, arrived, out=dst)
            else:
                dst[...] = arrived
            return
        if not self._combines:
            if self._staged or not self._places.addresses:
                address = dst.__array_interface__["data"][0]
            else:
                address = self._places.addresses[self._buffer] + self._low * dst.itemsize
            read(address, location, dst.nbytes)
            return
        incoming, itemsize = self._arena.arriving(dst.dtype), dst.itemsize
        address, piece = incoming.__array_interface__["data"][0], len(incoming)
        for start in range(0, len(dst), piece):
            part = dst[start : start + piece]
            read(address, location + start * itemsize, part.nbytes)
            self._ufunc(part, incoming[: len(part)], out=part)

    def settle(self) -> None:
        """Applies what waited for the end of the step."""
        if not self._staged:
            return
        if self._ufunc is not None:
            self._ufunc(self._target, self._dst, out=self._target)
        else:
            self._target[...] = self._dst
        self._dst = self._target = None
