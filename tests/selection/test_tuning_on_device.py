"""The tuner on GPUs, with NumPy arrays in shared memory in place of them: what it measures, and how."""

from __future__ import annotations

import weakref
from collections import Counter
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms import build
from flagcx.algorithms.candidate import Candidate
from flagcx.dtypes import dtype_of
from flagcx.selection.table import Fit, Table
from flagcx.selection.tuning import Clock, TimeBudget, measure_point, tune
from flagcx.selection.tuning_on_device import DeviceBench
from flagcx.transport.base import Call
from flagcx.transport.nccl.plans import SchedulePlan
from tests.ranks import run_ranks


class FakeGraph:
    """What was enqueued between ``begin_capture`` and ``end_capture``."""

    def __init__(self, device, calls) -> None:
        self.device, self.calls = device, calls
        device.graphs.add(self)

    def launch(self, stream=None) -> None:
        assert stream.non_blocking and stream is not self.device.capturing
        self.device.log.append(("launch", self.calls[0][0], len(self.calls)))
        self.device.launched(self.calls)


class FakeStream:
    """A stream that can be captured if it was made for it."""

    def __init__(self, device, non_blocking=False) -> None:
        self.device, self.non_blocking = device, non_blocking

    def __enter__(self):
        self.device.current.append(self)
        return self

    def __exit__(self, *_) -> None:
        self.device.current.pop()

    def begin_capture(self, mode=None) -> None:
        assert self.non_blocking and self.device.capturing is None
        self.device.capturing, self.device.captured = self, []

    def end_capture(self) -> FakeGraph:
        calls, self.device.captured, self.device.capturing = self.device.captured, None, None
        self.device.log.append(("capture", calls[0][0] if calls else "", len(calls)))
        return FakeGraph(self.device, calls)

    def synchronize(self) -> None:
        assert self.device.capturing is None
        self.device.wait(self.device.now_us())


class FakeDevice:
    """As much of CuPy as the tuner uses, with NumPy's arrays. What is enqueued is done at once.

    Attributes:
        log: What happened: (what, name of the plan, calls).
        graphs: Those that are still there.
    """

    def __init__(self) -> None:
        self.current, self.capturing, self.captured = [FakeStream(self)], None, None
        self.log: list[tuple[str, str, int]] = []
        self.graphs: weakref.WeakSet = weakref.WeakSet()
        device = self

        class Event:
            def record(self, stream) -> None:
                assert stream is device.current[-1]
                self.at_us = device.now_us()

            def synchronize(self) -> None:
                device.wait(self.at_us)

        self.cupy = SimpleNamespace(zeros=np.zeros, cuda=SimpleNamespace())
        self.cupy.cuda.Event = Event
        self.cupy.cuda.Stream = lambda non_blocking: FakeStream(self, non_blocking)
        self.cupy.cuda.get_elapsed_time = lambda start, end: (end.at_us - start.at_us) / 1e3

    def enqueue(self, name, work) -> None:
        """Enqueues ``work`` of a plan on the current stream, or puts it into the graph that is captured."""
        assert self.current[-1].non_blocking, "what is measured runs on a stream of its own"
        assert (self.capturing is None) or self.current[-1] is self.capturing
        if self.capturing is not None:
            self.captured.append((name, work))
            return
        self.log.append(("run", name, 1))
        self.started([(name, work)])

    def now_us(self) -> float:
        return perf_counter() * 1e6

    def wait(self, until_us) -> None:
        """The host waits until then."""

    def started(self, calls) -> None:
        """Calls are enqueued one by one."""
        for _, work in calls:
            work()

    launched = started


class FakeTransport:
    """Carries NumPy arrays through shared memory, and notes what it compiled and how often it ran."""

    nccl_version = 22809

    def __init__(self, host, device) -> None:
        self._host, self.rank, self.size, self._device = host, host.rank, host.size, device
        self.runs: dict[tuple[str, str], int] = {}

    def protocols(self, collective, algorithm, nbytes, dtype, op):
        assert dtype.name == "float32"
        assert (op is None) == (collective not in ("allreduce", "reduce", "reduce_scatter"))
        if collective != "allreduce" or nbytes > 4096:
            return frozenset()
        return frozenset({"peer_memory"} if algorithm == "two_shot" else {"peer_memory", "peer_packets"})

    def compile(self, call: Call):
        key = (str(call.schedule.algorithm), call.protocol)
        schedule = call.schedule
        if key[0] == "native":
            name = "one_shot" if schedule.collective == "allreduce" else "direct"
            schedule = build(schedule.collective, name, self.size, schedule.root)
        own = Call(schedule, call.rank, call.counts, call.dtype, call.op, call.in_place)
        plan = self._host.compile(own)
        self.runs[key] = 0

        def run(given, result):
            def work():
                self.runs[key] += 1
                plan.run(given, result)

            self._device.enqueue("/".join(key), work)

        return SimpleNamespace(run=run)


