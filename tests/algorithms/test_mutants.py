"""Small changes to every algorithm: what breaks it, ``verify`` rejects, and so do runs on numbers."""

from __future__ import annotations

import pytest

from flagcx.algorithms import build, catalogue
from flagcx.errors import ScheduleError
from tests.algorithms.oracle import assert_right, remembered
from tests.algorithms.test_verified import names
from tests.mutants import mutants, survey


@pytest.mark.parametrize("entry", catalogue(), ids=names)
@pytest.mark.parametrize("size", [3, 6])
def test_verify_rejects_what_is_broken(entry, size):
    schedule = entry.make(size, size - 2 if entry.rooted else None, 2 if entry.pipelined else 1)
    found = survey(schedule, seed=3, limit=40, trials=3, uneven=entry.uneven)
    assert not found.survivors
    assert found.broken >= 15, f"only {found.broken} of the changes broke anything"


@pytest.mark.parametrize(
    "arguments",
    [
        ("allreduce", "ring", 4),
        ("allreduce", "two_shot", 3),
        ("reduce", "tree", 6, 2, 3),
        ("gather", "binomial", 5, 1),
        ("scatter", "binomial", 5, 4),
        ("allgather", "hierarchical", 4),
        ("reduce_scatter", "bruck", 5),
        ("alltoall", "bruck", 5),
    ],
    ids=str,
)
def test_runs_on_numbers_reject_what_is_broken(arguments):
    """So the comparison with NumPy in the other tests can fail."""
    broken = [mutant for _, mutant in mutants(build(*arguments), seed=9, limit=40)]
    assert len(broken) >= 15
    assert not [mutant for mutant in broken if _passes(remembered(mutant))]


def _passes(schedule) -> bool:
    try:
        for seed in range(8):
            for in_place in (False, True):
                assert_right(schedule, 2 * schedule.chunks + 1, in_place, seed)
    except (ScheduleError, AssertionError, IndexError):
        return False
    return True
