"""Sends and receives move together, beside collectives, as MPI's rules let them."""

from __future__ import annotations

import pytest

from tests.communicator.messages import PROGRAMS, run_programs
from tests.communicator.random_messages import run_random
from tests.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_programs_end_with_the_right_data(size):
    assert run_ranks(run_programs, size) == [len(PROGRAMS)] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_end_with_the_right_data(size):
    assert min(run_ranks(run_random, size, size, 100)) > 1000


@pytest.mark.exhaustive
def test_many_random_programs_end_with_the_right_data():
    run_ranks(run_random, 5, 50, 300, timeout_s=600)
