"""The traffic of a schedule from that of another: of fewer ranks, of ranks in another order, of one piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from flagcx.schedule.model import Schedule
from flagcx.schedule.traffic import NOTHING, LevelTraffic, Rounds, Side, runs_of, sides_of


def grown(few: Iterable[Rounds], schedule: Schedule) -> Rounds | None:
    """The traffic of a rotation of many ranks from that of few, where it goes on as it began.

    In a ring all ranks do the same, whatever their number, and only the number of levels grows with it. That
    is taken from three numbers of ranks that follow each other.

    Args:
        few: The traffic of the same algorithm for three numbers of ranks, each one more than the last. Where
            the ranks of the first differ, the others are not asked for.
        schedule: The same for many ranks.

    Returns:
        The traffic, or None where it does not grow evenly, or ranks differ.
    """
    size, asked = schedule.size, iter(few)
    first = next(asked)
    turns = [_turn(kind, first.size) for kind in first.kinds]
    if None in turns:
        return None
    further = list(asked)
    known = [first, *further]
    kinds = [turns, *([_turn(kind, one.size) for kind in one.kinds] for one in further)]
    shapes = [[key for key, _ in one.runs] for one in known]
    cuts = {one.chunks / one.size for one in known} | {schedule.chunks / size}
    if kinds[1:] != kinds[:-1] or shapes[1:] != shapes[:-1] or len(cuts) > 1:
        return None
    counts = np.array([[count for _, count in one.runs] for one in known], np.int64)
    if not np.array_equal(counts[2] - counts[1], counts[1] - counts[0]):
        return None
    every = np.arange(size)
    levels = counts[0] + (counts[1] - counts[0]) * (size - first.size)
    made = tuple(
        LevelTraffic(
            np.repeat(every, len(ends)),
            (np.repeat(every, len(ends)) + np.tile(np.array([offset for offset, _ in ends], np.int64), size))
            % size,
            np.tile(np.array([chunks for _, chunks in ends], np.int64), size),
            every if any(work) else every[:0],
            *(np.full(size if any(work) else 0, count, np.int64) for count in work),
        )
        for ends, work in (turn for turn in kinds[0] if turn is not None)
    )
    facts = (schedule.collective, schedule.algorithm, size, schedule.chunks)
    runs = tuple(zip(shapes[0], levels.tolist(), strict=True))
    return Rounds(*facts, made, runs, partial(sides_of, schedule))


def _turn(kind: LevelTraffic, size: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]] | None:
    """What each rank sends, as (offset, chunks), and its work, where that is the same for all; else None."""
    offset = (kind.target - kind.source) % size
    offset = np.where(offset > size // 2, offset - size, offset)
    first = kind.source == 0
    ends = tuple(sorted(zip(offset[first].tolist(), kind.chunks[first].tolist(), strict=True)))
    sent = np.stack([kind.source, offset, kind.chunks])
    whole = sorted(map(tuple, sent.T.tolist())) == [(r, *end) for r in range(size) for end in ends]
    work = [column.tolist() for column in (kind.reduced, kind.copied, kind.touched)]
    even = len(kind.worker) in (0, size) and all(len(set(column)) <= 1 for column in work)
    if not (whole and even):
        return None
    return ends, tuple(column[0] if column else 0 for column in work)


def relabelled(one: Rounds, order: Sequence[int]) -> Rounds:
    """The traffic where rank ``order[i]`` does what rank i does here, of a collective without blocks."""
    ranks, size = np.asarray(order, np.int64), one.size
    place = np.argsort(ranks)

    def moved(rank: int, ends: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        at = int(place[rank])
        peers = ((int(ranks[(at + offset) % size] - rank) % size, chunks) for offset, chunks in ends)
        return tuple(sorted(peers))

    def sides(rank: int) -> list[Side]:
        own = one.sides(int(place[rank]))
        return [(moved(rank, side[0]), moved(rank, side[1]), side[2], side[3], side[4]) for side in own]

    kinds = (
        replace(kind, source=ranks[kind.source], target=ranks[kind.target], worker=ranks[kind.worker])
        for kind in one.kinds
    )
    return replace(one, kinds=tuple(kinds), sides=sides)


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
        got = sides_of(schedule, rank)
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
        runs=runs_of(merged),
        sides=partial(sides_of, schedule),
    )


def _joined(sides: Sequence[Side]) -> Side:
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


def _overlaid(sides: Sequence[Side], pieces: int) -> list[Side]:
    """The sides of so many pieces, each a level after the one before it."""
    found: list[list[Side]] = [[] for _ in range(len(sides) + pieces - 1)]
    for level, side in enumerate(sides):
        if side is not NOTHING:
            for later in found[level : level + pieces]:
                later.append(side)
    return [_joined(together) if together else NOTHING for together in found]
