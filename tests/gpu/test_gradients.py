"""Gradients on a GPU: the bits of plain calls, buckets beside a computation, and a steady state."""

from __future__ import annotations

import pytest

from tests.gpu import gradient_jobs as jobs
from tests.gpu.conftest import SIZES
from tests.gpu.test_behaviour import faults_of


@pytest.mark.parametrize("size", SIZES[:2])
def test_buckets_end_with_the_bits_of_plain_calls(ranks, size):
    assert faults_of(ranks(size, jobs.same_bits, 4)) == ""


def test_who_leaves_the_loop_early_has_all_results(ranks):
    assert faults_of(ranks(2, jobs.leaves_early)) == ""


def test_steps_that_are_left_in_the_middle_are_followed_by_others(ranks):
    assert faults_of(ranks(2, jobs.abandoned)) == ""


def test_a_synchronizer_goes_on_from_its_state_with_the_same_bits(ranks):
    assert faults_of(ranks(2, jobs.continued)) == ""


def test_a_spoilt_gradient_takes_the_step_back_in_all_buckets(ranks):
    assert faults_of(ranks(2, jobs.spoilt)) == ""


def test_a_bucket_does_not_wait_for_the_computation_behind_it(ranks):
    assert faults_of(ranks(2, jobs.overlaps, 6)) == ""


def test_buckets_are_chosen_by_times_that_the_gpu_takes(ranks):
    assert faults_of(ranks(2, jobs.measured, 256 << 20)) == ""


def test_ten_thousand_steps_of_a_training_allocate_nothing(ranks):
    assert faults_of(ranks(2, jobs.steady, 10_000)) == ""
