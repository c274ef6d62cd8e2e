"""Values of wrong kinds for the arguments of public calls: each is refused by name, and ends nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms import build
from tests.ranks import run_ranks

WRONG = (True, np.True_, "x", b"a", 1.5, np.float64(1.0), -1, [1], None, object())


def _x():
    return np.ones(4)


def _rows(**given):
    return lambda c: c.allreduce_rmsnorm(np.ones((1, 4), np.float32), **given)


def _started(c):
    return c.allreduce(_x(), async_op=True)


def _ring(size=4):
    return build("allreduce", "ring", size)


# The argument as messages call it; the call; the values out of WRONG that are right.
NUMBER, TIME = [1.5, np.float64(1.0)], [1.5, np.float64(1.0), None]
CALLS = [
    ("root", lambda c, v: c.broadcast(_x(), root=v), []),
    ("root", lambda c, v: c.reduce(_x(), root=v), []),
    ("root", lambda c, v: c.gather(_x(), root=v), []),
    ("root", lambda c, v: c.scatter(_x(), root=v), []),
    ("root", lambda c, v: c.gatherv(_x(), [4], root=v), []),
    ("root", lambda c, v: c.scatterv(_x(), [4], root=v), []),
    ("root", lambda c, v: c.broadcast_object(1, root=v), []),
    ("root", lambda c, v: c.gather_object(1, root=v), []),
    ("root", lambda c, v: c.scatter_object([1], root=v), []),
    ("to", lambda c, v: c.send(_x(), v), []),
    ("source", lambda c, v: c.recv(_x(), v), []),
    ("to", lambda c, v: c.sendrecv(_x(), v, _x(), 0), []),
    ("source", lambda c, v: c.sendrecv(_x(), 0, _x(), v), []),
    ("counts", lambda c, v: c.allgatherv(np.ones(1), v), [[1], None]),
    ("counts", lambda c, v: c.allgatherv(_x(), [v]), []),
    ("counts", lambda c, v: c.reduce_scatterv(_x(), [v]), []),
    ("send_counts", lambda c, v: c.alltoallv(_x(), [v]), []),
    ("receive_counts", lambda c, v: c.alltoallv(_x(), [4], v), [None]),
    ("algorithm", lambda c, v: c.allreduce(_x(), algorithm=v), [None]),
    ("algorithm", lambda c, v: c.broadcast(_x(), algorithm=v), [None]),
    ("compression", lambda c, v: c.allreduce(_x(), compression=v), [None]),
    ("stream", lambda c, v: c.allreduce(_x(), stream=v), [None]),
    ("op", lambda c, v: c.allreduce(_x(), op=v), []),
    ("out", lambda c, v: c.allreduce(_x(), out=v), [None]),
    ("x", lambda c, v: c.allgather(v), []),
    ("shape", lambda c, v: c.empty(v), [[1]]),
    ("device", lambda c, v: c.empty(4, device=v), []),
    ("color", lambda c, v: c.split(v), [True, np.True_, None]),
    ("key", lambda c, v: c.split(0, v), [-1, None]),
    ("collective", lambda c, v: c.explain(v, 4), []),
    ("nbytes", lambda c, v: c.explain("allreduce", v), []),
    ("eps", lambda c, v: _rows(eps=v)(c), NUMBER),
    ("weight", lambda c, v: _rows(weight=v)(c), [None]),
    ("pieces", lambda c, v: c.allreduce_then(np.ones((1, 4), np.float32), v), [[1]]),
    ("timeout_s", lambda c, v: _started(c).wait(v), TIME),
    ("timeout_s", lambda c, v: fc.init(timeout_s=v), NUMBER),
    ("init_timeout_s", lambda c, v: fc.init(init_timeout_s=v), NUMBER),
    ("slot_nbytes", lambda c, v: fc.init(slot_nbytes=v), []),
    ("profile", lambda c, v: fc.init(profile=v), [True, np.True_, np.float64(1.0)]),
    ("enable_topology_detection", lambda c, v: fc.init(enable_topology_detection=v), [True]),
    ("transport", lambda c, v: fc.init(transport=v), ["x"]),
    ("rank", lambda c, v: fc.init(rank=v, size=1), []),
    ("size", lambda c, v: fc.init(rank=0, size=v), []),
    ("address", lambda c, v: fc.init(rank=0, size=1, address=v), [None]),
    ("key", lambda c, v: fc.init(rank=0, size=1, key=v), []),
    ("ranks", lambda c, v: fc.launch(int, ranks=v, threads=True), []),
    ("timeout_s", lambda c, v: fc.launch(int, ranks=1, threads=True, timeout_s=v), TIME),
    ("factor", lambda c, v: fc.scaled_sum(v), [*NUMBER, -1]),
    ("nbytes", lambda c, v: fc.simulate(_ring(), "dgx-a100", v), []),
    ("name", lambda c, v: fc.register(v, "allreduce", _ring), ["x"]),
    ("collective", lambda c, v: fc.register("x", v, _ring), []),
    ("build", lambda c, v: fc.register("x", "allreduce", v), []),
    ("model_bytes", lambda c, v: fc.advise(v), NUMBER),
    ("ranks", lambda c, v: fc.advise(1 << 20, ranks=v), [None]),
    ("comm", lambda c, v: fc.GradientSynchronizer(v, {"a": _x()}), []),
    ("gradient", lambda c, v: fc.GradientSynchronizer(c, v), []),
    ("bucket_bytes", lambda c, v: fc.GradientSynchronizer(c, {"a": _x()}, bucket_bytes=v), TIME),
    ("momentum", lambda c, v: fc.compression.Feedback("topk", momentum=v), []),
    ("clip", lambda c, v: fc.compression.Feedback("topk", clip=v), TIME),
]


@pytest.fixture(scope="module")
def comm():
    with fc.init() as made:
        yield made


@pytest.mark.filterwarnings("ignore:init")
@pytest.mark.parametrize(
    ("name", "call", "right"), CALLS, ids=[f"{number} {name}" for number, (name, *_) in enumerate(CALLS)]
)
def test_a_value_of_a_wrong_kind_is_refused_by_name(comm, name, call, right):
    for value in WRONG:
        if any(value is one or (type(value) is type(one) and value == one) for one in right):
            continue
        with pytest.raises(fc.ArgumentError) as failure:
            call(comm, value)
        assert name in str(failure.value), failure.value
        assert not comm.closed
    comm.barrier()


def test_a_wrong_color_on_one_rank_is_told_on_all_and_ends_nothing():
    def job():
        with fc.init() as comm:
            for color, key in (("x", None), (1.5, None), (-32766, None), (0, "x"), (0, True)):
                with pytest.raises(
                    fc.ArgumentError, match=r"rank 1 called split\(color=.* expected integers"
                ):
                    comm.split(color, key) if comm.rank == 1 else comm.split(0)
            part = comm.split(np.int64(comm.rank // 2), key=-comm.rank)
            return part.rank, part.size, comm.split(comm.rank == 0).size

    assert run_ranks(job, 3) == [(1, 2, 1), (0, 2, 2), (0, 1, 2)]


def test_a_rank_that_refuses_its_array_is_named_to_those_that_wait_for_it(tmp_path):
    told = tmp_path / "told"

    def job():
        comm = fc.init(timeout_s=0.5)
        comm.barrier()
        if comm.rank:
            frozen = np.broadcast_to(np.ones(1), 4)
            with pytest.raises(fc.ArrayError, match="read-only"):
                comm.allreduce(frozen)
            while not told.exists():
                time.sleep(0.01)
            return ""
        with pytest.raises(fc.PeerTimeoutError) as failure:
            comm.allreduce(_x())
        told.touch()
        return str(failure.value)

    assert (
        "rank 1 itself waits for no rank: it has refused its call (ArrayError: x is read-only and would"
        in (run_ranks(job, 2)[0])
    )


def test_equal_counts_are_asked_for_what_a_rank_sends_itself(comm):
    with pytest.raises(fc.ArgumentError, match=r"send_counts\[0\] is 4 and receive_counts\[0\] is 3"):
        comm.alltoallv(_x(), [4], [3])
