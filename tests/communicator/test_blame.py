"""Errors name the ranks as the job calls them, and the calls that the user made."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.errors import reason_of
from flagcx.transport.waits import Waits
from tests.bootstrap.processes import line, rest
from tests.communicator.jobs import job, outcome_of
from tests.ranks import run_ranks


def _error(call) -> str:
    try:
        call()
    except fc.CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _in_a_split(case: str) -> str:
    """The error of a part of the job that has ranks 1, 3 and 4 of five."""
    comm = fc.init(timeout_s=20)
    part = comm.split(7 if comm.rank in (1, 3, 4) else None)
    if part is None:
        return ""
    if case == "closed" and part.rank == 2:
        part.close()
        return ""
    return _error(lambda: part.allreduce(np.ones(3 + (case == "other" and part.rank == 1))))


@pytest.mark.parametrize("case", ["closed", "other"])
def test_ranks_of_a_split_are_named_as_the_job_does(case):
    told = run_ranks(_in_a_split, 5, case)
    named = "rank 2 is rank 4 of the job" if case == "closed" else "rank 1 is rank 3 of the job"
    said = [text for text in told if text]
    assert len(said) == (2 if case == "closed" else 3), told
    for text in said:
        assert "in communicator split 1 of world rank" in text and named in text, text


def test_only_the_ranks_that_a_text_names_are_translated():
    waits = object.__new__(Waits)
    waits.name, waits.rank, waits.size, waits._ranks = "half", 0, 13, tuple(range(1, 14))
    assert waits._in_job("ranks 0, 12 and rank 7 of the job, rank 13") == (
        "in communicator half rank 0 is rank 1 of the job, rank 12 is rank 13 of the job"
    )
    assert waits._in_job("no names") == ""
    waits._ranks = tuple(range(13))
    assert waits._in_job("rank 3") == ""


STEPS = {
    "split": lambda comm: comm.split(0),
    "broadcast_object": lambda comm: comm.broadcast_object(3, 1),
    "allgather_object": lambda comm: comm.allgather_object(3),
    "gather_object": lambda comm: comm.gather_object(3),
    "scatter_object": lambda comm: comm.scatter_object([3, 4], 1),
    "comm.profiler.stragglers, which all ranks must call": lambda comm: comm.profiler.stragglers(),
    "comm.profiler.save, which all ranks must call": lambda comm: comm.profiler.save("never.json"),
}


def _steps() -> dict[str, str]:
    world = fc.init(timeout_s=20)
    told = {}
    for name, call in STEPS.items():
        comm = world.split(0)
        told[name] = _error(lambda: (call(comm) if comm.rank else comm.barrier(), comm.barrier()))  # noqa: B023
    return told


def test_a_step_of_a_larger_call_says_of_which():
    for told in run_ranks(_steps, 2):
        for name, text in told.items():
            assert "ranks disagree on call 0" in text and f", in {name}" in text, text


def _after_many() -> list[str]:
    """Calls that are no longer among the last 128 kinds, and a message like it."""
    comm, other = fc.init(timeout_s=20).split(0), fc.init().split(0)
    for one in (comm, other):
        one.sendrecv(np.ones(2, np.int16), 1 - one.rank, np.zeros(2, np.int16), 1 - one.rank)
        for i in range(150):
            one.allreduce(np.ones(1 + i, np.float32))
    disagree = _error(lambda: comm.allreduce(np.ones(5 + comm.rank, np.float32)))
    x = np.ones(2 + other.rank, np.int16)
    return [disagree, _error(lambda: other.recv(x, 0) if other.rank else other.send(x, 1))]


def test_calls_of_long_ago_have_names():
    for disagree, _ in (told := run_ranks(_after_many, 2)):
        assert "allreduce of 5 float32" in disagree and "allreduce of 6 float32" in disagree
    assert "rank 0 sent 4 bytes of send and receive of int16" in told[1][1]
    assert "rank 1 expects 6 bytes of send and receive of int16" in told[1][1]


def test_an_exit_in_the_middle_of_a_call_is_told_with_its_code():
    body = """
comm = fc.init(timeout_s=60)
def leave(*_):
    if comm._host.turn.locked():
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.exit(7)
if comm.rank == 0:
    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
else:
    sys.stdin.readline()
outcome(lambda: [comm.barrier() for _ in range(2)])  # rank 0 has come to the first
"""
    with job(2, body) as (first, second):
        assert rest(first) == "" and first.returncode == 7
        second.stdin.write("go on\n")
        second.stdin.flush()
        name, culprit, _, text = outcome_of(line(second))
        assert (name, culprit) == ("AbortedError", 0)
        assert text.startswith("rank 0 gave up: it exited with code 7"), text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(), "it exited with code 0"),
        (SystemExit("bye"), "it exited: bye"),
        (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
        (ValueError("mine"), "it raised ValueError: mine"),
        (fc.ResourceError("no room"), "no room"),
    ],
)
def test_reasons_that_peers_are_told(error, reason):
    assert reason_of(error) == reason


_LIVES_ON = {
    "a thread": "threading.Thread(target=sys.stdin.readline).start()",
    "a process": """
    import multiprocessing
    ours, theirs = os.pipe()
    # Before the thread, which holds the lock of sys.stdin: a child that is forked then never gets it.
    multiprocessing.get_context("fork").Process(target=os.read, args=(ours, 1)).start()
    threading.Thread(target=lambda: os.write(theirs, sys.stdin.readline().encode()), daemon=True).start()""",
}


@pytest.mark.parametrize("what", _LIVES_ON)
def test_an_exception_beside_what_keeps_a_process_alive_is_told_at_once(what):
    body = f"""
import threading
comm = fc.init(timeout_s=60)
comm.barrier()
if comm.rank == 1:
    {_LIVES_ON[what]}
    raise ValueError("mine")
outcome(lambda: comm.allreduce(np.ones(3)))
"""
    with job(2, body) as processes:
        told, culprit, seconds, text = outcome_of(line(processes[0]))
        assert (told, culprit) == ("AbortedError", 1), text
        assert "rank 1 gave up: ValueError: mine" in text and seconds < 20
        processes[1].stdin.write("end\n")
        processes[1].stdin.flush()
        assert "ValueError: mine" in rest(processes[1])
        assert processes[1].returncode == 1
