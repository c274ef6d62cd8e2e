"""The traffic of a schedule: which rank sends how much to which other rank on the same level.

The steps of an aligned schedule are levels that all ranks count alike. The traffic of a level is kept as
arrays, and levels of the same traffic share one of them: a ring of 16,384 ranks has 32,766 levels of two
kinds. Where there are too many programs to make, those that are alike but for the numbers of their ranks are
recognised: in a ring, all; in a hierarchy, those of the same place in their groups.

Every chunk counts alike here; on a machine, chunks of a message differ by an element at most. All that a rank
sends to one peer on one level is one message here, even where it lies in several places.

Local work is counted in two ways: as it is listed; and as one launch does it that reads every operand of
a sum once, writes every sum once, and leaves out copies to where a call in place has its data already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby

import numpy as np

from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Buffer, Copy, RecvReduce, Reduce, Schedule, Send, Span, Step
from flagcx.schedule.pattern import Pattern

#: All programs are made where they name no more chunks than this together.
MOST_CHUNKS = 3_000_000
_MOST_PERIODS = 24
_LONGEST_PERIOD = 1024


@dataclass(frozen=True, slots=True, eq=False)
class LevelTraffic:
    """The traffic of a level, or of a part of one: arrays of one entry a message, or one a working rank.

    Attributes:
        source: The sender of each message, int64 of shape (messages,).
        target: Its receiver.
        chunks: Its chunks.
        worker: Ranks that reduce or copy, int64 of shape (workers,).
        reduced: Chunks that each of them reduces, on arrival or locally.
        copied: Chunks that each of them copies.
        touched: Chunks that it reads and writes if one launch does all its work of the level, in place.
    """

    source: np.ndarray
    target: np.ndarray
    chunks: np.ndarray
    worker: np.ndarray
    reduced: np.ndarray
    copied: np.ndarray
    touched: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """The traffic of a schedule, level by level.

    Attributes:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        size: Number of ranks.
        chunks: Pieces that the message is cut into.
        kinds: The different traffics that a level, or a part of one, can have.
        runs: In order, how many levels of the same traffic follow each other: the numbers of the kinds that
            make it up, and the levels.
        sides: (rank) -> its side of every level.
    """

    collective: str
    algorithm: str
    size: int
    chunks: int
    kinds: tuple[LevelTraffic, ...]
    runs: tuple[tuple[tuple[int, ...], int], ...]
    sides: Callable[[int], list[_Side]]

    @property
    def steps(self) -> int:
        """Levels on which there are messages."""
        return sum(count for key, count in self.runs if any(len(self.kinds[k].source) for k in key))

    def sent_chunks(self) -> np.ndarray:
        """Chunks that each rank sends, int64 of shape (size,)."""
        total = np.zeros(self.size, np.int64)
        for key, count in self.runs:
            for number in key:
                np.add.at(total, self.kinds[number].source, self.kinds[number].chunks * count)
        return total


def sent_chunks(schedule: Schedule, rank: int) -> int:
    """Chunks that one rank sends; its program alone is made, or read from its pattern."""
    if isinstance(schedule.make, Pattern):
        return sum(t.stop - t.start for t in schedule.make.transfers(rank) if t.kind is Send)
    steps = schedule.program(rank).steps
    return sum(len(t.src) for step in steps for t in step.transfers if isinstance(t, Send))


# -- one rank's side of a level

_Side = tuple[tuple, tuple, int, int, int]
"""(offset of the peer, chunks) of all sends, and of all receives; chunks reduced, copied and touched."""
_NOTHING: _Side = ((), (), 0, 0, 0)
_Shift = tuple[int, int] | None


def _side(step: Step, rank: int, size: int, shift: _Shift) -> _Side:
    if not step.transfers and not step.local:
        return _NOTHING
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    reduced = copied = 0
    for t in step.transfers:
        offset = (t.peer - rank) % size
        if isinstance(t, Send):
            sent[offset] += len(t.src)
        else:
            received[offset] += len(t.dst)
            reduced += len(t.dst) if isinstance(t, RecvReduce) else 0
    for work in step.local:
        if isinstance(work, Reduce):
            reduced += len(work.dst)
        elif work.src != work.dst:
            copied += len(work.dst)
    touched = _touched(step, shift) if reduced or copied else 0
    return tuple(sorted(sent.items())), tuple(sorted(received.items())), reduced, copied, touched


def _touched(step: Step, shift: _Shift) -> int:
    """Chunks that one launch reads and writes for a step's local work.

    Args:
        step: The step.
        shift: How INPUT and OUTPUT lie over each other; see ``Collective.in_place_shift``.
    """
    # The spans that are written, and how many operands each has beyond the first.
    added: Counter[Span] = Counter(t.dst for t in step.transfers if isinstance(t, RecvReduce))
    for work in step.local:
        if isinstance(work, Reduce):
            added[work.dst] += 1
        elif work.src.buffer is Buffer.SCRATCH and work.src in added:
            added[work.dst] = added.pop(work.src)  # the sum is made where it goes
        elif work.src != work.dst and not _lies_there(work, shift):
            added[work.dst] = 0
    return sum((count + 2) * len(span) for span, count in added.items())


def _lies_there(copy: Copy, shift: _Shift) -> bool:
    """Whether a call in place has the data where the copy brings it."""
    across = copy.src.buffer is Buffer.INPUT and copy.dst.buffer is Buffer.OUTPUT
    return across and shift is not None and copy.src.start - shift[0] == copy.dst.start - shift[1]


def _sides(schedule: Schedule, rank: int) -> list[_Side]:
    size = schedule.size
    kind = COLLECTIVES[schedule.collective]
    shift = kind.in_place_shift(rank, size, schedule.chunks, schedule.root)
    return [_side(step, rank, size, shift) for step in schedule.program(rank).steps]


def rounds_of(schedule: Schedule) -> Rounds:
    """Counts the traffic on each level of a schedule.

    Args:
        schedule: Any schedule. One that is not aligned is put on levels first, for which all of its
            programs are made. Of an aligned one whose programs are very long, programs are made only of one
            rank of each kind that a rotation of the ranks makes alike, and of a few more to check that;
            where no such rotation is found, of all ranks.

    Raises:
        ScheduleError: A send has no matching receive on its level, or the schedule cannot run.

    Example:
        >>> from flagcx.algorithms import build  # doctest: +SKIP
        >>> rounds_of(build("allreduce", "ring", 8)).steps  # doctest: +SKIP
        14
    """
    schedule = levels(schedule)
    made = lru_cache(maxsize=None)(partial(_sides, schedule))
    named = sum(chunks for sent, received, *_ in made(0) for _, chunks in (*sent, *received))
    period = schedule.size
    if named * schedule.size > MOST_CHUNKS:
        period = _period(schedule.size, made) or schedule.size
    return _assemble(schedule, [made(rank) for rank in range(period)])


def _period(size: int, sides: Callable[[int], list[_Side]]) -> int | None:
    """The least p such that ranks r and r + p do the same but for the numbers of their peers."""
    divisors = [d for d in range(1, min(size // 2, _LONGEST_PERIOD) + 1) if size % d == 0]
    for period in divisors[:_MOST_PERIODS]:
        probes = dict.fromkeys((period, size - 1, size // 2 + period // 2, 2 * period - 1, size // 3))
        if all(sides(rank) == sides(rank % period) for rank in probes):
            return period
    return None


def _assemble(schedule: Schedule, base: list[list[_Side]]) -> Rounds:
    """Levels of all ranks from those of ranks 0 to p - 1, which repeat every p ranks."""
    if len({len(sides) for sides in base}) > 1:
        raise ScheduleError(
            f"{schedule.algorithm}: the schedule says that it is aligned, but its programs differ in length"
        )
    numbers: dict[tuple, int] = {}
    keys = []
    for number, level in enumerate(zip(*base, strict=True)):
        if level not in numbers:
            _check(level, schedule.size, number, schedule.algorithm)
            numbers[level] = len(numbers)
        keys.append((numbers[level],))
    kinds = tuple(_expand(level, schedule.size) for level in numbers)
    facts = (schedule.collective, schedule.algorithm, schedule.size, schedule.chunks)
    return Rounds(*facts, kinds, _runs(keys), partial(_sides, schedule))


def _runs(keys: Iterable[tuple[int, ...]]) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple((key, sum(1 for _ in same)) for key, same in groupby(keys))


def _check(level: tuple[_Side, ...], size: int, number: int, algorithm: str) -> None:
    period = len(level)
    sent = [(r, off, n) for r, side in enumerate(level) for off, n in side[0]]
    received = [((r + off) % period, -off % size, n) for r, side in enumerate(level) for off, n in side[1]]
    if sorted(sent) != sorted(received):
        raise ScheduleError(
            f"{algorithm}, step {number}: its sends and receives do not match; verify() names them",
            step=number,
        )


def _expand(level: tuple[_Side, ...], size: int) -> LevelTraffic:
    sent = [(r, off, n) for r, side in enumerate(level) for off, n in side[0]]
    work = [(r, *side[2:]) for r, side in enumerate(level) if side[2] or side[3]]
    turns = np.arange(0, size, len(level), dtype=np.int64)[:, None]
    ranks, offsets, chunks = _columns(sent, 3)
    worker, *counts = _columns(work, 4)
    source = (ranks + turns).ravel()
    return LevelTraffic(
        source,
        (source + np.tile(offsets, len(turns))) % size,
        np.tile(chunks, len(turns)),
        (worker + turns).ravel(),
        *(np.tile(column, len(turns)) for column in counts),
    )


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> Iterator[np.ndarray]:
    return iter(np.array(rows, np.int64).reshape(-1, width).T)


def relabelled(one: Rounds, order: Sequence[int]) -> Rounds:
    """The traffic where rank ``order[i]`` does what rank i does here, of a collective without blocks."""
    ranks, size = np.asarray(order, np.int64), one.size
    place = np.argsort(ranks)

    def moved(rank: int, ends: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        at = int(place[rank])
        peers = ((int(ranks[(at + offset) % size] - rank) % size, chunks) for offset, chunks in ends)
        return tuple(sorted(peers))

    def sides(rank: int) -> list[_Side]:
        own = one.sides(int(place[rank]))
        return [(moved(rank, side[0]), moved(rank, side[1]), side[2], side[3], side[4]) for side in own]

    kinds = (
        replace(kind, source=ranks[kind.source], target=ranks[kind.target], worker=ranks[kind.worker])
        for kind in one.kinds
    )
    return replace(one, kinds=tuple(kinds), sides=sides)


# -- pieces that follow each other


def staggered(one: Rounds, schedule: Schedule) -> Rounds | None:
    """The traffic of a pipelined schedule from that of the same with one piece.

    In a tree or chain each piece does what the one before it did, one level later. So its levels are those of
    one piece, laid over each other; that is checked on some ranks.

    Args:
        one: The traffic for one piece.
        schedule: The same algorithm and ranks with any number of pieces.

    Returns:
        The traffic, or None where the pieces of ``schedule`` do not follow each other like that.
    """
    pieces, rest = divmod(schedule.chunks, one.chunks)
    keys = [key for key, count in one.runs for _ in range(count)]
    if rest or not schedule.aligned or schedule.size != one.size:
        return None
    total, size = len(keys) + pieces - 1, one.size
    probes = sorted({0, 1, 2, size // 3, size // 2, size - 2, size - 1} & set(range(size)))
    for rank in probes:
        got = _sides(schedule, rank)
        if len(got) != total or got != _overlaid(one.sides(rank), pieces):
            return None
    merged = []
    for level in range(total):
        parts = range(max(0, level - pieces + 1), min(level + 1, len(keys)))
        merged.append(tuple(sorted(number for part in parts for number in keys[part])))
    return replace(
        one,
        algorithm=schedule.algorithm,
        chunks=schedule.chunks,
        runs=_runs(merged),
        sides=partial(_sides, schedule),
    )


def _joined(sides: Sequence[_Side]) -> _Side:
    """The sides of levels that happen at once, as one."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for side in sides:
        for offset, chunks in side[0]:
            sent[offset] += chunks
        for offset, chunks in side[1]:
            received[offset] += chunks
    return (
        tuple(sorted(sent.items())),
        tuple(sorted(received.items())),
        sum(side[2] for side in sides),
        sum(side[3] for side in sides),
        sum(side[4] for side in sides),
    )


def _overlaid(sides: Sequence[_Side], pieces: int) -> list[_Side]:
    return [
        _joined(sides[max(0, level - pieces + 1) : min(level + 1, len(sides))])
        for level in range(len(sides) + pieces - 1)
    ]
