"""Calls beside other users of the GPU: other streams, other threads, and captures of others."""

from __future__ import annotations

from tests.gpu import stranger_jobs
from tests.gpu.test_peer_memory import faults_of


def test_scratch_that_grows_under_another_stream(ranks):
    assert faults_of(ranks(2, stranger_jobs.scratch_under_another_stream)) == ""


def test_default_streams_of_two_threads(ranks):
    assert faults_of(ranks(2, stranger_jobs.default_streams_of_threads, 50)) == ""


def test_calls_while_another_thread_captures(ranks):
    assert faults_of(ranks(2, stranger_jobs.captured_by_another_thread)) == ""


def test_a_graph_that_is_replayed_beside_calls_is_told(ranks):
    for told in ranks(2, stranger_jobs.graph_beside_calls, False):
        assert "two calls of this communicator ran on the GPU at once" in told


def test_a_graph_whose_stream_the_calls_wait_for_is_right(ranks):
    assert ranks(2, stranger_jobs.graph_beside_calls, True) == ["", ""]
