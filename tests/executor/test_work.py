"""What waiting for started work raises."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest

import flagcx as fc
from flagcx.errors import ArgumentError, MismatchError, PeerTimeoutError
from flagcx.executor.work import Work


class Interrupted(Future):
    """A future in whose wait a signal handler of the caller's raises."""

    def result(self, timeout=None):
        raise TimeoutError("the caller's own")


def test_work_that_still_runs_says_so():
    with pytest.raises(PeerTimeoutError, match=r"allreduce still runs after 0.01 s; wait again"):
        Work(Future(), "allreduce").wait(0.01)


@pytest.mark.parametrize("timeout_s", [-1, "a", float("nan"), [], -0.1])
def test_what_is_no_time_is_refused(timeout_s):
    with pytest.raises(ArgumentError, match=r"timeout_s must be a number of seconds from 0 up, or None, got"):
        Work(Future(), "allreduce").wait(timeout_s)


@pytest.mark.parametrize("timeout_s", [0, 1, float("inf"), 1e300, None])
def test_any_time_does_for_what_has_ended(timeout_s):
    future: Future = Future()
    future.set_result(3)
    assert Work(future, "allreduce").wait(timeout_s) == 3


def test_a_time_out_of_the_callers_own_is_not_taken_for_the_works():
    with pytest.raises(TimeoutError, match="the caller's own"):
        Work(Interrupted(), "allreduce").wait()


@pytest.mark.parametrize("error", [MismatchError("ranks disagree", peer=1), TimeoutError("inside")])
def test_an_error_of_the_work_is_raised_and_counts_as_told(error):
    future: Future = Future()
    future.set_exception(error)
    told = []
    with pytest.raises(type(error), match=str(error)):
        Work(future, "allreduce", None, lambda: told.append(1)).wait(1.0)
    assert told == [1]


@pytest.mark.parametrize("call", ["sends", "calls"])
def test_started_work_for_which_there_is_no_thread_ends_the_communicator(monkeypatch, call):
    """Its peers may be in the call, and are told so."""

    def start(self):
        raise RuntimeError("can't start new thread")

    comm, x = fc.init(), np.zeros(3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(fc.ResourceError, match=rf"no thread can be started for {call}.*ulimit"):
            comm.recv(x, 0, async_op=True) if call == "sends" else comm.allreduce(x, async_op=True)
    with pytest.raises(fc.CommunicatorError, match="no thread can be started"):
        comm.allreduce(x)
    comm.close()
