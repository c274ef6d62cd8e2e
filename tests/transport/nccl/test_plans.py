"""When a plan is enqueued, captured and replayed, on fakes of CuPy and NCCL."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flagcx.algorithms import build
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import ArrayError
from flagcx.transport.base import Call
from flagcx.transport.nccl import plans
from flagcx.transport.nccl.plans import CAPTURE_AT, NativePlan, SchedulePlan, Scratch, grouped
from flagcx.transport.nccl.steps import device_program
from flagcx.transport.stream_order import StreamOrder
from tests.transport.test_stream_order import FakeCuda, FakeStream


class CapturingStream(FakeStream):
    """A stream that is told to capture: what is enqueued goes into its graph."""

    def __init__(self, fake: FakeGpu, ptr: int) -> None:
        super().__init__(ptr)
        self.fake = fake

    def __enter__(self) -> None:
        self.before, self.fake.stream = self.fake.stream, self

    def __exit__(self, *_: object) -> None:
        self.fake.stream = self.before

    def begin_capture(self) -> None:
        self.capturing, self.fake.graph = True, []

    def end_capture(self) -> SimpleNamespace:
        self.capturing = False
        graph, self.fake.graph = tuple(self.fake.graph), None
        return SimpleNamespace(launch=lambda stream: self.fake.done.append(("graph", len(graph))))


class FakeGpu(FakeCuda):
    """Notes what is enqueued, or what goes into the graph that is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list = []
        self.graph: list | None = None
        self.next, self.made = 1 << 20, 1000
        self.cuda.Stream = self.stream_made
        self.cuda.alloc = self.allocated

    def stream_made(self, non_blocking: bool, priority: int = 0) -> CapturingStream:
        self.made += 1
        self.streams[self.made] = CapturingStream(self, self.made)
        self.streams[self.made].priority = priority
        return self.streams[self.made]

    def allocated(self, nbytes: int) -> SimpleNamespace:
        self.next += 1 << 24
        return SimpleNamespace(ptr=self.next, mem=SimpleNamespace(size=nbytes))

    def group(self, messages, memories, stream) -> None:
        (self.done if self.graph is None else self.graph).append(("group", memories))


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


def plan_for(gpu: FakeGpu, scratch: Scratch | None = None, count: int = 64) -> SchedulePlan:
    call = Call(build("allreduce", "ring", 4), 1, count, dtype_of("float32"), OPS["sum"], True)
    program = device_program(call)
    steps = [(grouped(step.messages, call.dtype), ()) for step in program.steps]
    order, nbytes = StreamOrder(gpu, 0, 1), program.scratch_count * 4
    memory = scratch or Scratch(gpu)
    return SchedulePlan(call, steps, nbytes, 0, order, gpu, memory, lambda enqueue: enqueue())


def array(at: int) -> SimpleNamespace:
    return SimpleNamespace(data=SimpleNamespace(ptr=at, device_id=0))


def kinds(gpu: FakeGpu) -> list[str]:
    return [kind for kind, _ in gpu.done]


def test_arrays_that_come_back_are_captured_and_then_replayed_with_one_launch(gpu):
    plan, x = plan_for(gpu), array(4096)
    for _ in range(CAPTURE_AT - 1):
        plan.run(x, x)
    assert kinds(gpu) == ["group"] * 6 * (CAPTURE_AT - 1)
    gpu.done.clear()
    for _ in range(5):
        plan.run(x, x)
    assert gpu.done == [("graph", 6)] * 5
    assert plan.graphs == 1


def test_what_is_captured_goes_before_a_computation(gpu):
    assert Scratch(gpu).captures.priority < 0


def test_each_set_of_arrays_has_a_graph_of_its_own(gpu):
    plan = plan_for(gpu)
    for _ in range(CAPTURE_AT + 1):
        for at in (4096, 8192):
            plan.run(array(at), array(at))
    assert plan.graphs == 2
    assert kinds(gpu)[-4:] == ["graph"] * 4