def _bench(order=None):
    comm = fc.init(tuning=False)
    device = FakeDevice()
    transport = FakeTransport(comm._host.transport, device)
    return device, transport, DeviceBench(transport, device.cupy, Clock(comm._host.transport), order)


def _names(bench, collective, nbytes):
    return {str(c) for c in bench.candidates(collective, nbytes)}


def _candidates():
    _, _, bench = _bench()
    small, large = _names(bench, "allreduce", 4096), _names(bench, "allreduce", 1 << 30)
    return small, large, _names(bench, "broadcast", 16 << 20)


def test_what_is_measured():
    small, large, broadcast = run_ranks(_candidates, 2)[0]
    assert {"native", "one_shot", "one_shot (peer_memory)", "two_shot (peer_memory)", "ring"} <= small
    assert "one_shot (peer_packets)" in small and "two_shot (peer_packets)" not in small
    assert not any("hierarchical" in name or "ring (" in name or "pieces" in name for name in small)
    assert "one_shot" not in large, "its scratch would have every rank's message"
    assert {"native", "two_shot", "tree in pieces of 4,194,304 B"} <= large
    assert "ring in pieces of 4,194,304 B" not in large
    assert {"native", "direct", "chain", "chain in pieces of 4,194,304 B"} <= broadcast


def _tune():
    device, transport, bench = _bench()
    pace = TimeBudget(2e-4, 2, near=1e9)
    table = tune(bench, Fit({}, bench.size, "nccl", {}, {}), ("allreduce", "gather"), [1024, 65536], pace)
    return table.to_json(), transport.runs, device.log, len(device.graphs)


def test_tuning_gives_the_same_table_on_every_rank():
    (text, runs, log, left), (same, others, their_log, their_left) = run_ranks(_tune, 2)
    assert text == same
    assert runs == others, "all ranks make the same calls"
    assert log == their_log, "in the same order, and capture the same"
    assert left == their_left == 0
    table = Table.from_json(text)
    assert [p.nbytes for p in table.measured["allreduce"]] == [1024, 65536]
    assert [p.nbytes for p in table.measured["gather"]] == [512, 32768], "bytes of a block"
    first, second = (point.times_us for point in table.measured["allreduce"])
    assert Candidate("one_shot", 1, "peer_memory") in first
    assert Candidate("one_shot", 1, "peer_memory") not in second
    assert Candidate("native") in second
    assert min(runs.values()) >= 6, "calls until a plan is warm do not count"


def _along():
    device, transport, bench = _bench((0, 2, 1, 3))
    for algorithm in ("native", "ring", "tree", "one_shot"):
        measured = bench.measurement("allreduce", 4 * 1003)
        plan = measured.plan(Candidate(algorithm).at(4 * 1003))
        measured.sendbuf[:] = np.arange(1003) + 10_000 * transport.rank
        with device.cupy.cuda.Stream(non_blocking=True):
            plan.run(measured.sendbuf, measured.recvbuf)
        if not (measured.recvbuf == 4 * np.arange(1003) + 60_000).all():
            return algorithm
    return ""


def test_schedules_are_laid_along_the_planned_order():
    assert run_ranks(_along, 4) == [""] * 4


def _slowest():
    comm = fc.init(tuning=False)
    return Clock(comm._host.transport).slowest(1.0 + comm.rank)


def test_a_batch_counts_with_its_slowest_rank():
    assert run_ranks(_slowest, 3) == [3.0] * 3


@pytest.mark.parametrize("version", [22300, 22809])
def test_nccls_own_is_measured_where_it_serves(version):
    transport = SimpleNamespace(
        size=4, rank=0, nccl_version=version, protocols=lambda *call: frozenset(), dtype=dtype_of("float32")
    )
    bench = DeviceBench(transport, FakeDevice().cupy, None)
    assert Candidate("native") in bench.candidates("reduce_scatter", 1024)
    assert Candidate("native") in bench.candidates("alltoall", 1024)


# -- what the host needs, and what the GPU needs --------------------------------------------------


