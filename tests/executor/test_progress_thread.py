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
from flagcx.executor.progress_thread import (
    FEW_CALLS,
    MOST_CALLS,
    MOST_NBYTES,
    ProgressThread,
    ask_for_short_slices,
)
from tests.bootstrap.processes import line, rest
from tests.communicator.jobs import job
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
    thread = ProgressThread(print)
    try:
        inside = thread.submit(slice_ns, 0).result()
    finally:
        thread.close()
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


@pytest.mark.parametrize(
    ("calls", "nbytes", "waits"),
    [
        (MOST_CALLS - 1, 0, False),
        (MOST_CALLS, 0, True),
        (FEW_CALLS - 1, MOST_NBYTES, False),
        (FEW_CALLS, MOST_NBYTES // FEW_CALLS, True),
        (2 * FEW_CALLS, MOST_NBYTES // FEW_CALLS // 4, False),
    ],
)
def test_a_call_waits_for_the_oldest_where_many_are_under_way(calls, nbytes, waits):
    gate, hurried = threading.Semaphore(0), []
    thread = ProgressThread(print)
    for _ in range(calls):
        thread.submit(gate.acquire, nbytes)

    def hurry() -> None:
        hurried.append(1)
        gate.release()  # for one call alone

    thread.wait_for_room(nbytes, hurry)
    assert bool(hurried) == waits
    gate.release(calls)
    thread.close()
    thread.wait_for_room(MOST_NBYTES, lambda: pytest.fail("calls that have ended take no room"))


def _never_waits(times: int) -> tuple[int, float]:
    comm, most = fc.init(timeout_s=20), 0
    for i in range(times):
        comm.allreduce(np.full(1 << 7, float(i)), async_op=True)
        most = max(most, len(comm._host._worker._left))
    return most, float(comm.allreduce(np.ones(1))[0])


def test_work_that_is_never_waited_for_takes_bounded_memory():
    for most, last in run_ranks(_never_waits, 2, 3 * MOST_CALLS):
        assert most <= MOST_CALLS
        assert last == 2


AT_THE_END = """
import atexit, threading
atexit.register(lambda: thread.join(0.1))  # after the close, as it was registered before
comm = fc.init()
comm.barrier()
if comm.rank == 0:
    tell("ready")
    sys.stdin.read()  # until the other process has ended
    os._exit(0)
START
thread = threading.Thread(target=call, daemon=True)
thread.start()
while not comm._host.turn.locked():
    time.sleep(0.001)
"""
INSIDE = "call = lambda: comm.allreduce(np.ones(9))"
AGAIN = """
def call():
    with comm._host.turn:
        leave.wait()  # until the communicator is closed
    while True:
        comm.allreduce(np.ones(9))
leave = threading.Event()
atexit.register(leave.set)
comm.close()
"""


@pytest.mark.parametrize("start", [INSIDE, AGAIN], ids=["inside", "again"])
def test_a_daemon_thread_that_the_end_of_the_process_cuts_off_says_nothing(start):
    with job(2, AT_THE_END.replace("START", start)) as (first, second):
        assert line(first) == "ready"
        assert rest(second) == ""
        assert second.returncode == 0
        assert first.communicate(timeout=60)[0] == ""


def test_work_cannot_be_started_as_the_interpreter_ends():
    body = """
import atexit
comm = fc.init()
atexit.register(lambda: outcome(lambda: comm.allreduce(np.ones(3), async_op=True)))
comm.allreduce(np.ones(3), async_op=True).wait()
"""
    with job(1, body) as (process,):
        assert "CommunicatorError None" in (told := rest(process)), told
        assert "leave async_op out" in told
