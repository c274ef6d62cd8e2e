"""What could run a call, and the schedule that each stands for."""

from __future__ import annotations

from fractions import Fraction

import pytest

from flagcx.algorithms import entries
from flagcx.algorithms.candidate import Candidate
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.verify import verify
from flagcx.selection.candidates import MOST_DIRECT, candidates
from flagcx.selection.predicted import best_pieces
from flagcx.topology import best_order, cluster, preset


@pytest.mark.parametrize("collective", list(COLLECTIVES))
@pytest.mark.parametrize("name", ["dgx-1v", "8xa100-pcie"])
def test_every_candidate_is_right(collective, name):
    machine = preset(name)
    root = 3 if COLLECTIVES[collective].rooted else None
    for candidate in candidates(collective, 8, machine):
        schedule = candidate.build(collective, 8, root)
        assert (schedule.collective, schedule.root) == (collective, root)
        verify(schedule)


def test_all_algorithms_are_there_and_orders_follow_the_plan():
    machine = preset("dgx-1v")
    found = candidates("allreduce", 8, machine)
    assert {c.algorithm for c in found} == {str(e.algorithm) for e in entries("allreduce")}
    planned = [c for c in found if c.order is not None]
    assert {c.algorithm for c in planned} == {"ring", "chain"}
    assert all(c.order == best_order(machine) for c in planned)
    assert not [c for c in candidates("allreduce", 8, preset("dgx-a100")) if c.order]


def test_groups_are_hosts_or_what_nvlink_joins():
    def groups(machine, size):
        return next(c.groups for c in candidates("allreduce", size, machine) if c.algorithm == "hierarchical")

    assert groups(preset("8xa100-pcie"), 8) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups(cluster(preset("dgx-h100"), 3), 24)[2] == tuple(range(16, 24))
    assert groups(preset("dgx-a100"), 8) is None


def test_gpus_in_another_order_are_other_ranks():
    gpus = (5, 1, 3, 7, 0, 2, 4, 6)
    found = [c for c in candidates("allreduce", 8, preset("dgx-1v"), gpus) if c.order]
    assert [gpus[rank] for rank in found[0].order] == list(best_order(preset("dgx-1v"), gpus))


def test_talking_to_all_at_once_is_for_few():
    few, many = (
        {c.algorithm for c in candidates("allreduce", size)} for size in (MOST_DIRECT, MOST_DIRECT + 1)
    )
    assert few - many == {"one_shot", "two_shot"}


def test_a_mix_is_right_and_tells_its_name():
    mix = Candidate("ring", order=(0, 2, 1, 3), other=Candidate("tree", 2), share=Fraction(3, 4))
    verify(mix.build("allreduce", 4))
    assert mix.name == "ring along 0,2,1,3 (3/4) | tree in 2 pieces"


def test_pieces_grow_with_bytes_over_latency():
    chain = Candidate("chain")
    assert best_pieces("broadcast", chain, 7, 7.0, 8.0, 1 << 30) == 1
    assert best_pieces("broadcast", chain, 7, 7.0, 7.0 * 101, 1 << 30) == 32
    assert best_pieces("broadcast", chain, 7, 7.0, 1e9, 1 << 30) == 64
    assert best_pieces("broadcast", chain, 7, 7.0, 1e9, 16 << 10) == 4
    assert best_pieces("allreduce", Candidate("ring"), 14, 7.0, 1e9, 1 << 30) == 1


def test_an_unknown_collective_is_refused():
    with pytest.raises(ArgumentError, match="collective='sum' is not known"):
        candidates("sum", 4)
