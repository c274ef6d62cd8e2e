"""The model's ranking: who is fastest where, what mixes gain, and that it is the same everywhere."""

from __future__ import annotations

import pytest

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.model import DEVICE_COSTS, Model, model_of
from flagcx.cost.network import uniform
from flagcx.cost.simulate import Costs
from flagcx.errors import ArgumentError, TopologyError
from flagcx.schedule.verify import verify
from flagcx.selection.predicted import compare, in_pieces
from flagcx.topology import cluster, preset

MIB = 1 << 20


def test_small_messages_take_few_steps_and_large_ones_little_traffic():
    model = model_of(preset("dgx-a100"))
    small, large = (compare(model, "allreduce", nbytes)[0] for nbytes in (1024, 1 << 30))
    assert small.candidate.algorithm == "one_shot" and small.steps == 1
    assert large.sent_nbytes == pytest.approx(2 * 7 / 8 * (1 << 30))
    assert small.latency_us > 0.9 * small.time_us and large.latency_us < 0.1 * large.time_us


def test_time_grows_with_bytes_and_the_ranking_is_by_time():
    model = model_of(preset("8xa100-pcie"))
    last = 0.0
    for nbytes in (0, 1024, 64 << 10, MIB, 64 * MIB):
        found = compare(model, "allreduce", nbytes)
        times = [one.time_us for one in found]
        assert times == sorted(times) and times[0] >= last
        last = times[0]


def test_links_that_would_idle_are_used_by_two_algorithms_at_once():
    """NVLinks of a DGX-1 go both ways: a ring each way has twice the bandwidth of one."""
    model = model_of(preset("dgx-1v"))
    best = compare(model, "allreduce", 1 << 30)[0]
    assert best.candidate.other is not None
    verify(best.candidate.build("allreduce", 8))
    alone = min(o.time_us for o in compare(model, "allreduce", 1 << 30) if o.candidate.other is None)
    assert best.time_us < 0.8 * alone


def test_no_mix_where_all_share_the_links():
    found = compare(model_of(preset("dgx-a100")), "allreduce", 1 << 30)
    assert all(one.candidate.other is None for one in found)


def test_hosts_are_crossed_by_a_hierarchy():
    model = model_of(cluster(preset("dgx-h100"), 4))
    best = compare(model, "allreduce", 64 * MIB)[0]
    assert best.candidate.algorithm == "hierarchical" and len(best.candidate.groups) == 4
    ring = model.predict("allreduce", Candidate("ring"), 64 * MIB)
    assert ring.bottleneck.kind in ("pcie", "network") and ring.time_us > 3 * best.time_us


@pytest.mark.parametrize("collective", ["broadcast", "alltoall", "barrier", "gather", "reduce_scatter"])
def test_every_collective_is_ranked(collective):
    found = compare(model_of(preset("dgx-1v"), 5), collective, MIB)
    assert found and found[0].time_us > 0
    if collective == "barrier":
        assert found[0].time_us < 100


def test_pieces_are_near_the_best_there_are():
    model = Model(preset("dgx-a100"), costs=Costs(), network=uniform(8, 5.0, 10.0))
    chosen = in_pieces(model, "broadcast", Candidate("chain"), 16 * MIB, root=0)
    every = [
        model.predict("broadcast", Candidate("chain", pieces), 16 * MIB, root=0).time_us
        for pieces in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert chosen.time_us <= 1.05 * min(every) and chosen.time_us < 0.3 * every[0]


def test_one_rank_has_nothing_to_do():
    (only, *_) = compare(model_of(preset("dgx-a100"), 1), "allreduce", MIB)
    assert only.steps == 0 and only.bottleneck is None


def test_all_processes_rank_alike():
    first, again = (compare(model_of(preset("dgx-1v")), "allreduce", MIB) for _ in range(2))
    assert first == again


def test_refusals():
    with pytest.raises(TopologyError, match="9 ranks on 8 GPUs"):
        model_of(preset("dgx-a100"), 9)
    with pytest.raises(ArgumentError, match="collective='sum' is not known"):
        compare(model_of(preset("dgx-a100")), "sum", 8)
    assert DEVICE_COSTS.step_us > 0
