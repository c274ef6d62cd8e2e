"""The traffic of a schedule: which rank sends how much to which other rank on the same level.

The steps of an aligned schedule are levels that all ranks count alike. The traffic of a level is kept as
arrays, and levels of the same traffic share one of them: a ring of 16,384 ranks has 32,766 levels of two
kinds. Ranks that are alike but for the numbers of their peers are recognised, and the program of one of them
is made: in a ring, of all; in a hierarchy, of those of the same place in their groups; in a tree, of those
that stand alike in it. A ring of very many ranks is taken from those of few, whose levels are the same.

Every chunk counts alike here; on a machine, chunks of a message differ by an element at most. All that a rank
sends to one peer on one level is one message here, even where it lies in several places.

Local work is counted in two ways: as it is listed; and as one launch does it that reads every operand of
a sum once, writes every sum once, and leaves out copies to where a call in place has its data already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby

import numpy as np

from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES, Collective
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Buffer, Copy, RecvReduce, Reduce, Schedule, Send, Span, Step
from flagcx.schedule.pattern import IDLE, Pattern

#: All programs are made where they name no more chunks than this together.
MOST_CHUNKS = 20_000
#: The transfers of all ranks are listed where they name no more chunks than this.
_MOST_LISTED = 100_000_000
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
    sides: Callable[[int], list[Side]]

    @property
    def steps(self) -> int:
        """Levels on which there are messages."""
        return sum(count for key, count in self.runs if any(len(self.kinds[k].source) for k in key))

    def sent_chunks(self) -> np.ndarray:
        """Chunks that each rank sends, int64 of shape (size,)."""
        total, levels = np.zeros(self.size, np.int64), Counter[int]()
        for key, count in self.runs:
            for number in key:
                levels[number] += count
        for number, count in levels.items():
            np.add.at(total, self.kinds[number].source, self.kinds[number].chunks * count)
        return total


def sent_chunks(schedule: Schedule, rank: int) -> int:
    """Chunks that one rank sends; its program alone is made, or read from its pattern."""
    if isinstance(schedule.make, Pattern):
        return sum(t.stop - t.start for t in schedule.make.transfers(rank) if t.kind is Send)
    steps = schedule.program(rank).steps
    return sum(len(t.src) for step in steps for t in step.transfers if isinstance(t, Send))


# -- one rank's side of a level

Side = tuple[tuple, tuple, int, int, int]
"""(offset of the peer, chunks) of all sends, and of all receives; chunks reduced, copied and touched."""
NOTHING: Side = ((), (), 0, 0, 0)
_Shift = tuple[int, int] | None


def _side(step: Step, rank: int, size: int, shift: _Shift) -> Side:
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


def sides_of(schedule: Schedule, rank: int) -> list[Side]:
    size = schedule.size
    kind = COLLECTIVES[schedule.collective]
    shift = kind.in_place_shift(rank, size, schedule.chunks, schedule.root)
    return [
        NOTHING if step is IDLE or not (step.transfers or step.local) else _side(step, rank, size, shift)
        for step in schedule.program(rank).steps
    ]


def rounds_of(schedule: Schedule) -> Rounds:
    """Counts the traffic on each level of a schedule.

    Args:
        schedule: Any schedule. One that is not aligned is put on levels first, for which all of its
            programs are made. Of an aligned one, programs are made of one rank of each kind: of those that
            have the same transfers with peers as far away, or that a rotation of the ranks makes alike,
            with a few more to check that.

    Raises:
        ScheduleError: A send has no matching receive on its level, or the schedule cannot run.

    Example:
        >>> from flagcx.algorithms import build  # doctest: +SKIP
        >>> rounds_of(build("allreduce", "ring", 8)).steps  # doctest: +SKIP
        14
    """
    schedule = levels(schedule)
    return _assemble(schedule, _classes(schedule))


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """Ranks that do the same but for the numbers of their peers, and their side of every level."""

    ranks: np.ndarray
    sides: list[Side]


def _classes(schedule: Schedule) -> list[_Class]:
    """All ranks, those that are alike together."""
    size = schedule.size
    made = lru_cache(maxsize=None)(partial(sides_of, schedule))
    kind, pattern = COLLECTIVES[schedule.collective], schedule.make
    named = size * _named(schedule)
    if named > MOST_CHUNKS:
        period = _period(size, made)
        if period is not None:
            return [_Class(np.arange(rank, size, period), made(rank)) for rank in range(period)]
    if isinstance(pattern, Pattern) and not kind.blocks and named <= _MOST_LISTED:
        alike: dict[tuple, list[int]] = {}
        for rank in range(size):
            alike.setdefault(_signature(pattern, kind, rank), []).append(rank)
        return [_Class(np.array(ranks, np.int64), made(ranks[0])) for ranks in alike.values()]
    return [_Class(np.array([rank], np.int64), made(rank)) for rank in range(size)]


def _named(schedule: Schedule) -> int:
    """Chunks that rank 0 sends and receives."""
    if isinstance(schedule.make, Pattern):
        return sum(t.stop - t.start for t in schedule.make.transfers(0))
    sides = sides_of(schedule, 0)
    return sum(chunks for sent, received, *_ in sides for _, chunks in (*sent, *received))


def _signature(pattern: Pattern, kind: Collective, rank: int) -> tuple:
    """Equal for ranks that do the same, where all have the whole message or none of it."""
    size, root = pattern.size, pattern.root
    transfers = tuple(
        (kind, now, (peer - rank) % size, start, stop)
        for kind, now, peer, start, stop in pattern.transfers(rank)
    )
    return kind.has_input(rank, root), kind.has_output(rank, root), transfers


def _period(size: int, sides: Callable[[int], list[Side]]) -> int | None:
    """The least p such that ranks r and r + p do the same but for the numbers of their peers."""
    divisors = [d for d in range(1, min(size // 2, _LONGEST_PERIOD) + 1) if size % d == 0]
    for period in divisors[:_MOST_PERIODS]:
        probes = dict.fromkeys((period, size - 1, size // 2 + period // 2, 2 * period - 1, size // 3))
        if all(sides(rank) == sides(rank % period) for rank in probes):
            return period
    return None


def _assemble(schedule: Schedule, classes: Sequence[_Class]) -> Rounds:
    """The levels of all ranks."""
    if len({len(one.sides) for one in classes}) > 1:
        raise ScheduleError(
            f"{schedule.algorithm}: the schedule says that it is aligned, but its programs differ in length"
        )
    active: list[list[tuple[int, Side]]] = [[] for _ in classes[0].sides]
    for number, one in enumerate(classes):
        for level, side in enumerate(one.sides):
            if side is not NOTHING:
                active[level].append((number, side))
    numbers: dict[tuple, int] = {}
    kinds, keys = [], []
    for number, found in enumerate(active):
        same = tuple(found)
        if same not in numbers:
            numbers[same] = len(numbers)
            kinds.append(_expand([(classes[place].ranks, side) for place, side in same], schedule, number))
        keys.append((numbers[same],))
    facts = (schedule.collective, schedule.algorithm, schedule.size, schedule.chunks)
    return Rounds(*facts, tuple(kinds), runs_of(keys), partial(sides_of, schedule))


def runs_of(keys: Iterable[tuple[int, ...]]) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple((key, sum(1 for _ in same)) for key, same in groupby(keys))


def _expand(level: Sequence[tuple[np.ndarray, Side]], schedule: Schedule, number: int) -> LevelTraffic:
    """The traffic of a level, by its classes of ranks.

    Raises:
        ScheduleError: A send has no matching receive.
    """
    size = schedule.size
    sent = _ends([(ranks, side[0]) for ranks, side in level], size)
    received = _ends([(ranks, side[1]) for ranks, side in level], size)
    source, target, chunks = sent
    here, there = _order(source, target, chunks), _order(received[1], received[0], received[2])
    matched = len(source) == len(received[0]) and all(
        np.array_equal(mine[here], other[there])
        for mine, other in zip(sent, (received[1], received[0], received[2]), strict=True)
    )
    if not matched:
        raise ScheduleError(
            f"{schedule.algorithm}, step {number}: its sends and receives do not match; verify() names them",
            step=number,
        )
    busy = [(ranks, side[2:]) for ranks, side in level if side[2] or side[3]]
    worker = _joined_ranks([ranks for ranks, _ in busy])
    counts = [
        np.repeat(np.array([work[place] for _, work in busy], np.int64), [len(ranks) for ranks, _ in busy])
        for place in range(3)
    ]
    by_rank = np.argsort(worker, kind="stable")
    return LevelTraffic(
        source[here], target[here], chunks[here], worker[by_rank], *(column[by_rank] for column in counts)
    )


def _ends(
    sides: Sequence[tuple[np.ndarray, tuple[tuple[int, int], ...]]], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rank, the peer and the chunks of each send (or receive) of a level."""
    parts = [(ranks, offset, chunks) for ranks, ends in sides for offset, chunks in ends]
    rank = _joined_ranks([ranks for ranks, _, _ in parts])
    lengths = [len(ranks) for ranks, _, _ in parts]
    offset = np.repeat(np.array([offset for _, offset, _ in parts], np.int64), lengths)
    chunks = np.repeat(np.array([chunks for _, _, chunks in parts], np.int64), lengths)
    return rank, (rank + offset) % size, chunks


def _joined_ranks(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _order(source: np.ndarray, target: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    return np.lexsort((chunks, target, source))
