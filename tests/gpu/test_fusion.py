"""Many arrays in one call, buckets of gradients, and the memory of both, on a GPU."""

from __future__ import annotations

import pytest

from tests.gpu import fusion
from tests.gpu.conftest import SIZES
from tests.gpu.test_behaviour import faults_of


@pytest.mark.parametrize("size", SIZES)
def test_all_dtypes_and_shapes(ranks, size):
    assert faults_of(ranks(size, fusion.lists_and_groups)) == ""


def test_a_list_that_comes_back_is_three_launches(ranks):
    assert faults_of(ranks(2, fusion.launches)) == ""


@pytest.mark.parametrize("size", SIZES[:2])
def test_arrays_that_come_back(ranks, size):
    assert faults_of(ranks(size, fusion.come_back, 90)) == ""


def test_the_caller_captures_a_list(ranks):
    assert faults_of(ranks(2, fusion.captured)) == ""


@pytest.mark.parametrize("size", SIZES[:2])
def test_gradients_in_buckets(ranks, size):
    assert faults_of(ranks(size, fusion.synchronizer, 12)) == ""


def test_ten_thousand_steps_allocate_nothing(ranks):
    assert faults_of(ranks(2, fusion.steady, 10_000)) == ""
