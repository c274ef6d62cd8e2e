"""The form in which algorithms are written: moves of one message between ranks in common rounds.

Many collectives share one pattern of who sends what to whom when; they differ in where a rank keeps it.
So an algorithm is first a list of moves over one imagined buffer that holds the whole message, in rounds
that all ranks count alike. ``schedule_of`` then settles where each chunk of it lies on each rank:

- A chunk that a rank was given stays in INPUT until something is added to it, and is sent from there.
- It lives in OUTPUT where the rank has that chunk in its OUTPUT, else in SCRATCH under its own number.
- Where one move covers chunks that lie in different places, they are gathered in one place first.

Both sides of a move name the same round, so no rank ever waits for one that waits for it, and two
patterns with the same clock lie beside each other by listing the moves of both.

A pattern run backwards is another one: a broadcast in reverse is a reduction, an allgather a
reduce_scatter, a scatter a gather. ``backwards`` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from flagcx.errors import ArgumentError, RankError
from flagcx.schedule.collectives import COLLECTIVES, Collective
from flagcx.schedule.model import (
    Buffer,
    Copy,
    Program,
    Recv,
    RecvReduce,
    Schedule,
    Send,
    Span,
    Step,
    Transfer,
    span_of,
)

Place = tuple[Buffer, int]
_REST = Step()


class Move(NamedTuple):
    """One side of a message.

    Attributes:
        round: When, counted from 0 alike on all ranks.
        kind: ``Send``, ``Recv`` or ``RecvReduce``.
        start: First chunk of the message.
        stop: The chunk after the last.
        peer: The other rank.
    """

    round: int
    kind: type
    start: int
    stop: int
    peer: int


def rounds_to_double(size: int) -> int:
    """How many doublings reach ``size`` from 1: log2, rounded up."""
    return (size - 1).bit_length()


def arc(first: int, count: int, size: int, pieces: int = 1) -> Iterator[tuple[int, int]]:
    """The chunks of ``count`` blocks from block ``first`` on, going round after block ``size - 1``.

    Yields:
        ``(start, stop)`` in chunks: one pair, or two where the blocks go round the end; none for no block.
    """
    first %= size
    end = min(first + count, size)
    if count > 0:
        yield first * pieces, end * pieces
    if first + count > size:
        yield 0, (first + count - size) * pieces


def later(moves: Iterable[Move], rounds: int) -> Iterator[Move]:
    """The same moves, ``rounds`` rounds later."""
    return (move._replace(round=move.round + rounds) for move in moves)


def backwards(moves: Iterable[Move], rounds: int, arriving: type) -> Iterator[Move]:
    """The same moves from the last round to the first, with senders and receivers exchanged.

    Args:
        moves: One rank's moves.
        rounds: How many rounds the pattern has.
        arriving: What receives become: ``RecvReduce`` turns distribution into reduction; ``Recv``
            keeps it a transport of blocks.
    """
    for move in moves:
        kind = arriving if move.kind is Send else Send
        yield move._replace(round=rounds - 1 - move.round, kind=kind)


def schedule_of(
    collective: str,
    algorithm: str,
    size: int,
    chunks: int,
    rounds: int,
    moves: Callable[[int], Iterable[Move]],
    root: int | None = None,
) -> Schedule:
    """Makes a schedule of a pattern of moves.

    The programs are aligned: step 0 has local work alone, step ``i + 1`` is round ``i``.

    Args:
        collective: Name of the collective. Not alltoall, whose blocks have two owners.
        algorithm: Name of the algorithm.
        size: Number of ranks.
        chunks: Pieces that the message is cut into.
        rounds: Number of rounds.
        moves: (rank) -> the moves of that rank.
        root: The root, or None.

    Raises:
        ArgumentError: ``size`` or ``chunks`` is below 1.
        RankError: The root is not one of the ranks.
    """
    check(collective, size, chunks, root)
    make = partial(_program, collective, size, chunks, rounds, root, moves)
    return Schedule(collective, algorithm, size, chunks, make, root, aligned=True)


def check(collective: str, size: int, chunks: int, root: int | None = None) -> None:
    """Refuses numbers of ranks or pieces below 1 and roots out of range.

    Raises:
        ArgumentError: ``size`` or ``chunks`` is below 1.
        RankError: The root is not one of the ranks.
    """
    if size < 1:
        raise ArgumentError(f"{collective}: size={size!r} ranks; expected at least 1")
    if chunks < 1:
        raise ArgumentError(f"{collective}: the message would have {chunks} chunks; expected pieces >= 1")
    if root is not None and not 0 <= root < size:
        raise RankError(f"{collective}: root={root} is not a rank; expected 0 to {size - 1}")


def _program(
    collective: str,
    size: int,
    chunks: int,
    rounds: int,
    root: int | None,
    moves: Callable[[int], Iterable[Move]],
    rank: int,
) -> Program:
    by_round: dict[int, list[Move]] = {}
    for move in moves(rank):
        by_round.setdefault(move.round, []).append(move)
    keeper = _Keeper(COLLECTIVES[collective], rank, size, chunks, root)
    transfers: list[tuple[Transfer, ...]] = [()] * (rounds + 1)
    local: list[tuple[Copy, ...]] = [()] * (rounds + 1)
    for number in sorted(by_round):
        transfers[number + 1], copies = keeper.step(by_round[number])
        local[number] += copies
    local[rounds] += keeper.finish()
    steps = tuple(Step(t, work) if t or work else _REST for t, work in zip(transfers, local, strict=True))
    return Program(rank, steps)


class _Keeper:
    """Keeps track of where each chunk of the message lies on one rank."""

    def __init__(self, kind: Collective, rank: int, size: int, chunks: int, root: int | None) -> None:
        per_block = kind.per_block(size, chunks)
        own = (rank * per_block, (rank + 1) * per_block)
        whole = (0, chunks)
        partly = kind.blocks and size > 1
        self._given = own if partly and kind.input_blocks(size) == 1 else whole
        self._given = self._given if kind.has_input(rank, root) else (0, 0)
        self._result = own if partly and kind.output_blocks(size) == 1 else whole
        self._result = self._result if kind.has_output(rank, root) else (0, 0)
        self._moved: dict[int, Place] = {}

    def _home(self, chunk: int) -> Place:
        """Where the chunk lives once something was received for it."""
        start, stop = self._result
        return (Buffer.OUTPUT, chunk - start) if start <= chunk < stop else (Buffer.SCRATCH, chunk)

    def _now(self, chunk: int) -> Place | None:
        """Where the chunk lies now; None if the rank does not have it."""
        start, stop = self._given
        given = (Buffer.INPUT, chunk - start) if start <= chunk < stop else None
        return self._moved.get(chunk, given)

    def step(self, moves: list[Move]) -> tuple[tuple[Transfer, ...], tuple[Copy, ...]]:
        """The transfers of one round, and the copies to make before it."""
        copies: list[tuple[Place, Place]] = []
        pins = self._pins(moves)
        spans = [
            Span(Buffer.SCRATCH, 0, 0) if move.kind is Recv else self._gather(move, pins, copies)
            for move in moves
        ]
        for index, move in enumerate(moves):
            if move.kind is Recv:
                span = _together([self._home(chunk) for chunk in range(move.start, move.stop)])
                spans[index] = span or Span(Buffer.SCRATCH, move.start, move.stop)
                self._put(move.start, spans[index])
        transfers = tuple(move.kind(span, move.peer) for move, span in zip(moves, spans, strict=True))
        return transfers, _coalesce(copies)

    def _pins(self, moves: list[Move]) -> dict[int, Place]:
        """Where the chunks that something is added to lie during the round: one place for all its moves.

        If that tears apart a move of several chunks, these go to SCRATCH, which may tear another.
        """
        added = (range(move.start, move.stop) for move in moves if move.kind is RecvReduce)
        pins = {chunk: self._moved.get(chunk) or self._home(chunk) for chunks in added for chunk in chunks}
        wide = [m for m in moves if m.kind is not Recv and m.stop - m.start > 1] if pins else []
        torn = True
        while torn:
            torn = False
            for move in wide:
                chunks = range(move.start, move.stop)
                if not pins.keys().isdisjoint(chunks) and self._span(move, pins) is None:
                    pins.update((chunk, (Buffer.SCRATCH, chunk)) for chunk in chunks)
                    torn = True
        return pins

    def _span(self, move: Move, pins: dict[int, Place]) -> Span | None:
        """Where the chunks of a move that leaves, or is added here, lie or may be brought together."""
        chunks = range(move.start, move.stop)
        span = _together([pins.get(c) or self._now(c) or self._home(c) for c in chunks])
        return span or _together([pins.get(c) or self._home(c) for c in chunks])

    def _gather(self, move: Move, pins: dict[int, Place], copies: list[tuple[Place, Place]]) -> Span:
        """The one span where the move's chunks lie once ``copies`` are made."""
        span = self._span(move, pins) or Span(Buffer.SCRATCH, move.start, move.stop)
        for chunk, index in zip(range(move.start, move.stop), range(span.start, span.stop), strict=True):
            now, then = self._now(chunk), (span.buffer, index)
            if now is not None and now != then:
                copies.append((now, then))
        self._put(move.start, span)
        return span

    def _put(self, first: int, span: Span) -> None:
        if span.buffer is not Buffer.INPUT:
            for offset, index in enumerate(range(span.start, span.stop)):
                self._moved[first + offset] = (span.buffer, index)

    def finish(self) -> tuple[Copy, ...]:
        """The copies that bring the result to OUTPUT where it is not there yet."""
        copies = []
        for chunk in range(*self._result):
            now, home = self._now(chunk), self._home(chunk)
            if now is not None and now != home:
                copies.append((now, home))
        return _coalesce(copies)


def _together(places: list[Place]) -> Span | None:
    """The span that the places make up, or None if they are not one after the other."""
    buffer, first = places[0]
    for index, place in enumerate(places):
        if place != (buffer, first + index):
            return None
    return span_of(buffer, first, len(places))


def _coalesce(copies: list[tuple[Place, Place]]) -> tuple[Copy, ...]:
    """Single-chunk copies as copies of as many chunks as lie side by side at both ends."""
    joined: list[list[Span]] = []
    for (source, i), (target, j) in copies:
        if joined:
            src, dst = joined[-1]
            if (src.buffer, src.stop, dst.buffer, dst.stop) == (source, i, target, j):
                joined[-1] = [Span(source, src.start, i + 1), Span(target, dst.start, j + 1)]
                continue
        joined.append([span_of(source, i), span_of(target, j)])
    return tuple(Copy(src, dst) for src, dst in joined)
