"""Ctrl-C at any line of the start of ranks, of the wait for them and of their end."""

import itertools
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from flagcx._launch import ranks
from flagcx._launch.interrupts import held_back
from flagcx._launch.output import RankOutput
from flagcx._launch.ranks import Command, Ranks
from tests.ranges import exhaustive

WATCHED = (ranks.__file__, threading.__file__)
STEP = 13


def run_job():
    """Starts two ranks, whose time is over at once."""
    command = Command(("sleep", "600"), guards_itself=True)
    with Ranks([command] * 2, {}, RankOutput(2, True, lambda _stream: lambda _data: None)) as job:
        try:
            job.start()
            job.wait(0.0)
        except KeyboardInterrupt:
            job.end(signal.SIGINT)
            raise


def run_interrupted(line):
    """Runs a job with Ctrl-C at the n-th line of the files above; whether it has so many."""
    left = itertools.count(line, -1)

    def trace(frame, event, _argument):
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line" and next(left) == 0:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_job()
            raise KeyboardInterrupt
    finally:
        sys.settrace(before)
    return next(left) < 0


def children():
    """The processes that this thread has started and that have not been waited for."""
    return Path("/proc/thread-self/children").read_text().split()


@pytest.mark.parametrize("first", [0, *exhaustive(range(1, STEP))])
def test_ctrl_c_at_any_line_ends_the_ranks_and_is_no_other_error(first):
    before, line = children(), first
    while run_interrupted(line):
        assert children() == before, line
        line += STEP
    assert line > 300


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block_also_where_that_fails(number):
    def handler(number, _frame):
        raise InterruptedError(number)

    done, before = [], signal.signal(number, handler)
    try:
        with pytest.raises(InterruptedError) as told, held_back():
            os.kill(os.getpid(), number)
            done.append("all")
            raise ValueError
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert (done, told.value.args) == (["all"], (number,))


def test_an_ignored_ctrl_c_stays_ignored_and_other_threads_change_no_handler():
    seen = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back():
            seen.append(signal.getsignal(signal.SIGINT))
        thread = threading.Thread(target=held_back().__enter__)
        thread.start()
        thread.join()
        seen.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_IGN] * 2
