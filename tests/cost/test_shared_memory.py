"""The model of shared memory: what it charges for, by closed forms with plain constants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.shared_memory import HOST_COSTS, HostCosts, count_cores, predict_on_host

FREE = HostCosts(
    call_us=1e-9,
    step_us=1e-9,
    shot_us=1e-9,
    message_us=1e-9,
    attach_us=1e-9,
    crowded_us=1e-9,
    copy_gb_per_s=1e12,
    cached_gb_per_s=1e12,
    cache_nbytes=0,
    add_gb_per_s=1e12,
    memory_gb_per_s=1e12,
)
SLOTS, ATTACHED = Candidate("binomial", 1, "slots"), Candidate("binomial", 1, "cross_memory")


def _us(collective, candidate, nbytes, size, cores, costs=HOST_COSTS, **options):
    found = predict_on_host(collective, candidate, nbytes, size, cores=cores, costs=costs, **options)
    assert found.latency_us <= found.time_us
    return found.time_us


def test_a_message_in_slots_is_copied_twice():
    costs = replace(FREE, memory_gb_per_s=10.0)
    assert _us("broadcast", SLOTS, 10**6, 2, 2, costs) == pytest.approx(2 * 100.0)
    assert _us("broadcast", ATTACHED, 10**6, 2, 2, costs) == pytest.approx(100.0)
    assert _us("broadcast", ATTACHED, 10**6, 2, 2, costs, attached=False) == pytest.approx(2 * 100.0)


def test_ranks_that_outnumber_the_cores_share_them():
    costs = replace(FREE, copy_gb_per_s=1.0)
    direct = Candidate("direct", 1, "slots")
    # Each of 4 ranks writes and reads 3 blocks of 1000 bytes, and copies its own.
    spacious, crowded = (_us("alltoall", direct, 1000, 4, cores, costs) for cores in (8, 2))
    assert spacious == pytest.approx(7.0) and crowded == pytest.approx(14.0)
    crowd = replace(FREE, crowded_us=10.0)
    assert _us("broadcast", SLOTS, 8, 4, 2, crowd) == pytest.approx(2 * 10.0)
    assert _us("broadcast", SLOTS, 8, 4, 4, crowd) == pytest.approx(0.0, abs=1e-6)


def test_additions_and_steps_and_calls_into_the_system():
    assert _us("reduce", SLOTS, 10**6, 2, 2, replace(FREE, add_gb_per_s=5.0)) == pytest.approx(200.0)
    assert _us("broadcast", SLOTS, 0, 8, 8, replace(FREE, step_us=3.0)) == pytest.approx(9.0)
    assert _us("broadcast", ATTACHED, 0, 8, 8, replace(FREE, attach_us=3.0)) == pytest.approx(9.0)
    assert _us("broadcast", SLOTS, 0, 8, 8, replace(FREE, call_us=3.0)) == pytest.approx(3.0)
    shot = replace(FREE, step_us=50.0, shot_us=2.0)
    assert _us("allreduce", Candidate("one_shot"), 8, 4, 4, shot) == pytest.approx(2.0)
    assert _us("allreduce", Candidate("ring"), 8, 4, 4, shot) == pytest.approx(300.0)


def test_what_fits_the_cache_is_copied_faster():
    costs = replace(FREE, copy_gb_per_s=1.0, cached_gb_per_s=4.0, cache_nbytes=4000)
    # Each of two ranks writes its block, reads the other's and copies its own.
    small, large = (_us("allgather", Candidate("direct"), n, 2, 2, costs) for n in (2000, 4000))
    assert small == pytest.approx(1.5) and large == pytest.approx(12.0)


def test_the_fitted_constants_rank_what_was_measured():
    """Times of 2 cores: see bench/results/tune_check_xeon_2_cores.jsonl."""
    for nbytes, size, fast, slow in (
        (1024, 4, Candidate("one_shot"), Candidate("ring")),
        (64 << 20, 4, Candidate("two_shot", 1, "cross_memory"), Candidate("chain", 1, "slots")),
        (16 << 20, 2, Candidate("two_shot", 1, "cross_memory"), Candidate("one_shot", 1, "slots")),
    ):
        assert _us("allreduce", fast, nbytes, size, 2) < 0.7 * _us("allreduce", slow, nbytes, size, 2)
    assert count_cores() >= 1
