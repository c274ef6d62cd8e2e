"""How NCCL cuts messages among channels, and what a schedule's local work costs in one launch a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.cost.channels import Channels
from flagcx.cost.network import uniform
from flagcx.cost.simulate import Costs, lay
from flagcx.errors import ArgumentError
from flagcx.schedule.derived_traffic import staggered
from flagcx.schedule.traffic import rounds_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PLAIN = Channels(gb_per_s=10.0, start_nbytes=1)


def us_of(schedule, nbytes, costs, bandwidth=1e9):
    return lay(schedule, uniform(schedule.size, 0.0, bandwidth)).time(nbytes, costs).time_us


@pytest.mark.parametrize(
    ("ranks", "nbytes", "expected"),
    [
        (2, 1, 1),
        (2, 64 * KIB, 1),
        (2, 64 * KIB + 1, 2),
        (2, 1 * MIB, 16),
        (2, 256 * MIB, 16),
        (2, 256 * MIB + 1, 32),
        (2, 8 * GIB, 32),
        (3, 8 * MIB, 8),
        (4, 128 * MIB, 8),
        (4, 256 * MIB, 16),
        (4, 512 * MIB, 32),
        (8, 8 * MIB, 4),
        (33, 8 * MIB, 1),
        (33, 64 * MIB, 4),
    ],
)
def test_channels_of_a_message(ranks, nbytes, expected):
    assert PLAIN.count(np.array([nbytes]), ranks).tolist() == [expected]


def test_between_hosts_parts_are_short():
    far = PLAIN.between_hosts()
    assert far.count(np.array([256 * KIB, 1 * MIB, 64 * MIB]), 8).tolist() == [1, 4, 32]
    assert far.gb_per_s == PLAIN.gb_per_s


def test_a_message_takes_what_the_slower_of_link_and_channels_does():
    nbytes = np.array([1e6])
    by_channels = 1e6 / 16 / 10_000
    assert PLAIN.time_us(nbytes, np.array([0.0]), 2) == pytest.approx(by_channels, rel=1e-3)
    assert PLAIN.time_us(nbytes, np.array([50.0]), 2) == pytest.approx(50.0, rel=1e-3)
    half = replace(PLAIN, reach=0.5)
    assert half.time_us(nbytes, np.array([50.0]), 2) == pytest.approx(100.0, rel=1e-3)
    waits = replace(PLAIN, start_nbytes=20_000)
    assert waits.time_us(nbytes, np.array([50.0]), 2) == pytest.approx(52.0)
    alone = np.array([64.0 * KIB])  # in one channel, without a wait
    assert waits.time_us(alone, np.array([0.0]), 2) == pytest.approx(64 * KIB / 10_000)
    short = replace(PLAIN, start_nbytes=10**9)
    assert short.time_us(nbytes, np.array([0.0]), 2) == pytest.approx(2 * by_channels)


def test_messages_to_one_peer_follow_each_other():
    nbytes, wire = np.array([3e6, 1e6, 2e6]), np.zeros(3)
    apart = PLAIN.time_us(nbytes, wire, 2)
    shared = PLAIN.time_us(nbytes, wire, 2, np.array([0, 1, 0]))
    assert shared[0] == pytest.approx(apart[0] + apart[2], rel=1e-3)
    assert shared[1] == pytest.approx(apart[1])
    assert shared[2] == pytest.approx(shared[0], rel=1e-3)


def test_a_ring_of_four_is_bound_by_channels_and_two_shot_by_links():
    """One neighbour at a time has 8 of 32 channels: with 24 MiB messages a ring gets 80 GB/s of 300."""
    costs = Costs(channels=PLAIN)
    block = 24 * MIB
    ring = us_of(build("allreduce", "ring", 4), 4 * block, costs, 300.0)
    assert ring == pytest.approx(6 * block / 80_000, rel=1e-3)
    ports = uniform(4, 0.0, 120.0, ports=True)
    two_shot = lay(build("allreduce", "two_shot", 4), ports).time(4 * block, costs).time_us
    assert two_shot == pytest.approx(2 * 3 * block / 120_000, rel=1e-3)


def test_two_trees_between_two_ranks_share_their_channels():
    """Of two pieces, one goes up one tree while the other comes down the other: both from 0 to 1."""
    pieces = 4
    schedule = build("allreduce", "double_binary_tree", 2, pieces=pieces)
    piece = 1 << 24
    time_us = us_of(schedule, 2 * pieces * piece, Costs(channels=PLAIN))
    alone = piece / 16 / 10_000
    # First and last level have a message each way, those between them two.
    assert time_us == pytest.approx((2 + 2 * (pieces - 1)) * alone, rel=1e-3)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_local_work_of_a_step_is_one_launch(size):
    """In place: a sum of k operands reads k and writes one; what a call in place has, nobody copies."""
    costs = Costs(launch_us=10.0, memory_gb_per_s=1.0)
    nbytes = 840_000
    whole = nbytes / 1000
    one_shot = us_of(build("allreduce", "one_shot", size), nbytes, costs)
    assert one_shot == pytest.approx(10.0 + (size + 1) * whole, rel=1e-4)
    two_shot = us_of(build("allreduce", "two_shot", size), nbytes, costs)
    assert two_shot == pytest.approx(10.0 + (size + 1) * whole / size, rel=1e-4)
    ring = us_of(build("allreduce", "ring", size), nbytes, costs)
    assert ring == pytest.approx((size - 1) * (10.0 + 3 * whole / size), rel=1e-4)


def test_copies_that_a_call_in_place_does_not_need_are_free():
    costs = Costs(launch_us=10.0, memory_gb_per_s=1.0)
    assert us_of(build("allgather", "direct", 4), 1000, costs) == pytest.approx(0.0, abs=1e-3)
    # An alltoall has no form in place: every rank copies its own block.
    assert us_of(build("alltoall", "direct", 4), 1000, costs) == pytest.approx(10.0 + 2 * 1.0, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["tree", "double_binary_tree", "chain"])
def test_pieces_that_follow_each_other_touch_what_the_whole_schedule_does(algorithm):
    one = rounds_of(build("allreduce", algorithm, 5))
    schedule = build("allreduce", algorithm, 5, pieces=3)
    cut, whole = staggered(one, schedule), rounds_of(schedule)
    assert cut is not None
    counts = [
        sum(int(r.kinds[b].touched.sum()) * count for key, count in r.runs for b in key) for r in (cut, whole)
    ]
    assert counts[0] == counts[1] > 0


def test_refusals():
    with pytest.raises(ArgumentError, match="gb_per_s=0; expected a number above 0"):
        Channels(gb_per_s=0)
    with pytest.raises(ArgumentError, match=r"memory_gb_per_s=0\.0; expected a number above 0"):
        Costs(memory_gb_per_s=0.0)
