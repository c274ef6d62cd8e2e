"""Streams, graphs, memory, precision, other libraries' arrays, and faults, with ranks on one GPU."""

from __future__ import annotations

import contextlib
import json

import pytest

from flagcx.errors import LaunchError
from tests.gpu import behaviour
from tests.gpu.conftest import GPUS, SIZES

MOST = max(SIZES)
several_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and this machine has {GPUS}")


def faults_of(results: list[list[str]]) -> str:
    return "\n".join(f"rank {r}: {fault}" for r, faults in enumerate(results) for fault in faults[:20])


@pytest.mark.parametrize("size", SIZES)
def test_two_streams(ranks, size):
    assert faults_of(ranks(size, behaviour.two_streams)) == ""


@pytest.mark.parametrize("algorithm", ["ring", "one_shot", "two_shot"])
def test_a_graph_replayed_a_thousand_times(ranks, algorithm):
    assert faults_of(ranks(4, behaviour.replayed, algorithm, 1000)) == ""


def test_a_replay_is_one_launch(ranks):
    assert faults_of(ranks(2, behaviour.enqueues_of_a_replay)) == ""


def test_the_caller_captures_our_calls(ranks):
    assert faults_of(ranks(3, behaviour.captured_by_the_caller)) == ""


def test_ten_thousand_operations_leave_no_memory_behind(ranks):
    assert ranks(4, behaviour.growth, 10_000)[0] <= 4 << 20


def test_asynchronous_work(ranks):
    assert faults_of(ranks(4, behaviour.asynchronous)) == ""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_direct_sums_are_off_by_one_rounding_at_most(ranks, dtype, record_property):
    worst = ranks(MOST, behaviour.rounding, dtype, 100_000)[0]
    record_property("worst", json.dumps(worst))
    print(f"\nlargest error of {MOST} ranks' sum in {dtype}, in halves of a unit in the last place: {worst}")
    # The float32 accumulator itself may round a tie the other way, by 2^-14 of a unit at most.
    assert worst["one_shot"] <= 1.001
    assert worst["two_shot"] <= 1.001
    if MOST > 2:
        assert worst["ring"] > 1.001, "the ring rounds at each step; if not, this test measures nothing"


def test_arrays_of_other_libraries(ranks):
    assert faults_of(ranks(2, behaviour.other_libraries)) == ""


def test_operations_of_the_callers_own(ranks):
    assert faults_of(ranks(3, behaviour.own_operations)) == ""


@pytest.mark.parametrize("size", SIZES)
def test_the_other_calls(ranks, size):
    assert faults_of(ranks(size, behaviour.other_calls)) == ""


def test_an_exception_inside_a_group(ranks):
    assert faults_of(ranks(3, behaviour.exception_in_a_group)) == ""


def test_a_closed_communicator(ranks):
    assert faults_of(ranks(2, behaviour.device_memory_and_threads_stay_in_order)) == ""


@pytest.mark.parametrize("algorithm", [None, "ring", "native"])
def test_a_graph_over_two_streams_keeps_their_order(ranks, algorithm):
    assert faults_of(ranks(3, behaviour.captured_on_two_streams, algorithm)) == ""


@pytest.mark.parametrize("waits_in", ["work", "cuda"])
def test_a_rank_killed_inside_a_collective(ranks, tmp_path, waits_in):
    with pytest.raises(LaunchError, match="rank 1"):
        ranks(4, behaviour.killed, 1, waits_in, str(tmp_path / "end"))
    for rank in (0, 2, 3):
        seconds, outcome = (tmp_path / f"end.{rank}").read_text().split("\n", 1)
        assert float(seconds) < 5.0
        assert outcome.startswith(("PeerDiedError", "AbortedError")), outcome


def test_a_rank_that_fails_alone_and_closes_at_once(ranks, tmp_path):
    with contextlib.suppress(LaunchError):
        ranks(3, behaviour.fails_alone, str(tmp_path / "end"))
    for rank in range(3):
        seconds, outcome = (tmp_path / f"end.{rank}").read_text().split("\n", 1)
        assert float(seconds) < 10.0
        assert outcome.startswith("AbortedError" if rank else "closed"), outcome


def test_close_tells_of_a_last_call_that_did_not_end_well(ranks, tmp_path):
    with contextlib.suppress(LaunchError):
        ranks(2, behaviour.close_tells, str(tmp_path / "end"))
    outcome = (tmp_path / "end.0").read_text()
    assert outcome.startswith(("PeerTimeoutError", "PeerDiedError", "AbortedError")), outcome


def test_a_rank_that_stays_away(ranks, tmp_path):
    with contextlib.suppress(LaunchError):
        ranks(3, behaviour.absent, str(tmp_path / "end"))
    outcomes = []
    for rank in (0, 2):
        seconds, outcome = (tmp_path / f"end.{rank}").read_text().split("\n", 1)
        assert 3.5 < float(seconds) < 9.0
        outcomes.append(outcome)
    assert any(o.startswith("PeerTimeoutError") and "rank 1 is behind" in o for o in outcomes), outcomes


def test_the_debug_mode_names_the_rank_that_differs(ranks):
    for outcome in ranks(3, behaviour.mismatched):
        assert outcome.startswith("MismatchError"), outcome
        assert "rank 1: allreduce of 11 float64 by sum" in outcome


def test_ranks_that_may_not_share_are_told_how_to(ranks):
    for outcome in ranks(2, behaviour.unshared):
        assert outcome.startswith("ResourceError: ranks 0, 1 use one GPU"), outcome
        assert "--share-gpu" in outcome


@several_gpus
def test_every_rank_gets_a_gpu_of_its_own(ranks):
    assert faults_of(ranks(GPUS, behaviour.bound_to_its_own_gpu)) == ""


@several_gpus
def test_an_array_on_another_gpu_is_refused(ranks):
    for outcome in ranks(GPUS, behaviour.an_array_on_another_gpu):
        assert outcome.startswith(("ArrayError: the array is on device", "CommunicatorError: the current"))


def test_the_example_learns_the_same_on_gpu_and_cpu(ranks):
    assert faults_of(ranks(4, behaviour.digits_learnt)) == ""


def test_calls_on_a_stream_that_is_given(ranks):
    assert faults_of(ranks(3, behaviour.stream_argument)) == ""