class TimedDevice(FakeDevice):
    """A device and its host in time that is made up: the host enqueues, and the GPU follows.

    Attributes:
        host_us: Time of the host to enqueue a call, by the plan's name; 6 for the others.
        gpu_us: Time of the GPU for a call, by the plan's name; 20 for the others.
        delays_us: Added to the first runs, one each.
    """

    LAUNCH_US = 8.0

    def __init__(self, gpu_us, host_us=None) -> None:
        super().__init__()
        self.gpu_us, self.host_us = gpu_us, host_us or {}
        self.delays_us: list[float] = []
        self._host_us = self._gpu_us = 0.0

    def now_us(self) -> float:
        return max(self._host_us, self._gpu_us)

    def wait(self, until_us) -> None:
        self._host_us = max(self._host_us, until_us)

    def started(self, calls) -> None:
        ((name, _),) = calls
        self._go(self.host_us.get(name, 6.0), calls)
        self._gpu_us += self.delays_us.pop(0) if self.delays_us else 0.0

    def launched(self, calls) -> None:
        self._go(self.LAUNCH_US, calls)

    def _go(self, host_us, calls) -> None:
        self._host_us += host_us
        self._gpu_us = self.now_us() + sum(self.gpu_us.get(name, 20.0) for name, _ in calls)

    def calls(self, what, name) -> list[int]:
        """How many calls each event of a kind had."""
        return [count for kind, plan, count in self.log if (kind, plan) == (what, name)]


class TimedPlan:
    """A plan on a device."""

    def __init__(self, device, name) -> None:
        self.device, self.name = device, name

    def run(self, given, result) -> None:
        self.device.enqueue(self.name, None)


def _timed_bench(device, size=2, plan=TimedPlan):
    def protocols(collective, algorithm, nbytes, dtype, op):
        return frozenset({"peer_packets"} if nbytes <= 65536 else ())

    def compile_call(call):
        return plan(device, str(call.schedule.algorithm) + ("/" + call.protocol if call.protocol else ""))

    transport = SimpleNamespace(
        rank=0, size=size, nccl_version=22809, protocols=protocols, compile=compile_call
    )
    clock = SimpleNamespace(barrier=lambda: None, slowest=lambda seconds: seconds)
    return DeviceBench(transport, device.cupy, clock)


ONE, TWO = Candidate("one_shot", 1, "peer_packets"), Candidate("two_shot", 1, "peer_packets")
PACE = TimeBudget(batch_s=0.003, rounds=4, near=1.4)


def test_what_the_gpu_needs_decides_and_not_what_the_host_needs():
    # Enqueued one by one, the slower kernel looks better: its host is.
    device = TimedDevice(
        {"one_shot/peer_packets": 3.0, "two_shot/peer_packets": 4.4},
        {"one_shot/peer_packets": 6.3, "two_shot/peer_packets": 6.0},
    )
    point = measure_point(_timed_bench(device), "allreduce", 1024, PACE)
    assert point.times_us[ONE] == pytest.approx(3.0, rel=0.01)
    assert point.times_us[TWO] == pytest.approx(4.4, rel=0.01)
    table = Table(Fit({}, 2, "nccl", {}, {}), {"allreduce": (point,)})
    assert table.rank("allreduce", 1024, lambda candidate: True)[0][0] == ONE
    (calls,) = device.calls("capture", "one_shot/peer_packets")
    assert 100 <= 3.0 * calls <= 400, "a graph outlasts its launch"


def test_a_plan_is_warm_before_it_is_captured():
    device = TimedDevice({})
    measure_point(_timed_bench(device), "allreduce", 1024, PACE)
    captured = [i for i, (what, *_) in enumerate(device.log) if what == "capture"]
    names = [device.log[i][1] for i in captured]
    assert {"native", "one_shot", "one_shot/peer_packets"} <= set(names)
    assert set(Counter(names).values()) == {1}, "once is enough"
    for i, name in zip(captured, names, strict=True):
        assert device.log[:i].count(("run", name, 1)) >= 4
        assert not device.calls("launch", name) or device.log.index(("launch", *device.log[i][1:])) > i


def test_a_long_call_is_not_captured():
    device = TimedDevice({"native": 150.0, "ring": 250.0})
    point = measure_point(_timed_bench(device), "allreduce", 1024, TimeBudget(0.003, 4, near=1e9))
    assert device.calls("capture", "native") and not device.calls("capture", "ring")
    assert point.times_us[Candidate("native")] == pytest.approx(150.0, rel=0.03)
    assert point.times_us[Candidate("ring")] == pytest.approx(250.0, rel=0.03)


