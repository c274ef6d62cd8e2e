"""All-reduces of rows with an epilogue, on ranks that share this machine's GPU."""

from __future__ import annotations

import pytest

from tests.gpu import row_jobs
from tests.gpu.row_jobs import EPILOGUES
from tests.gpu.test_peer_memory import faults_of

SIZES = (2, 3, 8)
ALGORITHMS = [None, "one_shot", "two_shot"]


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_length(ranks, size):
    sizes = [(1, 4096), (3, 4095), (5, 1), (257, 72), (2, 16384)]
    assert (
        faults_of(ranks(size, row_jobs.shapes, ["norm"], [("bfloat16", "bfloat16")], sizes, ALGORITHMS)) == ""
    )


@pytest.mark.parametrize("name", EPILOGUES)
def test_every_epilogue(ranks, name):
    kinds, sizes = [("float16", "float32")], [(3, 4096), (60, 1000)]
    assert faults_of(ranks(2, row_jobs.shapes, [name], kinds, sizes, [*ALGORITHMS, "ring", "native"])) == ""


def test_every_dtype(ranks):
    assert faults_of(ranks(2, row_jobs.every_dtype, 2052)) == ""


def test_many_rows(ranks):
    sizes, kinds = [(2048, 4096), (300, 16384)], [("bfloat16", "float32")]
    # As many rows as these take more than one kernel, whatever is named, and the sum is rounded before it.
    assert faults_of(ranks(2, row_jobs.shapes, ["norm"], kinds, sizes, [None, "two_shot", "ring"])) == ""


def test_one_rank(ranks):
    assert faults_of(ranks(1, row_jobs.one_rank)) == ""


def test_a_graph_that_is_replayed(ranks):
    assert faults_of(ranks(2, row_jobs.replayed, 40)) == ""


def test_started_grouped_on_a_stream_and_with_strides(ranks):
    assert faults_of(ranks(2, row_jobs.started_and_grouped)) == ""


def test_few_rows_are_one_kernel(ranks):
    for few, many in ranks(2, row_jobs.chosen, [(8, 4096), (4096, 8192)]):
        assert few == "PeerRows one_shot peer_packets"
        assert many.startswith("AddedRows")


def test_ranks_that_call_different_epilogues(ranks):
    for told in ranks(2, row_jobs.disagreeing):
        assert told.startswith("MismatchError") and "eps=2e-05" in told, told
