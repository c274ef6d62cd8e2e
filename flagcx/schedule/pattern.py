"""Patterns: transfers of one message between ranks in common rounds, and where its chunks come to lie.

Many collectives share one pattern of which rank sends which chunks to which other rank when; they differ in
where a rank keeps them. So an algorithm is written as the transfers of each rank over one imagined buffer
that holds the whole message, in rounds that all ranks count alike. ``schedule_of`` makes a schedule of that,
whose programs settle where each chunk lies on each rank:

- A chunk that a rank contributes stays in INPUT until something is added to it, and is sent from there.
- It lives in OUTPUT where the rank has that chunk in its OUTPUT, else in SCRATCH under its own number.
- Where one transfer covers chunks that lie in different places, they are gathered in one place first.

Both sides of a message name the same round, so no rank ever waits for one that waits for it, and two patterns
with the same clock lie beside each other by listing the transfers of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flagcx.errors import ArgumentError, RankError, ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Copy, Program, Recv, RecvReduce, Schedule, Send, Step, Transfer
from flagcx.schedule.places import ChunkPlaces, ChunkTransfer

IDLE = Step()
"""A step in which a rank does nothing: one for all of them."""
_WORDS = {Send: "sends to", Recv: "receives from", RecvReduce: "receives and reduces from"}


def send(round: int, peer: int, start: int, stop: int | None = None) -> ChunkTransfer:
    """Sends chunks ``start`` to ``stop`` (by default one chunk) to ``peer``, as they are before the round."""
    return ChunkTransfer(Send, round, peer, start, start + 1 if stop is None else stop)


def recv(round: int, peer: int, start: int, stop: int | None = None) -> ChunkTransfer:
    """Receives chunks ``start`` to ``stop`` (by default one chunk) from ``peer``."""
    return ChunkTransfer(Recv, round, peer, start, start + 1 if stop is None else stop)


def recv_reduce(round: int, peer: int, start: int, stop: int | None = None) -> ChunkTransfer:
    """Receives chunks from ``peer`` and adds them to this rank's own of the same numbers.

    Several of one round are added in the order in which they are listed.
    """
    return ChunkTransfer(RecvReduce, round, peer, start, start + 1 if stop is None else stop)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Makes programs from a pattern: the ``make`` of the schedules that ``schedule_of`` returns.

    Attributes:
        collective: Name of the collective.
        size: Number of ranks.
        chunks: Pieces that the message is cut into.
        rounds: Number of rounds.
        transfers: (rank) -> the transfers of that rank.
        root: The root, or None.
    """

    collective: str
    size: int
    chunks: int
    rounds: int
    transfers: Callable[[int], Iterable[ChunkTransfer]]
    root: int | None

    def __call__(self, rank: int) -> Program:
        """The program of ``rank``: step 0 has local work alone, step ``i + 1`` is round ``i``."""
        by_round: dict[int, list[ChunkTransfer]] = {}
        for transfer in self.transfers(rank):
            if not 0 <= transfer.round < self.rounds:
                raise ScheduleError(
                    f"rank {rank} {_WORDS[transfer.kind]} rank {transfer.peer} in round {transfer.round}, "
                    f"but the schedule has rounds={self.rounds}, the first of which is 0"
                )
            if not 0 <= transfer.start < transfer.stop <= self.chunks:
                raise ScheduleError(
                    f"rank {rank} {_WORDS[transfer.kind]} rank {transfer.peer} chunks {transfer.start} to "
                    f"{transfer.stop} in round {transfer.round}, but the message has chunks={self.chunks}"
                )
            by_round.setdefault(transfer.round, []).append(transfer)
        places = ChunkPlaces(COLLECTIVES[self.collective], rank, self.size, self.chunks, self.root)
        transfers: dict[int, tuple[Transfer, ...]] = {}  # by step, of which most may be idle
        local: dict[int, tuple[Copy, ...]] = {self.rounds: ()}
        for number in sorted(by_round):
            transfers[number + 1], copies = places.step(by_round[number])
            local[number] = local.get(number, ()) + copies
        local[self.rounds] += places.finish()
        steps = [IDLE] * (self.rounds + 1)
        for number in transfers.keys() | local.keys():
            moved, work = transfers.get(number, ()), local.get(number, ())
            if moved or work:
                steps[number] = Step(moved, work)
        return Program(rank, tuple(steps))


