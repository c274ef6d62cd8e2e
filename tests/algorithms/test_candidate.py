"""Two algorithms within one operation: their names, their schedules, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms.candidate import Candidate
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import ArgumentError
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Send
from flagcx.schedule.verify import verify
from flagcx.selection.candidates import SPLIT
from flagcx.transport.base import Call
from tests.ranks import run_ranks
from tests.transport.nccl.device_machine import run_all


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ("ring 3/4|two_shot", Candidate("ring", other=Candidate("two_shot"), share=Fraction(3, 4))),
        ("ring|ring", Candidate("ring", other=Candidate("ring"), share=Fraction(1, 2))),
        ("tree 1/16|bruck", Candidate("tree", other=Candidate("bruck"), share=Fraction(1, 16))),
        ("tree", Candidate("tree")),
    ],
)
def test_names(name, candidate):
    assert Candidate.parse(name) == candidate
    assert candidate.label == candidate.name == str(candidate) == name


def test_the_name_says_what_is_special():
    assert Candidate("ring", 4, "slots").name == "ring in 4 pieces (slots)"
    assert Candidate("ring", piece_nbytes=65536).name == "ring in pieces of 65,536 B"
    assert Candidate("ring", 2, other=Candidate("tree"), share=Fraction(1, 2)).name == (
        "ring in 2 pieces (1/2) | tree"
    )
    assert Candidate("ring").along(range(10)).name == "ring along 0,1,2,3,4,5,6,7,..."
    assert Candidate("hierarchical").along(None, ((0, 1), (2, 3))).name == "hierarchical in 2 groups"


def test_the_reason_does_not_count():
    assert Candidate("ring", reason="a") == Candidate(fc.Algorithm.RING, reason="b")
    assert hash(Candidate("ring", reason="a")) == hash(Candidate(fc.Algorithm.RING))


@pytest.mark.parametrize(
    ("nbytes", "pieces"), [(0, 1), (1, 1), (65536, 1), (65537, 2), (1 << 20, 16), (1 << 30, 64)]
)
def test_pieces_follow_from_the_message(nbytes, pieces):
    candidate = Candidate("ring", 1, "slots", piece_nbytes=65536)
    assert candidate.at(nbytes, "because") == Candidate("ring", pieces, "slots")
    assert candidate.at(nbytes, "because").reason == "because"


def test_the_order_and_groups_reach_those_that_follow_them():
    pair = Candidate.parse("ring|two_shot").along((1, 0, 2))
    assert pair.order == (1, 0, 2) and pair.other is not None and pair.other.order is None
    assert Candidate("ring").along(None, ((0,), (1,))).groups is None


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
        Candidate.parse(name)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_every_candidate_is_right(name, size):
    order = tuple(range(0, size, 2)) + tuple(range(1, size, 2))
    for along in (None, order):
        verify(Candidate.parse(name).along(along).build("allreduce", size))


def test_a_ring_beside_itself_goes_both_ways():
    order = (0, 2, 1, 3)
    schedule = Candidate.parse("ring|ring").along(order).build("allreduce", 4)
    steps = schedule.program(2).steps
    peers = {t.peer for step in steps for t in step.transfers if isinstance(t, Send)}
    assert peers == {0, 1}, "both neighbours in the order"


@pytest.mark.parametrize("name", SPLIT)
def test_on_the_steps_of_a_gpu(name):
    size, count, dtype = 4, 1003, dtype_of("int64")
    schedule = levels(Candidate.parse(name).along((0, 2, 1, 3)).build("allreduce", size))
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