def test_what_passes_before_the_gpu_begins_is_not_timed():
    device = TimedDevice({"native": 4.0})
    measured = _timed_bench(device).measurement("allreduce", 1024)
    plan = measured.plan(Candidate("native").at(1024))
    assert measured.seconds(plan, 1, 1) == pytest.approx(4e-6, rel=1e-6), "one launch takes the host 8 us"


def test_a_call_of_no_time_has_one():
    device = TimedDevice({"native": 0.0}, {"native": 0.0})
    device.LAUNCH_US = 0.0
    point = measure_point(_timed_bench(device), "allreduce", 1024, PACE)
    assert 0 < point.times_us[Candidate("native")] < 0.1, "tables hold no other"


def test_a_disturbed_call_does_not_pass_for_a_long_one():
    device = TimedDevice({"native": 4.0})
    device.delays_us = [50_000.0] * 4 + [700.0]  # The first ones compile kernels and connect.
    measured = _timed_bench(device).measurement("allreduce", 1024)
    ((first, *_),) = measured.time_all([Candidate("native").at(1024)], PACE)
    assert first == pytest.approx(4e-6, rel=0.01)
    assert device.log[4] == ("run", "native", 1) and not device.delays_us, "the first that was timed"


@pytest.mark.parametrize(("nbytes", "most"), [(1024, 4), (1 << 20, 4), (2 << 20, 2), (4 << 20, 0)])
def test_graphs_of_schedules_keep_little_scratch(nbytes, most):
    device = TimedDevice({"native": 20.0})
    point = measure_point(_timed_bench(device), "allreduce", nbytes, PACE)
    assert max(device.calls("capture", "one_shot"), default=0) == most
    assert max(device.calls("capture", "native")) > 4, "which needs none"
    assert point.times_us[Candidate("one_shot")] == pytest.approx(20.0, rel=0.2)


def test_graphs_go_before_the_plans_that_they_run():
    device, gone = TimedDevice({"native": 4.0, "ring": 100.0}), []

    class Plan(TimedPlan):
        def __init__(self, device, name) -> None:
            super().__init__(device, name)
            weakref.finalize(self, gone.append, ("plan", name))

    made, original = [], FakeStream.end_capture

    def end_capture(stream):
        graph = original(stream)
        made.append(graph.calls[0][0])
        weakref.finalize(graph, gone.append, ("graph", made[-1]))
        return graph

    bench = _timed_bench(device, plan=Plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeStream, "end_capture", end_capture)
        measure_point(bench, "allreduce", 1024, PACE)
    assert not device.graphs and {"native", "ring", "one_shot/peer_packets"} <= set(made)
    for name in made:
        assert gone.index(("graph", name)) < gone.index(("plan", name))


def test_no_graph_outlives_an_error():
    device = TimedDevice({"native": 4.0})
    measured = _timed_bench(device).measurement("allreduce", 1024)

    def fail(seconds):
        if device.calls("launch", "native"):
            raise KeyboardInterrupt
        return seconds

    measured._clock.slowest = fail
    with pytest.raises(KeyboardInterrupt) as info:
        measured.time_all([Candidate("native").at(1024)], PACE)
    assert info.tb is not None and device.calls("capture", "native"), "whose frames hold the plan"
    assert not device.graphs


def test_a_capture_that_fails_is_ended_and_its_error_told():
    device = TimedDevice({"native": 4.0})

    class Plan(TimedPlan):
        def run(self, given, result) -> None:
            if device.capturing is not None:
                raise fc.OperationError("cannot be captured")
            super().run(given, result)

    measured = _timed_bench(device, plan=Plan).measurement("allreduce", 1024)
    with pytest.raises(fc.OperationError, match="cannot be captured"):
        measured.time_all([Candidate("native").at(1024)], PACE)
    assert device.capturing is None and len(device.current) == 1


def test_a_captured_schedule_gives_its_own_graphs_back():
    device, closed = TimedDevice({}), []

    class Plan(SchedulePlan):
        def __init__(self, device, name) -> None:
            self.name = name

        def run(self, given, result) -> None:
            device.enqueue(self.name, None)

        def close(self) -> None:
            closed.append(self.name)

    measure_point(_timed_bench(device, plan=Plan), "allreduce", 1024, PACE)
    assert {"ring", "one_shot", "two_shot"} <= set(closed)
