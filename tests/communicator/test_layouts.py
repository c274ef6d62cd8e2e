"""Arrays that are not contiguous, or misaligned, give what contiguous ones give, in every call."""

from __future__ import annotations

import pytest

from tests.communicator import layouts
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_call_takes_every_layout(size):
    done = run_ranks(layouts.check_layouts, size)
    assert len(set(done)) == 1 and done[0] > 1000


def test_arrays_that_overlap_are_reduced_in_order():
    run_ranks(layouts.check_overlaps, 2)


def test_repeated_calls_look_at_the_layout():
    run_ranks(layouts.check_quick_path, 2)


def test_shapes_may_differ_between_ranks():
    run_ranks(layouts.check_shapes, 2)