def test_arrays_that_never_come_back_are_not_captured(gpu):
    plan = plan_for(gpu)
    for i in range(500):
        plan.run(array(4096 * (i + 1)), array(4096 * (i + 1)))
    assert plan.graphs == 0
    assert len(plan._seen) <= 256


def test_the_graphs_of_all_plans_together_are_bounded(gpu, monkeypatch):
    monkeypatch.setattr(plans, "_MOST_GRAPHS", 5)
    scratch = Scratch(gpu)
    several = [plan_for(gpu, scratch, count=64 + k) for k in range(3)]
    for at in range(4096, 4096 * 20, 4096):
        for plan in several:
            for _ in range(CAPTURE_AT + 1):
                plan.run(array(at), array(at))
            assert kinds(gpu)[-1] == "graph"
            assert sum(one.graphs for one in several) <= 5
    gpu.done.clear()
    several[0].run(array(4096), array(4096))  # its graph was dropped
    assert kinds(gpu) == ["group"] * 6


def test_graphs_are_forgotten_when_the_scratch_moves(gpu):
    scratch = Scratch(gpu)
    plan, x = plan_for(gpu, scratch), array(4096)
    for _ in range(CAPTURE_AT):
        plan.run(x, x)
    scratch.get(1 << 30)
    gpu.done.clear()
    plan.run(x, x)
    assert plan.graphs == 0
    moved = gpu.done[0][1][2]
    assert moved == scratch.get(0).ptr
    assert kinds(gpu) == ["group"] * 6


def test_scratch_lies_as_far_from_16_bytes_as_the_result(gpu):
    plan = plan_for(gpu)
    plan.run(array(4100), array(4100))
    memories = gpu.done[0][1]
    assert memories[2] % 16 == 4100 % 16


def test_the_callers_capture_gets_scratch_that_nobody_else_uses(gpu):
    scratch = Scratch(gpu)
    plan, x = plan_for(gpu, scratch), array(4096)
    plan.run(x, x)
    shared = gpu.done[0][1][2]
    gpu.streams[100].capturing = True
    gpu.done.clear()
    plan.run(x, x)
    plan.run(x, x)
    used = {memories[2] for _, memories in gpu.done}
    assert len(used) == 2
    assert shared not in used
    assert plan.graphs == 0


def test_a_capture_that_fails_leaves_no_stream_capturing(gpu):
    plan, x = plan_for(gpu), array(4096)
    for _ in range(CAPTURE_AT - 1):
        plan.run(x, x)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    gpu.group = fail
    with pytest.raises(ZeroDivisionError):
        plan.run(x, x)
    assert not any(s.capturing for s in gpu.streams.values())
    assert plan.graphs == 0


def test_a_misaligned_array_is_refused(gpu):
    with pytest.raises(ArrayError, match=r"address 0x1002, and its dtype needs a multiple of 4 bytes"):
        plan_for(gpu).run(array(4098), array(4098))


def test_an_array_on_another_device_is_refused(gpu):
    elsewhere = SimpleNamespace(data=SimpleNamespace(ptr=4096, device_id=1))
    with pytest.raises(ArrayError, match="the array is on device 1, but rank 1 uses device 0"):
        plan_for(gpu).run(elsewhere, elsewhere)


def test_a_fault_of_ncclss_own_collective_goes_through_the_guard(gpu):
    def issue(*_: object) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    call = Call(build("allreduce", "ring", 4), 1, 8, dtype_of("float32"), OPS["sum"], True)
    order = StreamOrder(gpu, 0, 1)
    plan = NativePlan(call, issue, order, lambda error: ValueError(f"told: {error}"))
    with pytest.raises(ValueError, match="told: NCCL_ERROR_SYSTEM_ERROR"):
        plan.run(array(4096), array(4096))
    assert not order.inside
    assert str(order.what) == "allreduce (ring) of 8 float32, sum"
