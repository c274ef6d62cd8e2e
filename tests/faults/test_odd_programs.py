"""Programs that do odd things in a rank: the job does its work, or ends with an error that says why."""

from __future__ import annotations

import re

import pytest

from tests.cli.launching import flagcx_run
from tests.communicator.jobs import shared_memory_files

PRELUDE = """
import atexit, gc, os, resource, signal, sys, threading, time
import numpy as np
import flagcx as fc
me = int(os.environ["FLAGCX_RANK"])
"""
BLAMED = "rank 1 of 2 failed first"
CASES = {
    "sys.exit in an atexit handler": ("comm.barrier(); atexit.register(sys.exit, 3)", 0, "SystemExit"),
    "os._exit in an atexit handler": ("atexit.register(os._exit, 5 * me); comm.barrier()", 5, "exit code 5"),
    "a collective in an atexit handler": ("atexit.register(total)", 0, "2.0"),
    "an abort in an atexit handler": ("comm.barrier(); atexit.register(comm.abort)", 0, ""),
    "modules that are gone at exit": (
        "work = comm.allreduce(np.ones(5), async_op=True); atexit.register(sys.modules.clear)",
        0,
        "",
    ),
    "an exception without a text": (
        """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")
if me:
    raise Mute
comm.barrier()""",
        1,
        BLAMED,
    ),
    "an exception of odd characters": (
        "if me: raise ValueError('\\ud800\\0')\ncomm.barrier()",
        1,
        BLAMED,
    ),
    "an exception of 5 MB": ("if me: raise ValueError('x' * 5_000_000)\ncomm.barrier()", 1, BLAMED),
    "a hook for exceptions that fails": (
        "sys.excepthook = None\nif me: raise ValueError('mine')\ncomm.barrier()",
        1,
        "ValueError: mine",
    ),
    "endless recursion": ("def f(): f()\nif me: f()\ncomm.barrier()", 1, "RecursionError"),
    "another program in the place of a rank": (
        "if me: os.execv(sys.executable, [sys.executable, '-c', ''])\ncomm.barrier()",
        1,
        "PeerDiedError: rank 1",
    ),
    "no standard streams": ("[os.close(n) for n in range(3)]; comm.split(color=0).barrier()", 0, ""),
    "all descriptors closed": (
        "if me: os.closerange(3, 256)\n[comm.allreduce(np.ones(300_000)) for _ in 'ab']\ncomm.split(color=0)",
        0,
        "",
    ),
    "no descriptor left for a split": (
        """
if me:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1,) * 2)
comm.split(color=0).barrier()""",
        1,
        r"ResourceError: .*Too many open files.*ulimit -n",
    ),
    "another user from now on": ("if me: os.setuid(65534)\ncomm.split(color=0)", 1, "must run as one user"),
    "a clock that jumps": (
        """
true = time.time
time.time = lambda: true() + (1e6 if me else -1e6)
[total() for _ in range(5)]""",
        0,
        "2.0",
    ),
    "a clock that stands still": ("time.monotonic = lambda: 0.0\ntotal()", 0, "2.0"),
    "signals all the time": (
        """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
[comm.split(color=0).allreduce(np.ones(200_000)) for _ in range(5)]
comm.close()
comm = fc.init()
total()
signal.setitimer(signal.ITIMER_REAL, 0)""",
        0,
        "2.0",
    ),
    "a handler that closes the communicator": (
        """
signal.signal(signal.SIGALRM, lambda *_: comm.close())
if me:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
while True:
    comm.allreduce(np.ones(100))""",
        1,
        "this communicator is closed",
    ),
    "all signals blocked": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntotal()",
        0,
        "2.0",
    ),
    "a collective in a finalizer": (
        """
class Last:
    def __del__(self):
        total()
Last()""",
        0,
        "2.0",
    ),
    "garbage all the time": (
        """
gc.set_threshold(1, 1, 1)
for _ in range(20):
    box = [comm.split(color=0)]
    box.append(box)
    box[0].allreduce(np.ones(10), async_op=True)
    del box
total()""",
        0,
        "2.0",
    ),
    "a receive that nobody waits for": (
        "work = comm.recv(np.ones(5), 1 - me, async_op=True)",
        1,
        "rank",
    ),
    "started work of one rank alone": (
        "if not me: comm.allreduce(np.ones(9), async_op=True)",
        1,
        "PeerDiedError: rank 1",
    ),
    "endless calls of a daemon thread": (
        """
def calls():
    while True:
        comm.allreduce(np.ones(200))
threading.Thread(target=calls, daemon=True).start()
time.sleep(0.3)""",
        0,
        "",
    ),
    "forks beside calls": (
        """
def forks():
    for _ in range(30):
        os.waitpid(os.fork() or os._exit(0), 0)
thread = threading.Thread(target=forks)
thread.start()
while thread.is_alive() | bool(comm.allreduce(np.array([thread.is_alive()]), op="max")[0]):
    pass
total()""",
        0,
        "2.0",
    ),
    "a library that is loaded twice": (
        """
for name in [name for name in sys.modules if name.startswith("flagcx")]:
    del sys.modules[name]
import flagcx
flagcx.init()""",
        1,
        "is already connected",
    ),
    "little stack for threads": (
        "threading.stack_size(32768); comm.allreduce(np.ones(3), async_op=True).wait()",
        0,
        "",
    ),
    "more of its processor time than it may have": (
        "if me: resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile me: pass\ncomm.barrier()",
        137,
        BLAMED,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_job_works_or_says_why(tmp_path, name):
    body, code, text = CASES[name]
    script = tmp_path / "job.py"
    script.write_text(
        f"{PRELUDE}comm = fc.init(timeout_s=3, init_timeout_s=20)\n"
        f"def total():\n    print(comm.allreduce(np.ones(2))[0])\n{body}\n"
    )
    before = shared_memory_files()
    done = flagcx_run("-n", "2", str(script))
    assert done.returncode == code, done
    assert re.search(text, done.stdout + done.stderr), done
    assert shared_memory_files() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTHONOPTIMIZE", "2"), ("PYTHONWARNINGS", "error"), ("PYTHONDEVMODE", "1"), ("HOME", "/proc/none")],
)
def test_a_job_works_whatever_python_is_told(tmp_path, monkeypatch, name, value):
    script = tmp_path / "job.py"
    script.write_text(f"{PRELUDE}print(fc.init().allreduce(np.ones(300_000))[7])")
    monkeypatch.setenv(name, value)
    done = flagcx_run("-n", "2", str(script))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2.0", "[1] 2.0"]), done
