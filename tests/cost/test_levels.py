"""What is under way at once in the model is what the interpreter of the transports exchanges at once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.cost.network import uniform
from flagcx.cost.simulate import lay
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.schedule.compose import beside
from flagcx.selection.explain import explain
from flagcx.topology import cluster, preset
from flagcx.transport.base import Call
from flagcx.transport.scratch import Scratch
from flagcx.transport.steps import MessageSteps

SIZE = 8
FLOAT = dtype_of("float32")
SCHEDULES = [
    build("allreduce", "hierarchical", SIZE, groups=((0, 1, 2, 3), (4, 5, 6, 7))),
    build("allreduce", "tree", SIZE, pieces=3),
    beside(build("allreduce", "ring", SIZE), build("allreduce", "two_shot", SIZE)),
]


def exchanged(schedule, rank, count):
    """Bytes by peer of each exchange in which a rank sends, with a transport that moves nothing."""
    found = []

    def note(sends, receives):
        found.append(Counter())
        for array, peer in sends:
            found[-1][peer] += array.nbytes

    call = Call(schedule, rank, count, FLOAT, resolve_op("sum", FLOAT), in_place=False)
    MessageSteps(call, Scratch(), note).run(np.zeros(count, np.float32), np.zeros(count, np.float32))
    return [dict(sorted(one.items())) for one in found if one]


def sent(moment, rank):
    """Bytes by peer that a rank sends on a level."""
    mine = moment.source == rank
    total = Counter()
    for peer, nbytes in zip(moment.target[mine].tolist(), moment.nbytes[mine].tolist(), strict=True):
        total[peer] += nbytes
    return dict(sorted(total.items()))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.algorithm)
def test_levels_are_exchanges(schedule):
    """Phases of a hierarchy are one after the other; pieces and split messages are beside each other."""
    count = schedule.chunks * 4
    moments = list(lay(schedule, uniform(SIZE, 1.0, 10.0)).moments(count * 4))
    for rank in range(SIZE):
        assert exchanged(schedule, rank, count) == [one for moment in moments if (one := sent(moment, rank))]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.algorithm)
def test_no_rank_begins_a_step_before_it_has_ended_the_last(schedule):
    ended = np.zeros(SIZE)
    for moment in lay(schedule, uniform(SIZE, 1.0, 10.0)).moments(1 << 20):
        before = ended.copy()
        for rank in range(SIZE):
            mine = (moment.source == rank) | (moment.target == rank)
            if mine.any():
                assert moment.begin_us[mine].min() >= before[rank] - 1e-9
                ended[rank] = moment.end_us[mine].max()


def test_explain_says_that_phases_of_a_hierarchy_follow_each_other():
    words = "phases of hierarchical follow each other on a rank"
    assert words in str(explain("allreduce", 1 << 20, 16, cluster(preset("dgx-a100"), 2)))
    assert words not in str(explain("allreduce", 1 << 20, 3, preset("dgx-a100")))
