"""Every algorithm, collective, dtype and operation on GPU arrays, against the oracle."""

from __future__ import annotations

import pytest

from tests.gpu import jobs
from tests.gpu.conftest import SIZES


def faults_of(results: list[list[str]]) -> str:
    return "\n".join(fault for faults in results for fault in faults[:20])


@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_of_every_collective(ranks, size):
    counts = [0, 1, size - 1, size + 1, 1003]
    assert faults_of(ranks(size, jobs.algorithms_and_collectives, counts)) == ""


@pytest.mark.parametrize("peer_memory", [True, False])
def test_every_algorithm_averages_without_overflow(ranks, peer_memory):
    assert faults_of(ranks(3, jobs.averages, 341, peer_memory)) == ""


@pytest.mark.parametrize("size", [min(SIZES), max(SIZES)])
def test_direct_algorithms_over_nccl(ranks, size):
    counts = [0, 1, size - 1, size + 1, 1003]
    assert faults_of(ranks(size, jobs.algorithms_and_collectives, counts, False)) == ""


@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_with_every_operation(ranks, size):
    assert faults_of(ranks(size, jobs.dtypes_and_ops, ["one_shot"], [1003])) == ""


def test_the_ring_with_every_dtype_that_sums_exactly(ranks):
    assert faults_of(ranks(3, jobs.dtypes_and_ops, ["ring"], [1, 1003])) == ""


def test_what_ncclss_own_allreduce_knows_is_right_and_the_rest_refused(ranks):
    assert faults_of(ranks(2, jobs.native_dtypes)) == ""


@pytest.mark.parametrize("size", SIZES)
def test_ten_million_elements(ranks, size):
    assert faults_of(ranks(size, jobs.large, 10_000_000)) == ""


def test_the_smallest_numbers_are_not_taken_for_zero(ranks):
    assert faults_of(ranks(2, jobs.subnormals)) == ""
