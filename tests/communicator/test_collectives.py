"""Every collective, on up to 9 and 16 ranks, against NumPy. The default run takes some of these sizes."""

from __future__ import annotations

import pytest

from tests.communicator import checks
from tests.ranges import exhaustive
from tests.ranks import run_ranks

EVERY = (1, 2, 3, 4, 5, 6, 8, 9, 16)  # odd and even, powers of two, and one more and less than these
CHECKS = {  # the most ranks of the default run, and all numbers of ranks
    checks.check_allreduce_dtypes: (3, (1, 2, 3, 5)),  # on more than three ranks none has every count
    checks.check_allreduce_algorithms: (8, EVERY),
    checks.check_allreduce_large: (5, (1, 2, 3, 4, 5, 8)),  # the same calls from five ranks on
    checks.check_others: (5, (1, 2, 3, 5, 8, 9)),
    checks.check_uneven: (8, EVERY),
}


def cases() -> list:
    """Each check on each number of ranks."""
    made = []
    for check, (most, sizes) in CHECKS.items():
        for size in sizes:
            marks = () if size in (1, 2, 3, 5, 8) and size <= most else pytest.mark.exhaustive
            made.append(pytest.param(check, size, marks=marks, id=f"{check.__name__}-{size}"))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("check", "size"), cases())
def test_collectives(check, size):
    done = run_ranks(check, size)
    assert len(done) == size
    assert min(done) > 0
    assert len(set(done)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cross_memory"),
    [(2, "1"), (2, "0"), (3, "0"), pytest.param(5, "1", marks=pytest.mark.exhaustive)],
)
def test_calls_back_to_back_with_ranks_out_of_step(size, cross_memory, monkeypatch):
    monkeypatch.setenv("FLAGCX_CROSS_MEMORY", cross_memory)
    run_ranks(checks.check_back_to_back, size)


@pytest.mark.parametrize("size", [2, 5, *exhaustive([4])])
def test_sums_have_the_same_bits_on_every_rank(size):
    digests = run_ranks(checks.check_bits, size)
    assert len(set(digests)) == 1
