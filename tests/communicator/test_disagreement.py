"""Ranks that make different calls: somebody is told, whatever the calls are, however small the messages."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.errors import FlagcxError
from tests.communicator.jobs import job
from tests.ranks import run_ranks

LARGE = 1 << 18


def of(rank: int, count: int = 8) -> np.ndarray:
    return np.ones(count, np.float32 if rank else np.int32)


def list_of(many: int, *last: int) -> list[np.ndarray]:
    return [np.ones(2) for _ in range(many)] + [np.ones(count) for count in last]


def grouped(comm) -> None:
    with comm.group():
        comm.allreduce(np.ones(3))
        comm.allreduce(np.ones(4))


CALLS = {
    "count of an allreduce": lambda c, r: c.allreduce(np.ones(8 + r)),
    "dtype of an allreduce": lambda c, r: c.allreduce(of(r)),
    "op of an allreduce": lambda c, r: c.allreduce(np.ones(LARGE), "avg" if r else "sum"),
    "algorithm of an allreduce": lambda c, r: c.allreduce(np.ones(10), algorithm="ring" if r else "tree"),
    "root of a broadcast": lambda c, r: c.broadcast(np.full(8, r), root=r),
    "root of a large broadcast": lambda c, r: c.broadcast(np.full(LARGE, r), root=r),
    "count of a broadcast": lambda c, r: c.broadcast(np.ones(8 + r)),
    "dtype of a broadcast": lambda c, r: c.broadcast(of(r)),
    "dtype of a large broadcast": lambda c, r: c.broadcast(of(r, LARGE)),
    "count of an allgather": lambda c, r: c.allgather(np.ones(8 + r)),
    "dtype of an allgather": lambda c, r: c.allgather(of(r)),
    "dtype of an alltoall": lambda c, r: c.alltoall(of(r)),
    "op of a reduce_scatter": lambda c, r: c.reduce_scatter(np.ones(8), op="max" if r else "sum"),
    "dtype of a reduce_scatter": lambda c, r: c.reduce_scatter(of(r)),
    "root of a reduce": lambda c, r: c.reduce(np.ones(8), root=r),
    "op of a reduce": lambda c, r: c.reduce(np.ones(8), op="max" if r else "sum"),
    "dtype of a gather": lambda c, r: c.gather(of(r)),
    "dtype of a scatter": lambda c, r: c.scatter(of(r), out=of(r, 4)),
    "barrier and allreduce": lambda c, r: c.barrier() if r else c.allreduce(np.ones(3)),
    "reduce and allreduce": lambda c, r: c.reduce(np.ones(3)) if r else c.allreduce(np.ones(3)),
    "allgather and alltoall": lambda c, r: c.allgather(np.ones(4)) if r else c.alltoall(np.ones(8)),
    "split and allreduce": lambda c, r: c.split(color=1) if r else c.allreduce(np.ones(3)),
    "object and array": lambda c, r: c.broadcast_object(3) if r else c.broadcast(np.ones(3)),
    "dtype of a message": lambda c, r: c.send(of(r), 0) if r else c.recv(of(r), 1),
    "message that nobody takes": lambda c, r: c.send(np.ones(3), 0) if r else None,
    "group and one by one": lambda c, r: grouped(c) if r else c.allreduce(np.ones(3)),
    "shapes in a list": lambda c, r: c.allreduce([np.ones(3 + 2 * r), np.ones(5 - 2 * r)]),
    "shapes in a long list": lambda c, r: c.allreduce(list_of(98, *((3, 5) if r else (5, 3)))),
    "compression and none": lambda c, r: c.allreduce(of(1, LARGE), compression="int8" if r else None),
    "codecs of the same bytes": lambda c, r: c.allreduce(of(1, 10), compression="fp16" if r else "bf16"),
    "large codecs of the same bytes": lambda c, r: c.allreduce(
        of(1, LARGE), compression="fp8" if r else "int8"
    ),
}


def _disagree() -> dict[str, str]:
    """What each case ends with on this rank; what no call shows, close must."""
    world = fc.init(timeout_s=10.0)
    ends = {}
    for name, call in CALLS.items():
        comm = world.split(0)
        ends[name] = end_of(lambda: call(comm, comm.rank))  # noqa: B023
        world.barrier()
        end = end_of(comm.close)
        ends[name] = end if ends[name] == "nothing" else ends[name]
    return ends


def end_of(call) -> str:
    try:
        call()
    except FlagcxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def ends() -> list[dict[str, str]]:
    return run_ranks(_disagree, 2)


@pytest.mark.parametrize("name", CALLS)
def test_somebody_is_told_and_nobody_takes_it_for_right(ends, name):
    here = [rank[name] for rank in ends]
    assert any(end.startswith("MismatchError: rank") for end in here), here
    for end in here:
        assert end.startswith(("MismatchError: rank", "AbortedError", "PeerDiedError", "nothing")), here


def test_a_mistake_that_shows_at_the_end_alone_ends_the_job_with_an_error():
    body = """
comm = fc.init()
got = comm.broadcast(np.full(8, comm.rank), root=comm.rank)
tell("done", got[0])
"""
    with job(2, body) as processes:
        codes = [process.wait(timeout=30) for process in processes]
        texts = [process.stdout.read() for process in processes]
    assert 1 in codes, texts
    shown = texts[codes.index(1)]
    assert "MismatchError: ranks disagree on call 0: rank" in shown and "Traceback" not in shown


def test_a_mistake_does_not_reach_the_next_call():
    """What is left of it is not taken for the data of a call that is right."""
    assert run_ranks(_mistaken, 2) == ["MismatchError"] * 2


def _mistaken() -> str:
    comm = fc.init(timeout_s=10.0)
    comm.broadcast(np.full(4, 100 + comm.rank), root=comm.rank)
    return end_of(lambda: comm.allgather(np.full(4, comm.rank))).split(":")[0]


@pytest.mark.parametrize("size", [2, 3])
def test_what_a_mistake_left_is_not_taken_for_the_data_of_the_same_call_later(size):
    for wrong, end in run_ranks(_mistaken_once, size):
        assert wrong == 0 and end.startswith(("MismatchError: ranks disagree on call 1", "AbortedError")), end


def _mistaken_once() -> tuple[int, str]:
    """Wrong elements in broadcasts from rank 0 after one with another root, and what ends them."""
    comm, wrong = fc.init(timeout_s=10.0), 0
    comm.broadcast(np.zeros(8), 0)
    comm.broadcast(np.full(8, 100.0), 0 if comm.rank == 0 else 1)

    def broadcasts() -> None:
        nonlocal wrong
        for i in range(1000):
            x = np.full(8, float(i if comm.rank == 0 else -1))
            comm.broadcast(x, 0)
            wrong += int((x != i).sum())

    return wrong, end_of(broadcasts)
