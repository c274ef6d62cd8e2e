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
