"""The profiler on real ranks: what it records, who it names as late, and what it costs."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import flagcx as fc
from flagcx.profiler.records import OperationInfo, RecordBuffer, RecordedPlan, Uncounted
from tests.profiler.trace_format import check_trace
from tests.ranks import run_ranks

LATE_S = 0.005


def _late(culprit: int, path: str):
    comm = fc.init()
    x = np.ones(256, np.float32)
    for _ in range(5):
        comm.allreduce(x, "max")
    comm.profiler.clear()
    for _ in range(20):
        if comm.rank == culprit:
            time.sleep(LATE_S)
        comm.allreduce(x, "max")
    report = comm.profiler.stragglers()
    assert comm.profiler.save(path).name == "trace.json"
    waited = [r.waiting_ns for r in comm.profiler.records() if r.operation.collective == "allreduce"]
    return report, str(report), sum(waited[:20]) / 1e9


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_is_late_is_named(culprit, tmp_path):
    path = tmp_path / "trace.json"
    results = run_ranks(_late, 3, culprit, str(path))
    assert len({text for _, text, _ in results}) == 1, "every rank gets the same report"
    report, text, _ = results[0]
    assert report.worst == culprit
    entry = next(e for e in report.ranks if e.rank == culprit)
    assert entry.late >= 16
    assert entry.calls >= 20
    assert LATE_S * 0.9e6 <= entry.typical_us <= LATE_S * 4e6
    assert f"rank {culprit} was last in {entry.late} of {entry.calls} calls, by" in text
    for rank, (_, _, waited_s) in enumerate(results):
        assert (waited_s < 0.6 * 20 * LATE_S) == (rank == culprit), "only the others wait"
    events = check_trace(json.loads(path.read_text()), ranks=3)
    calls: dict[int, list[dict]] = {}
    for event in events:
        if event["name"] == "allreduce":
            calls.setdefault(event["args"]["call"], []).append(event)
    assert len(calls) == 20
    for meeting in calls.values():
        assert len(meeting) == 3
        last_begin = max(e["ts"] for e in meeting)
        assert all(e["ts"] + e["dur"] > last_begin for e in meeting), "no rank leaves before all have come"


def _everything():
    comm = fc.init()
    x = np.ones(300_000, np.float32)
    comm.allreduce(x)
    comm.allgather(x[:10])
    comm.broadcast(x, 0, algorithm="chain")
    works = [comm.allreduce(x, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    if comm.rank == 0:
        comm.send(x, 1)
    if comm.rank == 1:
        comm.recv(x, 0)
    with comm.group():
        comm.allreduce(x[:3])
        comm.allreduce(x[3:6])
    return [
        (r.operation.collective, r.operation.nbytes, r.operation.algorithm, r.sequence, r.queued_ns > 0)
        for r in comm.profiler.records()
    ], all(0 <= r.waiting_ns <= r.elapsed_ns for r in comm.profiler.records())


def test_what_is_recorded():
    (first, sane), (second, sane_too) = run_ranks(_everything, 2)
    assert first == second
    assert sane and sane_too
    kinds = [(collective, nbytes, algorithm) for collective, nbytes, algorithm, _, _ in first]
    assert kinds == [
        ("allreduce", 1_200_000, "two_shot"),
        ("allgather", 40, "direct"),
        ("broadcast", 1_200_000, "chain"),
        *[("allreduce", 1_200_000, "two_shot")] * 3,
        ("transfer", 1_200_000, "direct"),
        ("allreduce", 24, "one_shot"),
    ]
    numbers = [sequence for _, _, _, sequence, _ in first if sequence >= 0]
    assert numbers == sorted(set(numbers)), "each call has a number of its own"
    assert first[6][3] == -1, "a transfer is no call of all ranks"
    assert [queued for *_, queued in first] == [False] * 3 + [True] * 3 + [False] * 2


def _shared_and_private():
    comm = fc.init()
    shared, private = comm.empty(300_000), np.ones(300_000, np.float32)
    shared[...] = 1
    said = []
    for x in (shared, shared, private, private):
        comm.allreduce(x)
        comm.allreduce(private[:100])
        said.append(str(comm.profiler.summary()))
    return ["comm.empty" in text for text in said], said[-1]


def test_arrays_that_are_reduced_again_and_again_could_be_shared():
    for told, last in run_ranks(_shared_and_private, 2):
        assert told == [False, False, False, True]
        assert "2 all-reduces were of private arrays of a MiB or more" in last


def _off():
    comm = fc.init(profile=False)
    comm.allreduce(np.ones(3))
    work = comm.allreduce(np.ones(3), async_op=True)
    work.wait()
    return len(comm.profiler.records()), str(comm.profiler.stragglers())


def test_switched_off_nothing_is_recorded():
    assert run_ranks(_off, 2) == [(0, "no call is in the records of all ranks")] * 2


class _Nothing:
    def run(self, given, result):
        pass


def _time_us(plan, calls: int = 5000) -> float:
    run, best = plan.run, float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(calls):
            run(None, None)
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    return best


@pytest.mark.slow
def test_a_record_costs_less_than_a_microsecond():
    operation = OperationInfo("allreduce", 1024, "float32", "one_shot", 1, "", "shared_memory")
    recorded = RecordedPlan(_Nothing(), operation, RecordBuffer(), Uncounted())
    cost_us = _time_us(recorded) - _time_us(_Nothing())
    assert 0 < cost_us < 1.0, f"{cost_us:.2f} us"


def _save(path, own=False):
    comm = fc.init()
    comm.allreduce(np.ones(1))
    try:
        if comm.rank == 1 or not own:
            return json.loads(comm.profiler.save(path, own=own).read_text())
    except fc.ArgumentError as error:
        return str(error), float(comm.allreduce(np.ones(1))[0])


def test_a_trace_that_cannot_be_written_is_told_to_all_ranks(tmp_path):
    path = str(tmp_path / "nowhere" / "t.json")
    (text, total), other = run_ranks(_save, 2, path)
    assert text.startswith(f"the trace cannot be written to {path}: No such file or directory; ")
    assert other == (text, total) == (text, 2.0)


def test_a_rank_may_save_its_own_records_alone(tmp_path):
    _, trace = run_ranks(_save, 2, str(tmp_path / "t.json"), True)
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    assert "allreduce" in {event["name"] for event in events}
