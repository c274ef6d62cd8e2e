"""Hierarchical algorithms with groups of one size, of different sizes, and in any order of ranks."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagcx.algorithms import build, entries
from flagcx.algorithms.hierarchical import WIDEST, even_groups
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Send
from flagcx.schedule.verify import verify
from tests.oracle import assert_right, remembered

GROUPED = [name for name in COLLECTIVES if any(e.grouped for e in entries(name))]
GROUPS = [
    ((0,),),
    ((0, 1, 2),),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3)),
    ((3, 1), (0, 2)),
    ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
    ((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    ((0, 1, 2), (3,)),
    ((5, 0, 3), (1,), (4, 2)),
    ((0, 1), (2, 3, 4, 5, 6), (7, 8, 9)),
]


@pytest.mark.parametrize("collective", GROUPED)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_any_groups(collective, groups):
    size = sum(map(len, groups))
    for root in range(size) if COLLECTIVES[collective].rooted else (None,):
        schedule = remembered(build(collective, "hierarchical", size, root, groups=groups))
        verify(schedule, uneven=True)
        for in_place in (False, True):
            assert_right(schedule, 2 * size + 1, in_place)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(permutation=st.integers(1, 14).flatmap(lambda n: st.permutations(range(n))), seed=st.randoms())
def test_groups_drawn_at_random(permutation, seed):
    size = len(permutation)
    bounds = sorted({0, size, *(seed.randrange(size) for _ in range(seed.randrange(4)))})
    groups = tuple(tuple(permutation[a:b]) for a, b in pairwise(bounds))
    for collective in GROUPED:
        root = permutation[0] if COLLECTIVES[collective].rooted else None
        verify(build(collective, "hierarchical", size, root, groups=groups), uneven=True)


def test_it_serves_allreduce_reduce_broadcast_allgather_and_reduce_scatter():
    assert GROUPED == ["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"]


def test_each_lane_carries_its_share_between_groups():
    """4 groups of 4: between groups a rank sends 2(m-1)/(mg) of the message, and the groups 2(m-1)/m each."""
    groups = even_groups(16, 4)
    schedule = build("allreduce", "hierarchical", 16, groups=groups)
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    for program in schedule.programs():
        crossing = sum(
            len(transfer.src)
            for transfer in chain.from_iterable(step.transfers for step in program.steps)
            if isinstance(transfer, Send) and group_of[transfer.peer] != group_of[program.rank]
        )
        assert crossing * 4 * 4 == 2 * 3 * schedule.chunks


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0, 1), (2, 3, 4), (5,))], ids=str)
def test_pieces_follow_each_other_a_step_apart(groups):
    """Where one piece is between the groups, the next one is inside them, and nothing is sent twice."""
    size = sum(map(len, groups))
    one = build("allreduce", "hierarchical", size, groups=groups)
    cut = build("allreduce", "hierarchical", size, pieces=5, groups=groups)
    verify(cut, uneven=True)
    assert_right(remembered(cut), 2 * size + 1, False)
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    both = 0
    for whole, program in zip(one.programs(), cut.programs(), strict=True):
        assert len(program.steps) == len(whole.steps) + 4
        sent = [[t for t in step.transfers if isinstance(t, Send)] for step in program.steps]
        once = [t for step in whole.steps for t in step.transfers if isinstance(t, Send)]
        assert sum(len(t.src) for t in chain(*sent)) == 5 * sum(len(t.src) for t in once)
        kinds = [{group_of[t.peer] == group_of[program.rank] for t in step} for step in sent]
        both += kinds.count({True, False})
    assert both > 0


def test_even_groups():
    assert even_groups(10, 3) == ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert [len(group) for group in even_groups(17)] == [5, 4, 4, 4]


def test_in_groups_that_nobody_named_few_talk_to_all():
    """Messages inside groups grow with the square of their width: 128 groups of 128 have 2 million."""
    for size in (64, 65, 1000, 16384):
        groups = even_groups(size)
        assert max(map(len, groups)) <= WIDEST
        assert sorted(chain.from_iterable(groups)) == list(range(size))
    inside = sum(len(group) * (len(group) - 1) for group in even_groups(16384))
    assert inside == 16384 * 7


@pytest.mark.parametrize(
    "groups", [((0, 1), (2,)), ((0, 1), (1, 2, 3)), ((0, 1, 2, 3), ()), ((0, 1), (2, 4))]
)
def test_groups_that_do_not_divide_the_ranks_are_refused(groups):
    with pytest.raises(ArgumentError, match=r"do not divide 4 ranks; expected .* each of 0 to 3 once"):
        build("allreduce", "hierarchical", 4, groups=groups)