def schedule_of(
    collective: str,
    algorithm: str,
    size: int,
    chunks: int,
    rounds: int,
    transfers: Callable[[int], Iterable[ChunkTransfer]],
    root: int | None = None,
) -> Schedule:
    """Makes a schedule of a pattern.

    Args:
        collective: Name of the collective. Not alltoall, whose blocks have two owners.
        algorithm: Name of the algorithm.
        size: Number of ranks.
        chunks: Pieces that the message is cut into: a multiple of ``size`` where the collective has a block
            for each rank.
        rounds: Number of rounds.
        transfers: (rank) -> the transfers of that rank, made by ``send``, ``recv`` and ``recv_reduce``.
        root: The root, or None.

    Returns:
        An aligned schedule of ``rounds + 1`` steps, of which the first has local work alone.

    Raises:
        ArgumentError: ``size`` or ``chunks`` is below 1, or ``rounds`` below 0.
        RankError: The root is not one of the ranks.
    """
    check(collective, size, chunks, root)
    if rounds < 0:
        raise ArgumentError(f"{collective}: rounds={rounds}; expected at least 0")
    make = Pattern(collective, size, chunks, rounds, transfers, root)
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


def doublings(size: int) -> int:
    """How many doublings reach ``size`` from 1: log2, rounded up."""
    return (size - 1).bit_length()


def arc(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """``count`` blocks from block ``first`` on, going on with block 0 after block ``size - 1``.

    Yields:
        ``(start, stop)``: one pair, or two where the blocks go past the last; none for no block.
    """
    first %= size
    if count > 0:
        yield first, min(first + count, size)
    if first + count > size:
        yield 0, first + count - size


def later(transfers: Iterable[ChunkTransfer], rounds: int) -> Iterator[ChunkTransfer]:
    """The same transfers, ``rounds`` rounds later."""
    return (t._replace(round=t.round + rounds) for t in transfers)


def backwards(
    transfers: Iterable[ChunkTransfer], rounds: int, arriving: type[Recv | RecvReduce]
) -> Iterator[ChunkTransfer]:
    """The same transfers from the last round to the first, with senders and receivers exchanged.

    Args:
        transfers: One rank's transfers.
        rounds: How many rounds the pattern has.
        arriving: What receives become: ``RecvReduce`` turns distribution into reduction; ``Recv`` still
            moves blocks.
    """
    for t in transfers:
        yield t._replace(round=rounds - 1 - t.round, kind=arriving if t.kind is Send else Send)


def in_sequence(parts: Iterable[Pattern], chunks: int, rank: int) -> Iterator[ChunkTransfer]:
    """The transfers of patterns that follow each other, each cut into ``chunks`` chunks."""
    rounds = 0
    for part in parts:
        factor = chunks // part.chunks
        for kind, round, peer, start, stop in part.transfers(rank):
            yield ChunkTransfer(kind, round + rounds, peer, start * factor, stop * factor)
        rounds += part.rounds


def reverse(schedule: Schedule, *, algorithm: str | None = None) -> Schedule:
    """Runs a pattern from its end to its start, with senders and receivers exchanged.

    Args:
        schedule: A schedule made by ``schedule_of``: a broadcast becomes a reduce, an allgather a
            reduce_scatter, a scatter a gather, and the other way round.
        algorithm: A name for the result; by default that of ``schedule``.

    Raises:
        ArgumentError: The schedule was not made by ``schedule_of``, or its collective has no reverse.

    Example:
        >>> reverse(schedule).collective  # doctest: +SKIP
        'reduce_scatter'
    """
    pattern, kind = schedule.make, COLLECTIVES[schedule.collective]
    ends = (kind.after, kind.before)
    back = [other for other in COLLECTIVES.values() if (other.before, other.after) == ends]
    if not isinstance(pattern, Pattern) or kind.before == kind.after:
        raise ArgumentError(
            f"reverse() cannot run {schedule.algorithm} {schedule.collective} backwards; expected a schedule "
            "made by schedule_of(), of a collective from or to a root or with a block for each rank"
        )

    def transfers(rank: int) -> Iterator[ChunkTransfer]:
        arriving = RecvReduce if back[0].reduces else Recv
        return backwards(pattern.transfers(rank), pattern.rounds, arriving)

    facts = (schedule.size, pattern.chunks, pattern.rounds)
    return schedule_of(back[0].name, algorithm or schedule.algorithm, *facts, transfers, schedule.root)
