"""The thread behind started work: short slices, and waits that leave the core to a computation."""

from __future__ import annotations

import os
import platform
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import flagcx as fc
from flagcx.executor.progress_thread import ask_for_short_slices, progress_thread
from tests.ranks import run_ranks


def slice_ns() -> int | None:
    """The slice that the scheduler gives this thread; None where it does not say."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text()
    except OSError:
        return None
    found = re.search(r"se\.slice\s*:\s*(\d+)", text)
    return int(found[1]) if found else None


def test_the_thread_has_short_slices_and_no_other_has():
    before = slice_ns()
    pool = progress_thread(print)
    try:
        inside = pool.submit(slice_ns).result()
    finally:
        pool.shutdown()
    _skip_on_old_kernels()
    assert inside == 100_000
    assert slice_ns() == before


def _skip_on_old_kernels() -> None:
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if slice_ns() is None or release < (6, 12):
        pytest.skip("this kernel does not say or set a thread's slice")


def _slice_of_caller(cores: int) -> int | None:
    os.cpu_count = lambda: cores
    fc.init()
    return slice_ns()


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "short"), [(1, True), (2, False)])
def test_callers_have_short_slices_where_ranks_outnumber_the_cores(cores, short):
    _skip_on_old_kernels()
    found = run_ranks(_slice_of_caller, 2, cores, fresh=True)
    assert [ns == 100_000 for ns in found] == [short] * 2


def test_a_machine_that_is_not_known_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert ask_for_short_slices() is False


def _waits() -> list[bool]:
    """Whether waits were those of the background: in a call, in started work, and once it is waited for."""
    comm = fc.init()
    signals, seen = comm._host._progress, []
    x = np.ones(10)
    plan = type("Watched", (), {"run": lambda self, given, result: seen.append(signals.background)})()
    gate = threading.Event()
    comm.allreduce(x)
    comm._host.run(plan, x, x)
    comm._host.start(plan, x, x, None, "watched").wait()
    seen[1:] = []  # whether the wait or the thread comes first is open
    comm._host.start(_Gated(gate), x, x, None, "gate")
    work = comm._host.start(plan, x, x, None, "watched")
    gate.set()
    while not work.done():
        pass
    gate.clear()
    comm._host.start(_Gated(gate), x, x, None, "gate")
    work = comm._host.start(plan, x, x, None, "watched")
    comm._host.hurry()
    gate.set()
    work.wait()
    seen.append(signals.background)
    comm.allreduce(x)
    assert (x == comm.size**2).all()
    return seen


class _Gated:
    """A plan that waits for a gate."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def run(self, given: object, result: object) -> None:
        self._gate.wait(10)


def test_only_started_work_that_nobody_waits_for_leaves_the_core():
    for seen in run_ranks(_waits, 2):
        assert seen == [False, True, False, False]


def _results(times: int) -> None:
    comm = fc.init()
    for count in (1, 1000, 100_000, 1_000_000):
        for i in range(times):
            x = np.full(count, i + comm.rank, np.float32)
            work = comm.allreduce(x, async_op=True)
            if i % 2:
                np.dot(np.ones((100, 100)), np.ones((100, 100)))
            assert (work.wait() == comm.size * i + comm.size * (comm.size - 1) // 2).all()


@pytest.mark.parametrize("size", [2, 3])
def test_results_of_waits_in_the_background(size):
    run_ranks(_results, size, 10)
