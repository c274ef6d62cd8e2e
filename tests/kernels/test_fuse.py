"""The fused phases do what the work, done item by item, does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagcx.errors import ScheduleError
from flagcx.kernels.fuse import Chain, Update, forward, fuse
from flagcx.kernels.source import MAX_SOURCES

MEMORY = 40


def done_one_by_one(work, memories):
    for item in work:
        (m, a), (s, b) = item.to, item.source
        to = memories[m][a : a + item.count]
        source = memories[s][b : b + item.count].copy()
        to[...] = to + source if item.reduces else source


def done_in_phases(phases, memories):
    """Every chain of a phase reads the memory as it was before the phase, as blocks side by side may."""
    for phase in phases:
        before = [m.copy() for m in memories]
        written = np.zeros((len(memories), MEMORY), int)
        for chain in phase:
            (m, a), n = chain.to, chain.count
            memories[m][a : a + n] = sum(before[s][b : b + n] for s, b in chain.sources)
            written[m, a : a + n] += 1
        assert written.max(initial=0) <= 1, "two chains of one phase write the same element"


@st.composite
def some_work(draw):
    items = []
    for _ in range(draw(st.integers(0, 8))):
        count = draw(st.integers(0, 9))
        place = st.tuples(st.integers(0, 2), st.integers(0, MEMORY - count))
        to, source = draw(place), draw(place)
        shifted = to != source and to[0] == source[0] and abs(to[1] - source[1]) < count
        if not shifted:
            items.append(Update(to, source, count, draw(st.booleans())))
    return items


@given(some_work())
@settings(max_examples=300, deadline=None)
def test_phases_do_what_the_work_does_item_by_item(work):
    expected = [np.arange(MEMORY) + 1000 * m for m in range(3)]
    got = [m.copy() for m in expected]
    done_one_by_one(work, expected)
    done_in_phases(fuse(work), got)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_array_equal(a, b)


@given(some_work(), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_forwarding_changes_only_what_is_dead(work, dead):
    expected = [np.arange(MEMORY) + 1000 * m for m in range(3)]
    got = [m.copy() for m in expected]
    done_in_phases(fuse(work), expected)
    done_in_phases(forward(fuse(work), lambda place, count: place[0] == dead), got)
    for memory in {0, 1, 2} - {dead}:
        np.testing.assert_array_equal(expected[memory], got[memory])


def test_a_sum_made_in_dead_scratch_goes_straight_to_the_result():
    work = [
        Update((2, 0), (1, 0), 8, reduces=True),
        Update((2, 0), (2, 8), 8, reduces=True),
        Update((1, 0), (2, 0), 8),
    ]
    assert forward(fuse(work), lambda place, count: True) == ((Chain((1, 0), 8, ((2, 0), (1, 0), (2, 8))),),)
    assert len(forward(fuse(work), lambda place, count: False)) == 2


def test_a_sum_of_many_is_one_chain_in_the_order_listed():
    work = [Update((1, 0), (2, 0), 8)] + [Update((1, 0), (2, 8 * i), 8, reduces=True) for i in (3, 1, 2)]
    assert fuse(work) == ((Chain((1, 0), 8, ((2, 0), (2, 24), (2, 8), (2, 16))),),)


def test_neighbours_are_joined():
    work = [Update((1, 8 * i), (0, 8 * i), 8) for i in range(5)]
    assert fuse(work) == ((Chain((1, 0), 40, ((0, 0),)),),)


def test_work_that_reads_a_result_waits_for_it():
    phases = fuse([Update((1, 0), (2, 0), 8, reduces=True), Update((0, 0), (1, 4), 4)])
    assert [len(p) for p in phases] == [1, 1]


def test_a_copy_in_place_is_no_work():
    assert fuse([Update((1, 3), (1, 3), 5)]) == ()


def test_a_shifted_copy_onto_itself_is_refused():
    with pytest.raises(ScheduleError, match=r"8 elements at \(1, 0\) .* shifted to \(1, 4\)"):
        fuse([Update((1, 4), (1, 0), 8)])


def test_a_chain_longer_than_a_launch_takes_is_continued():
    work = [Update((1, 0), (2, i), 1, reduces=True) for i in range(MAX_SOURCES + 10)]
    first, second = fuse(work)
    assert len(first[0].sources) == MAX_SOURCES
    assert second[0].sources[0] == (1, 0)
    assert len(first[0].sources) + len(second[0].sources) == MAX_SOURCES + 12
