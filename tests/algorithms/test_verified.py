"""Every algorithm is proved right for 1 to 10 ranks and some up to 64, in place and not."""

from __future__ import annotations

import pytest

from flagcx.algorithms import AlgorithmEntry, catalogue
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.verify import verify
from tests.oracle import roots_of
from tests.ranges import exhaustive

SIZES = [(*range(1, 10), 13, 16, 17), *exhaustive([(10, 12, 15, 23, 31, 32, 33, 64)])]


def names(entry: AlgorithmEntry) -> str:
    return f"{entry.collective}-{entry.algorithm}"


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]}-{sizes[-1]}")
@pytest.mark.parametrize("entry", catalogue(), ids=names)
def test_verified_for_every_number_of_ranks(entry, sizes):
    for size in sizes:
        for root in roots_of(entry, size):
            verify(entry.make(size, root), uneven=entry.uneven, same_bits=True)


@pytest.mark.parametrize("sizes", [(1, 2, 3, 5, 8), *exhaustive([(4, 7, 9, 16, 17)])])
@pytest.mark.parametrize("entry", [e for e in catalogue() if e.pipelined], ids=names)
def test_verified_in_pieces(entry, sizes):
    for size in sizes:
        for pieces in (2, 3, 7):
            for root in roots_of(entry, size)[:3]:
                verify(entry.make(size, root, pieces), uneven=entry.uneven, same_bits=True)


def test_every_collective_is_served_and_every_uneven_form():
    served = {(e.collective, e.uneven) for e in catalogue()}
    for name, collective in COLLECTIVES.items():
        assert any(c == name for c, _ in served), f"no algorithm for {name}"
        if collective.blocks:
            assert (name, True) in served, f"no algorithm for {name} with blocks of different sizes"


def test_all_schedules_are_aligned():
    """So that two can be laid beside each other one rank at a time; ``verify`` holds them to it."""
    for entry in catalogue():
        schedule = entry.make(6, 0 if entry.rooted else None)
        assert schedule.aligned, names(entry)
        assert (schedule.collective, schedule.algorithm) == (entry.collective, str(entry.algorithm))
