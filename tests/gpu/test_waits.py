"""Ranks that call different things with arrays on GPUs find out, without anything compared before."""

from __future__ import annotations

import pytest

from flagcx.diagnosis.account import account
from tests.gpu import wait_jobs


@pytest.mark.parametrize("peer_memory", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_counts_that_differ(ranks, second, peer_memory):
    """Where a second call waits, it tells; where both ranks have got numbers, their close does."""
    for name, text, seconds in ranks(2, wait_jobs.counts_differ, second, peer_memory):
        assert name == "MismatchError", text
        assert "rank 0: allreduce of 101 float32" in text and "rank 1: allreduce of 100 float32" in text, text
        assert seconds < 10.0


@pytest.mark.parametrize("peer_memory", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_codecs_that_differ(ranks, second, peer_memory):
    for name, text, seconds in ranks(2, wait_jobs.codecs_differ, second, peer_memory):
        assert name in ("MismatchError", "AbortedError"), text
        assert "Quantized(name='fp8'" in text and "Quantized(name='int8'" in text, text
        assert seconds < 10.0


@pytest.mark.parametrize("joined", [False, True])
def test_numpy_on_one_rank_and_a_gpu_on_the_other(ranks, joined):
    for name, text, seconds in ranks(2, wait_jobs.numpy_and_gpu, joined):
        assert name in ("MismatchError", "AbortedError"), text
        assert "with NumPy arrays" in text and "with arrays on GPUs" in text, text
        assert seconds < 10.0


def test_a_late_rank_is_warned_of(ranks):
    told = ranks(2, wait_jobs.late)
    assert [error for _, error in told] == ["", ""]
    (warning,) = told[0][0]
    assert "for rank 1 in allreduce" in warning and "of communicator world" in warning
    assert told[1][0] == []


@pytest.mark.parametrize("peer_memory", [True, False])
def test_a_job_is_explained_from_outside(ranks, peer_memory):
    said = ranks(2, wait_jobs.seen_from_outside, peer_memory)[1]
    assert any(one.startswith("rank 0 waits for rank 1 in allreduce") for one in said), said
    assert any(one.startswith("rank 1 (process") for one in said), said


@pytest.mark.parametrize("peer_memory", [True, False])
def test_a_time_out_is_recorded(ranks, peer_memory, tmp_path):
    """The record is whole when the ranks have ended: that of rank 1, which was asked, may come last."""
    error, _ = ranks(2, wait_jobs.recorded, str(tmp_path), peer_memory)
    assert "flagcx doctor" in error, error
    (path,) = tmp_path.glob("*.json")
    said = account(path).sentences
    assert any("rank 0 waits for rank 1 in allreduce" in one for one in said), said
    assert any(one.startswith("rank 1 stands at") and "time.sleep" in one for one in said), said


def test_graphs_of_one_rank_are_no_mismatch(ranks):
    assert ranks(2, wait_jobs.captured_on_one_rank) == ["", ""]


def test_what_noting_a_call_costs(ranks):
    """The host's time to enter an operation: well under a microsecond of it is for the last calls."""
    assert max(ranks(2, wait_jobs.cost_of_noting)) < 1e-6
