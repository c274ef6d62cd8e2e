"""Ranks that call fc.init() again: after an abort, after an init that failed, and after shrink."""

from __future__ import annotations

import threading
import time

import numpy as np

import flagcx as fc
from tests.bootstrap.processes import rest
from tests.communicator.jobs import job, outcome_of

_START = """
import faulthandler, gc
from pathlib import Path
faulthandler.dump_traceback_later(40, exit=True)
me, place = int(os.environ["FLAGCX_RANK"]), Path(os.environ["PLACE"])

def wait_for(*names):
    while not all((place / name).exists() for name in names):
        time.sleep(0.005)

def right(comm):
    return comm.allreduce(np.full(3, comm.rank + 1.0))[2] == comm.size * (comm.size + 1) // 2
"""


def _told(body: str, size: int, directory: object) -> list[list[str]]:
    """What each rank of a job tells until its end."""
    with job(size, _START + body, PLACE=str(directory)) as processes:
        return [rest(process, 60).splitlines() for process in processes]


def test_after_an_abort_all_join_anew_those_too_whom_no_call_has_told(tmp_path):
    body = """
comm = fc.init()
(place / str(me)).touch()
if me == 1:
    wait_for("0", "1", "2")  # so that nobody is in a call, nor in init
    comm.abort("enough")
while not comm.is_lost():
    time.sleep(0.01)
new = fc.init()
tell(new is not comm and right(new))
"""
    assert [one[-1] for one in _told(body, 3, tmp_path)] == ["True"] * 3


def test_after_an_abort_ranks_that_are_threads_join_anew():
    outside = threading.Barrier(3)

    def rank() -> tuple[bool, float]:
        comm = fc.init()
        outside.wait(30)
        if comm.rank == 1:
            comm.abort("enough")
        while not comm.is_lost():
            time.sleep(0.01)
        new = fc.init()
        return new is not comm, float(new.allreduce(np.full(3, new.rank + 1.0))[0])

    assert set(fc.launch(rank, 3, threads=True)) == {(True, 6.0)}


def test_a_rank_that_comes_after_the_time_of_the_others_joins_them_when_they_try_again(tmp_path):
    body = """
if me == 1:
    wait_for("0", "2")
else:
    outcome(lambda: fc.init(init_timeout_s=0.3))
    (place / str(me)).touch()
tell(right(fc.init(init_timeout_s=30.0)))
"""
    told = _told(body, 3, tmp_path)
    assert [one[-1] for one in told] == ["True"] * 3, told
    for rank in (0, 2):
        name, culprit, _, text = outcome_of(told[rank][0])
        if name == "PeerTimeoutError":
            assert culprit == 1 and "rank 1 did not come to fc.init() within 0.3 s" in text, told
        else:  # told by the other one that it gave up
            assert name == "AbortedError" and "rank 1 did not come to fc.init()" in text, told


def test_an_init_that_a_signal_s_handler_ends_may_be_called_again(tmp_path):
    body = """
class Stopped(Exception):
    pass

def handler(*_):
    raise Stopped("by hand")

signal.signal(signal.SIGALRM, handler)
try:
    if me == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        fc.init()
    elif me == 2:
        outcome(fc.init)
    else:
        wait_for("0")  # the rank for which the others wait
except Stopped:
    (place / "0").touch()
tell(right(fc.init()))
"""
    told = _told(body, 3, tmp_path)
    assert [one[-1] for one in told] == ["True"] * 3, told
    if len(told[2]) > 1:  # else it came after the handler
        name, culprit, _, text = outcome_of(told[2][0])
        assert (name, culprit) == ("AbortedError", 0), told
        why = "its fc.init() failed: it raised Stopped: by hand"
        assert text == f"rank 0 gave up: {why}; all ranks may call fc.init() again"


def test_a_wrong_setting_of_one_rank_may_be_corrected(tmp_path):
    body = """
if me == 0:
    outcome(lambda: fc.init(transport="telepathy"))
else:
    outcome(fc.init)
tell(right(fc.init()))
"""
    told = _told(body, 2, tmp_path)
    assert [one[-1] for one in told] == ["True"] * 2, told
    assert "transport='telepathy' is not known" in told[0][0]
    assert len(told[1]) == 2 and "rank 0 gave up: its fc.init() failed: it raised ArgumentError" in told[1][0]


def test_a_communicator_that_was_shrunk_is_forgotten_and_says_where_to_go_on(tmp_path):
    body = """
first = comm = fc.init()
for _ in range(8):
    comm = comm.shrink()
assert fc.init() is comm and right(comm)
gc.collect()
alive = [one for one in gc.get_objects() if type(one) is type(comm)]
tell(len(alive))
outcome(first.barrier)
outcome(first.shrink)
"""
    for told in _told(body, 2, tmp_path):
        assert told[0] == "2", told
        for one in told[1:]:
            name, _, _, text = outcome_of(one)
            assert name == "CommunicatorError", told
            assert (
                text == "comm.shrink() was called on this communicator; go on with the one that it returned"
            )
