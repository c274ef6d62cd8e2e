"""All-reduces beside a computation leave room on the GPU; with a stand-in for CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.algorithms.candidate import Candidate
from flagcx.dtypes import OPS, dtype_of
from flagcx.executor.device import DeviceExecutor
from flagcx.executor.host import Executor
from flagcx.gradients.buckets import plan_beside
from flagcx.profiler import OperationInfo, RecordBuffer, RecordedPlan
from flagcx.transport.base import Call
from flagcx.transport.device import DeviceIdentity
from flagcx.transport.nccl.transport import NcclTransport
from flagcx.transport.peer_memory import resource
from tests.transport.test_peer_memory import GPUS, Memory, joined, on_each, stores  # noqa: F401

SINGLE = dtype_of(np.float32)
COUNTED = SimpleNamespace(sequence=0, waited_ns=0, background=False)


def _call(algorithm: str, protocol: str, count: int) -> Call:
    schedule = Candidate.parse(algorithm).build("allreduce", 2)
    return Call(schedule, 0, count, SINGLE, OPS["avg"], True, protocol)


@pytest.fixture
def peers(stores, monkeypatch):  # noqa: F811
    """Rank 0's use of the memory of two ranks that share a GPU."""
    monkeypatch.setattr(resource, "load_kernel", lambda *_: SimpleNamespace(ptr=1))
    gpu = GPUS[:1]
    ranks = [DeviceIdentity("h", 100 + rank, 0, gpu[0], 23007) for rank in range(2)]
    both = [join[0] for join in joined(stores, Memory(), ranks, visible=(gpu, gpu))]
    yield both[0]
    on_each(lambda rank: both[rank].close())


@pytest.mark.parametrize(
    ("algorithm", "protocol", "count"),
    [("two_shot", "peer_memory", 1 << 26), ("one_shot", "peer_packets", 1 << 20)],
)
def test_a_large_call_takes_less_than_half_of_the_blocks(peers, algorithm, protocol, count):
    plain = peers.compile(_call(algorithm, protocol, count))
    beside = peers.beside(plain)
    assert plain.grid.blocks > peers.blocks // 2 > beside.grid.blocks >= 8
    for grid in (plain.grid, beside.grid):
        assert grid.blocks * grid.chunk * grid.steps >= grid.part, "all of the message is dealt with"
    assert beside.call == plain.call and beside.args.count == plain.args.count == count
    assert (beside.args.chunk, beside.args.steps) == (beside.grid.chunk, beside.grid.steps)


def test_a_small_call_stays_as_it_is(peers):
    plain = peers.compile(_call("one_shot", "peer_packets", 1000))
    assert peers.beside(plain) is plain


def test_a_bucket_asks_the_transport_for_room(peers):
    plain = peers.compile(_call("two_shot", "peer_memory", 1 << 26))
    other = object()
    for found, wanted in ((plain, peers.beside(plain).grid), (other, None)):
        made = plan_beside(_executor(peers, found), 1 << 26, SINGLE, OPS["avg"])
        assert made is other if wanted is None else made.grid == wanted


def test_a_recorded_plan_gets_room_and_stays_recorded(peers):
    plain = peers.compile(_call("two_shot", "peer_memory", 1 << 26))
    other = SimpleNamespace(run=lambda given, result: None)
    what = OperationInfo("allreduce", 1 << 28, "float32", "two_shot", 1, "", "nccl")
    for found, wanted in ((plain, peers.beside(plain).grid), (other, None)):
        recorded = RecordedPlan(found, what, RecordBuffer(4), COUNTED)
        made = plan_beside(_executor(peers, recorded, RecordBuffer(4)), 1 << 26, SINGLE, OPS["avg"])
        assert isinstance(made, RecordedPlan) and made.operation is what
        assert made is recorded if wanted is None else made.plan.grid == wanted


def test_the_host_needs_no_room(peers):
    plan = object()
    assert Executor.beside(SimpleNamespace(), plan) is plan


def _executor(peers, found, ring=None):
    """An executor for GPUs that finds a plan."""
    transport = SimpleNamespace(peers=peers)
    transport.beside = lambda plan: NcclTransport.beside(transport, plan)
    executor = SimpleNamespace(transport=transport, ring=ring, _progress=COUNTED, find=lambda *_: found)
    executor.beside = lambda plan: DeviceExecutor.beside(executor, plan)
    return executor
