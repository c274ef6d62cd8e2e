"""Two algorithms within one operation: their names, their schedules, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import flagcx as fc
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import ArgumentError
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Send
from flagcx.schedule.verify import verify
from flagcx.selection.placement import build_along
from flagcx.selection.predicted import MIXES, laid_mix
from flagcx.selection.split_message import Mix, mix_of
from flagcx.transport.base import Call
from tests.ranks import run_ranks
from tests.transport.nccl.device_machine import run_all


@pytest.mark.parametrize(
    "mix",
    [Mix("ring", "two_shot", Fraction(3, 4)), Mix("ring", "ring"), Mix("tree", "bruck", Fraction(1, 16))],
)
def test_names(mix):
    assert mix_of("allreduce", mix.name) == mix


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ring|", "is no mix of two; expected two names such as"),
        ("ring|tree|chain", "is no mix of two"),
        ("ring 5/4|tree", "gives the first 5/4 of the message"),
        ("ring 0/4|tree", "gives the first 0 of the message"),
        ("ring 1/0|tree", "gives the first 1 of the message"),
        ("two_shot|two_shot", "is two_shot twice, which does the same as once; ring and chain alone"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ArgumentError, match=message):
        mix_of("allreduce", name)


def test_a_name_that_the_user_registered_is_no_mix():
    fc.register("ring|mine", "allreduce", lambda size: build_along(None, "allreduce", "ring", size, None, 1))
    try:
        assert mix_of("allreduce", "ring|mine") is None
        assert build_along(None, "allreduce", "ring|mine", 4, None, 1).chunks == 4
    finally:
        fc.unregister("ring|mine", "allreduce")


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_every_candidate_is_right(name, size):
    order = tuple(range(0, size, 2)) + tuple(range(1, size, 2))
    for along in (None, order):
        verify(build_along(along, "allreduce", name, size, None, 1))


def test_a_ring_beside_itself_goes_both_ways():
    order = (0, 2, 1, 3)
    schedule = build_along(order, "allreduce", "ring|ring", 4, None, 1)
    steps = schedule.program(2).steps
    peers = {t.peer for step in steps for t in step.transfers if isinstance(t, Send)}
    assert peers == {0, 1}, "both neighbours in the order"
    laid = laid_mix("allreduce", "ring|ring", 4, order).schedule(4)
    links = {(r, t.peer) for r in range(4) for s in laid.program(r).steps for t in s.transfers}
    mine = {(r, t.peer) for r in range(4) for s in schedule.program(r).steps for t in s.transfers}
    assert links == mine, "what the model times is what runs"


@pytest.mark.parametrize("name", MIXES)
def test_on_the_steps_of_a_gpu(name):
    size, count, dtype = 4, 1003, dtype_of("int64")
    schedule = levels(build_along((0, 2, 1, 3), "allreduce", name, size, None, 1))
    calls = [Call(schedule, rank, count, dtype, OPS["sum"], True) for rank in range(size)]
    data = [np.arange(count) * 7 + 10_000 * rank for rank in range(size)]
    want = sum(data)
    run_all(calls, data, data)
    assert all((array == want).all() for array in data)


def _named():
    comm = fc.init()
    for collective, name in (
        ("allreduce", "ring|double_binary_tree"),
        ("allreduce", "ring 3/4|two_shot"),
        ("allgather", "ring|bruck"),
        ("broadcast", "chain|binomial"),
    ):
        x = np.arange(1003) + 10_000 * comm.rank
        got = getattr(comm, collective)(x, algorithm=name)
        want = {
            "allreduce": 4 * np.arange(1003) + 60_000,
            "allgather": np.arange(1003) + 10_000 * np.arange(4)[:, None],
            "broadcast": np.arange(1003),
        }[collective]
        assert (got == want).all(), name
    with pytest.raises(ArgumentError, match="'telepathy' does not serve allreduce"):
        comm.allreduce(np.ones(4), algorithm="ring|telepathy")
    return comm.profiler.records()[0].operation.algorithm


def test_a_caller_may_name_a_mix():
    assert run_ranks(_named, 4) == ["ring|double_binary_tree"] * 4
