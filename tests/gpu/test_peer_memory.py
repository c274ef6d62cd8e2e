"""Peer memory on ranks that share this machine's GPU: results, graphs, memory, order and faults."""

from __future__ import annotations

import contextlib

import pytest

from flagcx.errors import LaunchError
from tests.gpu import peer_jobs
from tests.gpu.conftest import SIZES

MOST = max(SIZES)
SOME_DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64", "int64", "complex64", "bool"]


def faults_of(results: list[list[str]]) -> str:
    return "\n".join(fault for faults in results for fault in faults[:20])


@pytest.mark.parametrize("size", SIZES)
def test_every_form(ranks, size):
    counts = [1, size - 1, size + 1, 1003, 4096, 30_000]
    assert faults_of(ranks(size, peer_jobs.every_form, counts, [0, 1])) == ""


@pytest.mark.parametrize("size", SIZES)
def test_large_messages(ranks, size):
    assert faults_of(ranks(size, peer_jobs.every_form, [1_000_003], [0, 3])) == ""


@pytest.mark.parametrize("size", SIZES)
def test_dtypes_and_operations(ranks, size):
    names = [] if size == MOST else SOME_DTYPES
    assert faults_of(ranks(size, peer_jobs.every_dtype, names, [1003], timeout_s=300.0)) == ""


def test_a_hundred_thousand_calls_of_random_sizes(ranks):
    assert faults_of(ranks(4, peer_jobs.many_calls, 100_000, timeout_s=200.0)) == ""


@pytest.mark.parametrize("size", [2, 4])
def test_a_graph_replayed_ten_thousand_times(ranks, size):
    assert faults_of(ranks(size, peer_jobs.replays, 10_000, timeout_s=200.0)) == ""


@pytest.mark.parametrize("size", SIZES)
def test_arrays_that_peers_see(ranks, size):
    assert faults_of(ranks(size, peer_jobs.seen_arrays, [1000, 1_000_003])) == ""


@pytest.mark.parametrize("size", [2, MOST])
def test_two_communicators_at_once(ranks, size):
    assert faults_of(ranks(size, peer_jobs.two_at_once, 200)) == ""


def test_memory_is_given_back(ranks):
    assert faults_of(ranks(3, peer_jobs.freed, 8)) == ""


def test_a_rank_killed_inside_a_kernel(ranks, tmp_path):
    with pytest.raises(LaunchError, match="rank 1"):
        ranks(4, peer_jobs.killed, 1, str(tmp_path / "end"))
    for rank in (0, 2, 3):
        seconds, given_back, outcome = (tmp_path / f"end.{rank}").read_text().split("\n", 2)
        assert float(seconds) < 8.0
        assert int(given_back) > 0
        assert outcome.startswith(("PeerDiedError", "AbortedError")), outcome


def test_the_gpu_gives_up_waiting(ranks, tmp_path):
    with contextlib.suppress(LaunchError):
        ranks(3, peer_jobs.absent, str(tmp_path / "end"))
    for rank in (0, 2):
        seconds, outcome = (tmp_path / f"end.{rank}").read_text().split("\n", 1)
        assert 0.9 < float(seconds) < 3.0
        assert outcome.startswith(f"PeerTimeoutError: rank {rank}: rank 1 did not come"), outcome


def test_a_call_costs_little_time_of_the_host(ranks):
    for cost in ranks(2, peer_jobs.host_cost, 1024):
        assert cost["call"] < 12.0
        assert cost["replay"] < 4.0


def test_peer_memory_is_chosen(ranks):
    for small, large in ranks(2, peer_jobs.chosen):
        assert small == "one_shot (peer_packets)"
        assert large == "two_shot (peer_memory)"


def test_ranks_that_cannot_use_it_do_without_and_know_why(ranks):
    for faults in ranks(2, peer_jobs.unavailable):
        assert faults == ["rank 1: it is switched off (FLAGCX_PEER_MEMORY=0)"]
