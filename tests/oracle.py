"""What NumPy says each collective ends with, and whether a schedule does: no idea of ``verify`` is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from flagcx.algorithms import AlgorithmEntry
from flagcx.dtypes import OPS
from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Schedule
from tests.simulated import run

Sizes = Sequence[Sequence[int]]
"""``sizes[source][target]``: elements that a source has for a target. Rows are alike but for alltoall."""


def roots_of(entry: AlgorithmEntry, size: int) -> Sequence[int | None]:
    """The roots to try: all of few ranks, the first, second and last of many."""
    if not entry.rooted:
        return (None,)
    return range(size) if size <= 9 else (0, 1, size - 1)


def remembered(schedule: Schedule) -> Schedule:
    """The same schedule, whose programs are made only once."""
    return replace(schedule, make=lru_cache(maxsize=None)(schedule.make))


def block_sizes(collective: str, size: int, count: int | None) -> Sizes:
    """Blocks of ``count`` elements; for None, blocks of different sizes with empty ones among them."""
    if count is not None:
        return [[count] * size for _ in range(size)]
    if collective == "alltoall":
        return [[(5 * a + 3 * b + a * b) % 4 for b in range(size)] for a in range(size)]
    return [[(3 * target * target + 2 * target + 1) % 6 for target in range(size)] for _ in range(size)]


def counts_of(collective: str, sizes: Sizes):
    """The counts to give to ``run``: one number if all blocks are alike, tuples if not."""
    if len({count for row in sizes for count in row}) == 1:
        return sizes[0][0]
    if collective == "alltoall":
        return lambda rank: (tuple(sizes[rank]), tuple(row[rank] for row in sizes))
    return tuple(sizes[0])


def data(rank: int, count: int) -> np.ndarray:
    """Elements that differ in every (rank, index), also after they are added up."""
    return np.arange(count, dtype=np.int64) * 1_000_003 + (rank + 1) * (rank + 2) * 7_919


def inputs_of(collective: str, size: int, root: int | None, sizes: Sizes) -> list[np.ndarray | None]:
    """The INPUT of each rank, or None."""
    kind = COLLECTIVES[collective]
    given: list[np.ndarray | None] = []
    for rank in range(size):
        if not kind.has_input(rank, root):
            given.append(None)
        elif kind.blocks:
            whole = kind.input_blocks(size) > 1 or size == 1
            given.append(data(rank, sum(sizes[rank]) if whole else sizes[rank][rank]))
        elif collective == "barrier":
            given.append(np.full(sizes[rank][0], 1 << rank))
        else:
            given.append(data(rank, sizes[rank][0]))
    return given


def expected(collective: str, given: Sequence[np.ndarray | None], root: int | None, sizes: Sizes) -> list:
    """The OUTPUT of each rank, or None where it has none."""
    size = len(given)
    every = range(size)
    if collective == "barrier":
        return [np.bitwise_or.reduce(given)] * size
    if collective == "allreduce":
        return [sum(given)] * size
    if collective == "reduce":
        return [sum(given) if rank == root else None for rank in every]
    if collective == "broadcast":
        return [given[root]] * size
    if collective == "allgather":
        return [np.concatenate(given)] * size
    if collective == "gather":
        return [np.concatenate(given) if rank == root else None for rank in every]
    if collective == "reduce_scatter":
        return np.split(sum(given), np.cumsum(sizes[0])[:-1])
    if collective == "scatter":
        return np.split(given[root], np.cumsum(sizes[0])[:-1])
    blocks = [np.split(array, np.cumsum(row)[:-1]) for array, row in zip(given, sizes, strict=True)]
    return [np.concatenate([blocks[source][rank] for source in every]) for rank in every]


def assert_right(schedule: Schedule, count: int | Sizes | None, in_place: bool, seed: int = 0) -> None:
    """Runs the schedule and compares every rank's OUTPUT with NumPy's."""
    collective, size, root = schedule.collective, schedule.size, schedule.root
    sizes = block_sizes(collective, size, count) if count is None or isinstance(count, int) else count
    given = inputs_of(collective, size, root, sizes)
    op = OPS["bor" if collective == "barrier" else "sum"] if COLLECTIVES[collective].reduces else None
    got = run(schedule, given, counts_of(collective, sizes), op, in_place=in_place, seed=seed)
    for rank, wanted in enumerate(expected(collective, given, root, sizes)):
        if wanted is not None:
            np.testing.assert_array_equal(
                got[rank], wanted, err_msg=f"rank {rank} of {size}, root {root}, count {count}, {in_place=}"
            )


def outcome(schedule: Schedule, seed: int = 0, trials: int = 6, uneven: bool = False) -> str | None:
    """What goes wrong in some of ``trials`` runs in place and not, with chunks of unlike sizes; or None."""
    pieces = max(COLLECTIVES[schedule.collective].per_block(schedule.size, schedule.chunks), 1)
    every = range(schedule.size)
    for trial in range(trials):
        alike = 2 * pieces + (seed + trial) % pieces + 1
        sizes = [[alike] * len(every)] * len(every)
        if uneven and COLLECTIVES[schedule.collective].blocks:
            rows = every if schedule.collective == "alltoall" else [0] * len(every)
            sizes = [[alike + (5 * q + 3 * r + trial) % 7 * pieces for q in every] for r in rows]
        for in_place in (False, True):
            try:
                assert_right(schedule, sizes, in_place, seed + trial)
            except (ScheduleError, AssertionError) as error:
                return str(error)
    return None
