"""Blocks of any size, sends and receives through peer memory, on ranks that share this machine's GPU."""

from __future__ import annotations

import contextlib

import pytest

from flagcx.errors import LaunchError
from tests.gpu import move_jobs
from tests.gpu.conftest import SIZES
from tests.gpu.test_peer_memory import faults_of


@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_different_sizes(ranks, size):
    assert faults_of(ranks(size, move_jobs.v_forms, 6, 3_000_001)) == ""


@pytest.mark.parametrize("size", SIZES)
def test_sends_and_receives(ranks, size):
    assert faults_of(ranks(size, move_jobs.messages, 8, 3_000_001)) == ""


@pytest.mark.parametrize("size", SIZES)
def test_messages_that_are_started_move_in_any_order_beside_collectives(ranks, size):
    assert faults_of(ranks(size, move_jobs.started, 5, 3_000_001)) == ""


def test_a_farm_of_tasks(ranks):
    assert faults_of(ranks(3, move_jobs.farm, 100)) == ""


@pytest.mark.parametrize("size", [2, 4])
def test_a_graph_with_all_of_them(ranks, size):
    assert faults_of(ranks(size, move_jobs.in_graphs, 500)) == ""


def test_a_barrier_of_streams(ranks):
    assert faults_of(ranks(3, move_jobs.barriers)) == ""


def test_a_message_of_another_size_is_an_error_on_both_ranks(ranks, tmp_path):
    with contextlib.suppress(LaunchError):
        ranks(2, move_jobs.wrong_sizes, str(tmp_path / "end"))
    for rank in (0, 1):
        seconds, outcome = (tmp_path / f"end.{rank}").read_text().split("\n", 1)
        assert float(seconds) < 8.0
        assert outcome.startswith(("MismatchError", "AbortedError")), outcome
        assert "rank 1: a message of rank 0 has another size" in outcome
