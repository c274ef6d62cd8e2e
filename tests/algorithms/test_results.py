"""Every algorithm run on numbers against NumPy, in random orders of events."""

from __future__ import annotations

import numpy as np
import pytest

from flagcx.algorithms import build, catalogue
from flagcx.dtypes import OPS
from flagcx.schedule.collectives import COLLECTIVES
from tests.algorithms.test_verified import names
from tests.oracle import assert_right, remembered, roots_of
from tests.ranges import exhaustive
from tests.simulated import run


def counts_for(entry, size: int) -> tuple[int | None, ...]:
    """Around the number of ranks, a prime, and blocks of different sizes. A barrier carries one element."""
    if entry.collective == "barrier":
        return (1,)
    few = (0, 1, size - 1, size, size + 1, 37) if size <= 9 else (size - 1, size + 1, 37)
    return few + ((None,) if entry.uneven and COLLECTIVES[entry.collective].blocks else ())


@pytest.mark.parametrize(
    "sizes",
    [(1, 2, 3, 4, 5, 8, 13), *exhaustive([(6, 7, 9, 16, 17)])],
    ids=lambda sizes: f"{sizes[0]}-{sizes[-1]}",
)
@pytest.mark.parametrize("entry", catalogue(), ids=names)
def test_against_numpy(entry, sizes):
    for size in sizes:
        for root in roots_of(entry, size):
            schedule = remembered(entry.make(size, root))
            for seed, count in enumerate(counts_for(entry, size)):
                for in_place in (False, True):
                    assert_right(schedule, count, in_place, seed)


@pytest.mark.parametrize("entry", [e for e in catalogue() if e.pipelined], ids=names)
def test_in_pieces_against_numpy(entry):
    for size in (2, 3, 5, 8):
        for pieces in (2, 3, 7):
            schedule = remembered(entry.make(size, size - 1 if entry.rooted else None, pieces))
            for seed, count in enumerate((0, 1, size + 1, 37, *counts_for(entry, size)[6:])):
                for in_place in (False, True):
                    assert_right(schedule, count, in_place, seed)


@pytest.mark.parametrize("entry", [e for e in catalogue() if e.collective == "allreduce"], ids=names)
def test_all_ranks_end_with_the_same_bits(entry):
    chance = np.random.default_rng(5)
    for size in (2, 3, 5, 6, 8, 13):
        given = [chance.standard_normal(41).astype(np.float32) for _ in range(size)]
        got = run(entry.make(size), given, 41, OPS["sum"], in_place=True, seed=size)
        for rank, array in enumerate(got):
            assert array.tobytes() == got[0].tobytes(), f"rank {rank} of {size}"


def _adds_in_rank_order(entry) -> bool:
    return COLLECTIVES[entry.collective].reduces and entry.algorithm in ("one_shot", "two_shot", "direct")


@pytest.mark.parametrize("entry", [e for e in catalogue() if _adds_in_rank_order(e)], ids=names)
def test_ordered_sums_are_made_from_rank_0_up(entry):
    """The sum of floats depends on the order, so equal bits prove the order."""
    chance = np.random.default_rng(7)
    for size in (2, 3, 5, 8):
        blocks = size if COLLECTIVES[entry.collective].blocks else 1
        given = [chance.standard_normal(16 * blocks).astype(np.float32) for _ in range(size)]
        total = given[0].copy()
        for array in given[1:]:
            total += array
        backwards = given[-1].copy()
        for array in given[-2::-1]:
            backwards += array
        assert size == 2 or total.tobytes() != backwards.tobytes()
        root = size - 1 if entry.rooted else None
        got = run(entry.make(size, root), given, 16, OPS["sum"])
        wanted = np.split(total, size) if blocks > 1 else [total] * size
        for rank, array in enumerate(got):
            assert array is None or array.tobytes() == wanted[rank].tobytes()


def test_one_shot_and_two_shot_end_with_the_same_bits():
    chance = np.random.default_rng(11)
    given = [chance.standard_normal(1001).astype(np.float32) for _ in range(7)]
    one, two = (
        run(build("allreduce", name, 7), given, 1001, OPS["sum"]) for name in ("one_shot", "two_shot")
    )
    for a, b in zip(one, two, strict=True):
        assert a.tobytes() == b.tobytes() == one[0].tobytes()
