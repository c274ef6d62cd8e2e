"""Whatever a forked child of a rank does, the rank and its peers go on."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import flagcx as fc
from tests.bootstrap.processes import bare_environment
from tests.cli.launching import command
from tests.mpi import MPIRUN

SCRIPT = """
import contextlib, gc, multiprocessing, os, subprocess, sys, time
import numpy as np
import flagcx as fc
from flagcx import world

comm = fc.init(timeout_s=20)
half, mapped = comm.split(comm.rank), comm.empty(50_000, np.float32)
mapped[...] = 1
pending = None


def refused(*calls):
    for call in calls:
        try:
            call()
        except fc.CommunicatorError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("a call in a child was not refused")
    sys.exit(7)


def use():
    x = np.ones(3)
    refused(
        lambda: comm.allreduce(x),
        lambda: comm.allreduce(mapped),
        lambda: half.allreduce([x, x]),
        lambda: comm.allreduce(x, compression="int8"),
        lambda: comm.allreduce(x, async_op=True),
        lambda: comm.send(x, 0),
        lambda: comm.split(0),
        lambda: comm.empty(4),
        lambda: comm.broadcast_object(None),
        lambda: comm.abort("in a child"),
        half.abort,
        comm.shrink,
        fc.init,
        *([] if pending is None else [pending.wait]),
    )


def collect():
    global comm, half, mapped, pending
    comm = half = mapped = pending = world._WORLD.comm = None
    gc.collect()
    sys.exit(7)


def close():
    half.close()
    comm.close()
    sys.exit(7)


def live_on():
    os.setsid()
    if os.fork():
        os._exit(7)
    time.sleep(1.5)
    os.kill(os.getpid(), 9)


def fail():
    sys.stderr = open(os.devnull, "w")
    raise ValueError("in the child")


CHILDREN = [
    (lambda: sys.exit(7), 7), (lambda: os._exit(7), 7), (fail, 1), (use, 7), (collect, 7), (close, 7),
    (live_on, 7), (lambda: os.kill(os.getpid(), 11), -11),
]


def fork(child, expected):
    with comm._host.transport._arena.heap._pool._lock, world._WORLD.lock:  # as other threads may have them
        pid = os.fork()
        if not pid:
            child()
            os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == expected, (child, status)


def check(turn):
    ones = comm.allreduce(np.full(9, turn))
    assert (ones == comm.size * turn).all() and half.size == 1
    mapped[...] = turn
    assert (comm.allreduce(mapped) == comm.size * turn).all()


def loaded():
    import torch
    from torch.utils.data import DataLoader
    for batch in DataLoader(torch.arange(8), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        check(int(batch[0]) + 1)


if __name__ == "__main__":
    check(1)
    for turn, (child, expected) in enumerate(CHILDREN, 2):
        if comm.rank == turn % 2:
            fork(child, expected)
        check(turn)
        if comm.rank == 0:
            pending = comm.allreduce(np.ones(4), async_op=True)  # the other rank comes after the fork
            fork(child, expected)
            open(f"{__file__}.{turn}", "w").close()
            pending.wait()
            pending = None
        else:
            while not os.path.exists(f"{__file__}.{turn}"):
                time.sleep(0.002)
            comm.allreduce(np.ones(4))
        check(turn + 100)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    subprocess.run(["true"], preexec_fn=gc.collect, close_fds=False, check=True)
    check(1000)
    if "torch" in sys.argv:
        loaded()
    comm.close()
    again = fc.init()
    fork(lambda: sys.exit(7), 7)
    assert again.allreduce(np.ones(3))[0] == again.size
    print("the job went on")
"""


def run(*command: str) -> None:
    done = subprocess.run(command, env=bare_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the job went on") == 2, done.stdout + done.stderr


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "forks.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_a_job_of_flagcx_run_goes_on(script):
    run(*command("-n", "2"), str(script), *(["torch"] if find_spec("torch") else []))


@pytest.mark.slow
def test_a_job_of_mpirun_goes_on(script):
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python; the extra 'test' brings Open MPI's")
    run(str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(script))


def _fork_and_return(how: str) -> tuple[int, float]:
    import os

    import numpy as np

    comm = fc.init(timeout_s=20)
    parent = os.getpid()
    if os.fork():
        os.wait()
        return os.getpid() - parent, float(comm.allreduce(np.ones(3))[0])
    if how == "raises":
        raise ValueError("in the child")
    if how == "exits":
        raise SystemExit
    return os.getpid() - parent, 0.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["returns", "exits", "raises"])
def test_what_a_function_returns_is_what_it_returns_in_the_rank_itself(how):
    assert fc.launch(_fork_and_return, ranks=2, args=(how,), timeout_s=60) == [(0, 2.0)] * 2
