"""The steps between hosts of a hierarchical all-reduce: owners of stripes end with the sum over all hosts."""

from __future__ import annotations

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.dtypes import OPS
from flagcx.schedule.model import Send
from flagcx.transport.network.crossing import steps_between
from tests.simulated import run

GROUPS = [
    ((0,), (1,)),
    ((0, 1), (2, 3)),
    ((0,), (1, 2, 3)),
    ((2, 0), (1, 3), (5, 4)),
    ((0, 1, 2, 3), (4, 5), (6,)),
    tuple((rank,) for rank in range(11)),
]


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_owners_of_a_stripe_end_with_the_sum_over_hosts(groups, short):
    size, count = sum(map(len, groups)), 23
    whole = build("allreduce", "hierarchical", size, groups=groups)
    between = steps_between(whole, groups, short)
    inputs = [np.arange(count) * (rank + 1) + rank for rank in range(size)]
    found = run(between, inputs, count, OPS["sum"], in_place=True)
    for group in groups:
        owned = np.zeros(count, int)
        for lane, rank in enumerate(group):
            if between.program(rank).steps:
                want = sum(inputs[other[lane]] for other in groups)
                owned += found[rank] == want
            else:
                assert (found[rank] == inputs[rank]).all()
        assert (owned >= 1).all()


def test_two_hosts_exchange_once_and_long_messages_use_every_lane():
    groups = ((0, 1), (2, 3))
    whole = build("allreduce", "hierarchical", 4, groups=groups)
    for short, owners in ((True, [0, 2]), (False, [0, 1, 2, 3])):
        programs = [steps_between(whole, groups, short).program(rank) for rank in range(4)]
        assert [p.rank for p in programs if p.steps] == owners
        for program in programs:
            sends = [t for step in program.steps for t in step.transfers if isinstance(t, Send)]
            assert len(sends) == len(program.steps) == (program.rank in owners)
