"""The transfers of a pattern, and where the chunks of its message lie on one rank, from round to round.

Chunks that lie one after the other are one run, so that what a rank of 100,000 does in a round with all of
its chunks costs as much as with one of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from flagcx.schedule.collectives import Collective
from flagcx.schedule.model import Buffer, Copy, Recv, RecvReduce, Send, Span, Transfer

Place = tuple[Buffer, int]
"""A buffer, and how far on there a chunk lies beyond its own number: the same for all chunks of a run."""
Run = tuple[int, int, "Place | None"]
"""Chunks from start to stop, and their place; None for those that the rank does not have."""
Find = Callable[[int, int], Iterable[Run]]
"""(start, stop) -> the runs of these chunks, in order."""

_OWN: Place = (Buffer.SCRATCH, 0)
"""In SCRATCH, under its own number."""


class ChunkTransfer(NamedTuple):
    """One side of a message, in chunks of the whole message.

    Attributes:
        kind: ``Send``, ``Recv`` or ``RecvReduce``.
        round: When, counted from 0 alike on all ranks.
        peer: The other rank.
        start: First chunk.
        stop: The chunk after the last.
    """

    kind: type[Send | Recv | RecvReduce]
    round: int
    peer: int
    start: int
    stop: int


class Runs:
    """The places of chunks that were put somewhere."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._places: list[Place] = []

    def __bool__(self) -> bool:
        return bool(self._starts)

    def put(self, start: int, stop: int, place: Place) -> None:
        """Puts chunks in a place; runs that meet there become one."""
        low, high = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        first, last, before, after = start, stop, [], []
        if low < high:
            a, b = self._starts[low], self._stops[high - 1]
            if a < start and self._places[low] == place:
                first = a
            elif a < start:
                before = [(a, start, self._places[low])]
            if b > stop and self._places[high - 1] == place:
                last = b
            elif b > stop:
                after = [(stop, b, self._places[high - 1])]
        runs = [*before, (first, last, place), *after]
        self._starts[low:high] = [a for a, _, _ in runs]
        self._stops[low:high] = [b for _, b, _ in runs]
        self._places[low:high] = [where for _, _, where in runs]

    def find(self, start: int, stop: int) -> Iterator[Run]:
        """The runs of some chunks, those without a place included."""
        for number in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            a, b = max(self._starts[number], start), min(self._stops[number], stop)
            if start < a:
                yield start, a, None
            yield a, b, self._places[number]
            start = b
        if start < stop:
            yield start, stop, None

    def touch(self, start: int, stop: int) -> bool:
        """Whether any of these chunks has a place."""
        return bisect_right(self._stops, start) < bisect_left(self._starts, stop)


