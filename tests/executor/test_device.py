"""Which plan a call on a GPU gets, with a fake of the transport."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.peer_memory import GpuLinks
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import ArgumentError, CommunicatorError
from flagcx.executor.device import DeviceExecutor, DeviceWork
from flagcx.executor.work import Work
from flagcx.profiler import RecordBuffer
from flagcx.selection.candidates import Request
from flagcx.selection.device_rules import DeviceRules
from flagcx.selection.selector import Selector, TuningInfo
from flagcx.selection.table import Fit, Point, Table


class FakeTransport:
    """Compiles a call to a plan that notes its runs."""

    name, rank, size, nccl_version, array_class = "nccl", 1, 4, 22809, np.ndarray
    progress = None
    messenger = None

    def __init__(self) -> None:
        self.own_ways: frozenset[tuple[str, str]] = frozenset()
        self.runs: list = []
        self.aborted: list = []
        self.error: BaseException | None = None

    def compile(self, call):
        def run(given, result):
            if self.error is not None:
                raise self.error
            self.runs.append((call.schedule.algorithm, given, result))

        return SimpleNamespace(run=run, schedule=call.schedule, protocol=call.protocol)

    def protocols(self, collective, algorithm, nbytes, dtype, op):
        if collective != "allreduce" or dtype.name not in ("float32", "int32") or op != OPS["sum"]:
            return frozenset()
        return frozenset(protocol for name, protocol in self.own_ways if name == algorithm)

    def submit(self, plan, given, result):
        plan.run(given, result)
        return SimpleNamespace(done=True)

    def follow(self, event) -> None:
        self.runs.append("follow")

    def wait(self, event, timeout_s=None) -> None:
        self.runs.append("wait")

    def abort(self, reason, culprit) -> None:
        self.aborted.append(reason)

    def close(self) -> None:
        pass


@pytest.fixture
def executor() -> DeviceExecutor:
    return DeviceExecutor(FakeTransport())


def algorithm(executor: DeviceExecutor, *what, **options) -> str:
    collective, count, dtype, op = what
    named = None if op is None else OPS[op]
    return str(executor.find(collective, count, dtype_of(dtype), named, **options).schedule.algorithm)


@pytest.mark.parametrize(
    ("what", "chosen"),
    [
        (("allreduce", 10, "float32", "sum"), "native"),
        (("allreduce", 10, "int16", "sum"), "one_shot"),
        (("allreduce", 1 << 20, "int32", "bxor"), "double_binary_tree"),
        (("allreduce", 1 << 22, "int32", "bxor"), "ring"),
        (("alltoall", 10, "float8_e5m2", None), "native"),
        (("reduce_scatter", 10, "complex64", "prod"), "direct"),
    ],
)
def test_nccls_own_is_taken_where_it_serves(executor, what, chosen):
    assert algorithm(executor, *what) == chosen


def test_blocks_of_different_sizes_are_nccls_own_too(executor):
    plan = executor.find("allgather", (1, 2, 3, 4), dtype_of("float32"))
    assert plan.schedule.algorithm == "native"
    plan = executor.find("reduce_scatter", (1, 2, 3, 4), dtype_of("int32"), OPS["bxor"])
    assert plan.schedule.algorithm == "direct"
    with pytest.raises(ArgumentError, match="algorithm='bruck' of alltoall needs blocks of one size"):
        counts = tuple((1, 2, 3, 4) for _ in range(4))
        executor.find("alltoall", counts, dtype_of("float32"), algorithm="bruck")


def test_measured_times_choose_among_nccls_own_schedules_and_protocols(executor):
    shot = Candidate("one_shot", 1, "peer_packets")
    times = {shot: 3.0, Candidate("native"): 5.0, Candidate("two_shot"): 7.0, Candidate("ring"): 8.0}
    table = Table(Fit({}, 4, "nccl", {}, {}), {"allreduce": (Point(4096, times),)})
    executor.selector = Selector(DeviceRules(executor.transport), TuningInfo(table, "measured"))
    plan = executor.find("allreduce", 1024, dtype_of("float32"), OPS["sum"])
    assert (plan.schedule.algorithm, plan.protocol) == ("native", ""), "the transport has no such protocol"
    executor.transport.own_ways = frozenset({("one_shot", "peer_packets")})
    plan = executor.find("allreduce", 1000, dtype_of("float32"), OPS["sum"])
    assert (plan.schedule.algorithm, plan.protocol) == ("one_shot", "peer_packets")
    plan = executor.find("allreduce", 1024, dtype_of("int32"), OPS["bxor"])
    assert (plan.schedule.algorithm, plan.protocol) == ("two_shot", "")


def test_what_ran_is_recorded_as_it_was_chosen(executor):
    executor.ring = RecordBuffer()
    executor.find("allreduce", 1024, dtype_of("float32"), OPS["sum"]).run(None, None)
    executor.find("allreduce", 1024, dtype_of("float32"), OPS["sum"], algorithm="tree").run(None, None)
    assert [r.operation.algorithm for r in executor.ring.records()] == ["native", "tree"]


def test_what_the_caller_names_is_taken(executor):
    assert algorithm(executor, "allreduce", 10, "float32", "sum", algorithm="ring") == "ring"


PEERS = frozenset((name, way) for name in ("one_shot", "two_shot") for way in ("peer_memory", "peer_packets"))


def test_a_named_algorithm_goes_through_the_peers_memory_where_it_can(executor):
    def protocol(count, dtype, op, name):
        plan = executor.find("allreduce", count, dtype_of(dtype), OPS[op], algorithm=name)
        assert plan.schedule.algorithm == name
        return plan.protocol

    assert protocol(1000, "float32", "sum", "two_shot") == "", "the transport has no peers"
    executor.transport.own_ways = PEERS
    assert protocol(1001, "float32", "sum", "one_shot") == "peer_packets"
    assert protocol(1001, "float32", "sum", "two_shot") == "peer_packets"
    assert protocol(1 << 26, "float32", "sum", "two_shot") == "peer_memory"
    assert protocol(1001, "float32", "max", "two_shot") == "", "no kernel of the peers' does this one"
    assert protocol(1001, "float32", "sum", "ring") == ""
    assert protocol(1001, "float32", "sum", "native") == ""


def test_measured_times_choose_the_protocol_of_a_named_algorithm(executor):
    times = {Candidate("two_shot", 1, "peer_memory"): 3.0, Candidate("two_shot", 1, "peer_packets"): 5.0}
    table = Table(Fit({}, 4, "nccl", {}, {}), {"allreduce": (Point(4096, times),)})
    executor.selector = Selector(DeviceRules(executor.transport), TuningInfo(table, "measured"))
    executor.transport.own_ways = PEERS
    plan = executor.find("allreduce", 1024, dtype_of("float32"), OPS["sum"], algorithm="two_shot")
    assert plan.protocol == "peer_memory"
    plan = executor.find("allreduce", 1024, dtype_of("float32"), OPS["sum"], algorithm="one_shot")
    assert plan.protocol == "peer_packets", "nothing was measured of it, so the model says"


def test_what_can_carry_a_call(executor):
    executor.transport.own_ways = PEERS
    links = GpuLinks(False, 2, 100.0, 50.0)
    rules = DeviceRules(executor.transport, links)

    def possible(collective, dtype, op):
        return rules.capabilities(Request(collective, 4096, 4, False, dtype_of(dtype), op))

    sums = possible("allreduce", "float32", OPS["sum"])
    assert {(one.algorithm, one.protocol) for one in sums.peers} == PEERS
    assert (sums.native, sums.flagged, sums.links) == (True, False, links)
    assert possible("allreduce", "int32", OPS["sum"]).flagged, "integers need flags"
    moved = possible("allgather", "float32", None)
    assert moved.flagged and not moved.peers, "what is moved may have any bits"


def test_a_ring_on_gpus_is_not_cut_into_small_pieces(executor):
    plan = executor.find("allreduce", 1 << 24, dtype_of("float32"), OPS["sum"], algorithm="ring")
    assert plan.schedule.chunks == 4


def test_a_tree_of_a_large_message_has_large_pieces(executor):
    plan = executor.find("allreduce", 1 << 22, dtype_of("float32"), OPS["sum"], algorithm="tree")
    assert plan.schedule.chunks == 4


def test_started_work_lets_the_stream_wait_and_not_the_host(executor):
    plan = executor.find("allreduce", 10, dtype_of("float32"), OPS["sum"])
    work = executor.start(plan, "x", "x", "value", "allreduce")
    assert isinstance(work, DeviceWork)
    assert isinstance(work, Work)
    assert work.done()
    assert work.wait() == "value"
    assert executor.transport.runs[-1] == "follow"
    assert work.synchronize() == "value"
    assert executor.transport.runs[-1] == "wait"


def test_an_error_ends_the_communicator_and_tells_the_others(executor):
    plan = executor.find("allreduce", 10, dtype_of("float32"), OPS["sum"])
    executor.transport.error = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        executor.run(plan, "x", "x")
    assert executor.transport.aborted == ["it raised ValueError: broken"]
    with pytest.raises(CommunicatorError, match="cannot be used after ValueError: broken"):
        executor.run(plan, "x", "x")


def test_a_wrong_argument_does_not_end_it(executor):
    plan = executor.find("allreduce", 10, dtype_of("float32"), OPS["sum"])
    executor.transport.error = ArgumentError("an array on the wrong device")
    with pytest.raises(ArgumentError):
        executor.run(plan, "x", "x")
    executor.transport.error = None
    executor.run(plan, "x", "x")


def test_two_threads_at_once_are_refused(executor):
    plan = executor.find("allreduce", 10, dtype_of("float32"), OPS["sum"])
    with executor.turn, pytest.raises(CommunicatorError, match="two threads use one communicator"):
        executor.run(plan, "x", "x")


def test_an_error_ends_the_calls_with_both_kinds_of_array(executor):
    other = DeviceExecutor(FakeTransport())
    executor.partner, other.partner = other, executor
    other.transport.error = ValueError("no such kernel")
    plan = other.find("allreduce", 10, dtype_of("float32"), OPS["sum"])
    with pytest.raises(ValueError, match="no such kernel"):
        other.run(plan, "x", "x")
    assert executor.transport.aborted == other.transport.aborted == ["it raised ValueError: no such kernel"]
    with pytest.raises(CommunicatorError, match="no such kernel"):
        executor.find("allreduce", 10, dtype_of("float32"), OPS["sum"])
