"""The tuner on GPUs, with NumPy arrays in shared memory in place of them: what it measures, and how."""

from __future__ import annotations

from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms import build
from flagcx.dtypes import dtype_of
from flagcx.selection.measurement import Clock, Pace, as_choice
from flagcx.selection.measurement_on_device import DeviceBench
from flagcx.selection.table import Candidate, Fit, Table
from flagcx.selection.tuner import tune
from flagcx.transport.base import Call
from tests.ranks import run_ranks


class FakeEvent:
    """Reads the clock where the GPU would."""

    def record(self, stream) -> None:
        self.at = perf_counter()

    def synchronize(self) -> None:
        pass


def fake_cupy():
    """As much of CuPy as the tuner uses, with NumPy's arrays."""
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        Event=FakeEvent,
        get_current_stream=lambda: stream,
        get_elapsed_time=lambda start, end: (end.at - start.at) * 1e3,
    )
    return SimpleNamespace(cuda=cuda, zeros=np.zeros)


class FakeTransport:
    """Carries NumPy arrays through shared memory, and notes what it compiled and how often it ran."""

    nccl_version = 22809

    def __init__(self, host) -> None:
        self._host, self.rank, self.size = host, host.rank, host.size
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
            self.runs[key] += 1
            plan.run(given, result)

        return SimpleNamespace(run=run)


def _bench(order=None):
    comm = fc.init(tuning=False)
    transport = FakeTransport(comm._transport)
    return comm, transport, DeviceBench(transport, fake_cupy(), Clock(comm._transport), order)


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
    comm, transport, bench = _bench()
    pace = Pace(2e-4, 2, near=1e9)
    table = tune(bench, Fit({}, comm.size, "nccl", {}, {}), ("allreduce", "gather"), [1024, 65536], pace)
    return table.to_json(), transport.runs


def test_tuning_gives_the_same_table_on_every_rank():
    (text, runs), (same, others) = run_ranks(_tune, 2)
    assert text == same
    assert runs == others, "all ranks make the same calls"
    table = Table.from_json(text)
    assert [p.nbytes for p in table.measured["allreduce"]] == [1024, 65536]
    assert [p.nbytes for p in table.measured["gather"]] == [512, 32768], "bytes of a block"
    first, second = (point.times_us for point in table.measured["allreduce"])
    assert Candidate("one_shot", 0, "peer_memory") in first
    assert Candidate("one_shot", 0, "peer_memory") not in second
    assert Candidate("native") in second
    assert min(runs.values()) >= 6, "calls until the graph is captured do not count"


def _along():
    comm, _, bench = _bench((0, 2, 1, 3))
    for algorithm in ("native", "ring", "tree", "one_shot"):
        measured = bench.measurement("allreduce", 4 * 1003)
        plan = measured.plan(as_choice(Candidate(algorithm), 4 * 1003))
        measured.given[:] = np.arange(1003) + 10_000 * comm.rank
        plan.run(measured.given, measured.result)
        if not (measured.result == 4 * np.arange(1003) + 60_000).all():
            return algorithm
    return ""


def test_schedules_are_laid_along_the_planned_order():
    assert run_ranks(_along, 4) == [""] * 4


def _slowest():
    comm = fc.init(tuning=False)
    return Clock(comm._transport).slowest(1.0 + comm.rank)


def test_a_batch_counts_with_its_slowest_rank():
    assert run_ranks(_slowest, 3) == [3.0] * 3


@pytest.mark.parametrize("version", [22300, 22809])
def test_nccls_own_is_measured_where_it_serves(version):
    transport = SimpleNamespace(
        size=4, rank=0, nccl_version=version, protocols=lambda *call: frozenset(), dtype=dtype_of("float32")
    )
    bench = DeviceBench(transport, fake_cupy(), None)
    assert Candidate("native") in bench.candidates("reduce_scatter", 1024)
    assert Candidate("native") in bench.candidates("alltoall", 1024)