class ChunkPlaces:
    """Where each chunk of the message lies on one rank, from round to round.

    Args:
        kind: The collective.
        rank: The rank.
        size: Number of ranks.
        chunks: Chunks of the message.
        root: The root, or None.
    """

    def __init__(self, kind: Collective, rank: int, size: int, chunks: int, root: int | None) -> None:
        per_block = kind.per_block(size, chunks)
        own = (rank * per_block, (rank + 1) * per_block)
        whole = (0, chunks)
        self._input = own if kind.before == "each" else whole if kind.has_input(rank, root) else (0, 0)
        self._output = own if kind.after == "each" else whole if kind.has_output(rank, root) else (0, 0)
        self._places = Runs()

    def _home(self, start: int, stop: int) -> Iterator[Run]:
        """Where chunks live once something was received for them."""
        return _split(start, stop, self._output, (Buffer.OUTPUT, -self._output[0]), _OWN)

    def _contributed(self, start: int, stop: int) -> Iterator[Run]:
        return _split(start, stop, self._input, (Buffer.INPUT, -self._input[0]), None)

    def _now(self, start: int, stop: int) -> Iterator[Run]:
        """Where chunks lie now; None for those that the rank does not have."""
        return _filled(start, stop, self._places.find, self._contributed)

    def step(self, transfers: Sequence[ChunkTransfer]) -> tuple[tuple[Transfer, ...], tuple[Copy, ...]]:
        """The transfers of one round between buffers, and the copies to make before it."""
        copies: list[tuple[Span, Span]] = []
        pins = self._pins(transfers)
        places = [_OWN if t.kind is Recv else self._gather(t, pins, copies) for t in transfers]
        for index, t in enumerate(transfers):
            if t.kind is Recv:
                places[index] = _together(self._home(t.start, t.stop)) or _OWN
                self._places.put(t.start, t.stop, places[index])
        placed = (
            t.kind(_span(t.start, t.stop, place), t.peer) for t, place in zip(transfers, places, strict=True)
        )
        return tuple(placed), _coalesce(copies)

    def _pins(self, transfers: Sequence[ChunkTransfer]) -> Runs:
        """Where the chunks that something is added to lie during the round: one place for all transfers.

        If that tears apart a transfer of several chunks, these go to SCRATCH, which may tear another.
        """
        pins = Runs()
        for t in transfers:
            if t.kind is RecvReduce:
                for a, b, place in _filled(t.start, t.stop, self._places.find, self._home):
                    assert place is not None
                    pins.put(a, b, place)
        wide = [t for t in transfers if t.kind is not Recv and t.stop - t.start > 1] if pins else []
        torn = True
        while torn:
            torn = False
            for t in wide:
                if pins.touch(t.start, t.stop) and self._common(t.start, t.stop, pins) is None:
                    pins.put(t.start, t.stop, _OWN)
                    torn = True
        return pins

    def _common(self, start: int, stop: int, pins: Runs) -> Place | None:
        """Where chunks that are sent, or added to, lie together or may be brought together."""
        return _together(_filled(start, stop, pins.find, self._now, self._home)) or _together(
            _filled(start, stop, pins.find, self._home)
        )

    def _gather(self, transfer: ChunkTransfer, pins: Runs, copies: list[tuple[Span, Span]]) -> Place:
        """The one place where the transfer's chunks lie once ``copies`` are made."""
        start, stop = transfer.start, transfer.stop
        if not pins.touch(start, stop):
            lying = _together(self._now(start, stop))
            if lying is not None:
                return lying
        place = self._common(start, stop, pins) or _OWN
        copies += _moves(self._now(start, stop), lambda a, b: [(a, b, place)])
        if place[0] is not Buffer.INPUT:
            self._places.put(start, stop, place)
        return place

    def finish(self) -> tuple[Copy, ...]:
        """The copies that bring the result to OUTPUT where it is not there yet."""
        return _coalesce(list(_moves(self._now(*self._output), self._home)))


def _split(
    start: int, stop: int, bounds: tuple[int, int], inside: Place, outside: Place | None
) -> Iterator[Run]:
    """Chunks as runs, some inside the bounds and some not."""
    first, last = max(start, bounds[0]), min(stop, bounds[1])
    if first >= last:
        first = last = stop
    if start < first:
        yield start, first, outside
    if first < last:
        yield first, last, inside
    if last < stop:
        yield last, stop, outside


def _filled(start: int, stop: int, find: Find, *others: Find) -> Iterator[Run]:
    """The runs of some chunks; where one way to find them has no place, that of the next."""
    for a, b, place in find(start, stop):
        if place is None and others:
            yield from _filled(a, b, *others)
        else:
            yield a, b, place


def _together(runs: Iterable[Run]) -> Place | None:
    """The place that all runs have, or None if they lie apart or one is missing."""
    places = {place for _, _, place in runs}
    return places.pop() if len(places) == 1 else None


def _span(start: int, stop: int, place: Place) -> Span:
    buffer, further = place
    return Span(buffer, start + further, stop + further)


def _moves(now: Iterable[Run], then: Find) -> Iterator[tuple[Span, Span]]:
    """The copies of chunks that the rank has to where they are to be, where they are not there."""
    for start, stop, source in now:
        if source is not None:
            for a, b, target in then(start, stop):
                if target is not None and target != source:
                    yield _span(a, b, source), _span(a, b, target)


def _coalesce(copies: Sequence[tuple[Span, Span]]) -> tuple[Copy, ...]:
    """Copies, with those that lie side by side at both ends as one."""
    joined: list[tuple[Span, Span]] = []
    for src, dst in copies:
        if joined:
            a, b = joined[-1]
            if (a.buffer, a.stop, b.buffer, b.stop) == (src.buffer, src.start, dst.buffer, dst.start):
                joined[-1] = Span(a.buffer, a.start, src.stop), Span(b.buffer, b.start, dst.stop)
                continue
        joined.append((src, dst))
    return tuple(Copy(src, dst) for src, dst in joined)
