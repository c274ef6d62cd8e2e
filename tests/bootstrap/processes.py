"""Ranks as real processes, for the tests: each runs a few lines of Python with a connected store."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from flagcx.bootstrap.store import StoreServer
from tests.bootstrap.forked import Forked

REPOSITORY = Path(__file__).resolve().parents[2]

_PRELUDE = """
import os, signal, sys, time
from flagcx.bootstrap.environment import identify
from flagcx.bootstrap.rendezvous import connect
from flagcx.config import Config, environment
from flagcx.errors import *

def start():
    environ = environment()
    return connect(identify(environ), Config.from_environment(environ), environ)

def tell(*words):
    print(*words, flush=True)
"""


def program(body: str) -> str:
    """A rank's program: ``start()`` gives its store, ``tell(...)`` prints a line at once."""
    return _PRELUDE + body


def bare_environment(**changes: str) -> dict[str, str]:
    """This process's environment without a launcher's variables and this user's measured tables."""
    prefixes = (
        "FLAGCX_",
        "OMPI_COMM_",
        "PMI",
        "SLURM_",
        "TORCHELASTIC_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "CUDA_MPS_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | {"PYTHONPATH": str(REPOSITORY), "FLAGCX_TUNING": "0"} | changes


def launched_environment(server: StoreServer, rank: int) -> dict[str, str]:
    """What ``flagcx run`` would give a rank whose launcher serves this store."""
    return bare_environment(
        FLAGCX_RANK=str(rank),
        FLAGCX_SIZE=str(server.size),
        FLAGCX_LOCAL_RANK=str(rank),
        FLAGCX_LOCAL_SIZE=str(server.size),
        FLAGCX_STORE_ADDRESS=server.address,
        FLAGCX_STORE_KEY=server.authkey.hex(),
    )


def mpirun_environment(rank: int, size: int, job: str, directory: Path, **changes: str) -> dict[str, str]:
    """What Open MPI's mpirun would give a rank on one host."""
    return bare_environment(
        OMPI_COMM_WORLD_RANK=str(rank),
        OMPI_COMM_WORLD_SIZE=str(size),
        OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
        OMPI_COMM_WORLD_LOCAL_SIZE=str(size),
        PMIX_NAMESPACE=job,
        XDG_RUNTIME_DIR=str(directory),
        **changes,
    )


@contextmanager
def spawned(body: str, *environs: Mapping[str, str]) -> Iterator[list[subprocess.Popen]]:
    """Starts a process for each environment, and kills at the end what is left."""
    processes = [Forked(program(body), environ) for environ in environs]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # It and what it forked.
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def line(process: subprocess.Popen) -> str:
    """The next line that a process prints."""
    return process.stdout.readline().rstrip("\n")


def rest(process: subprocess.Popen, timeout_s: float = 60) -> str:
    """All that a process still prints until it ends; one that takes too long is killed."""
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    try:  # (communicate() would miss what readline() has taken from the pipe already)
        text = process.stdout.read()
        process.wait()
    finally:
        killer.cancel()
    return text


def wait_until(holds: Callable[[], bool], timeout_s: float = 30) -> None:
    """Waits until a condition holds; fails if it does not come to hold."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stop(process: subprocess.Popen) -> None:
    """Stops a process, and returns when every thread of it stands still."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    wait_until(
        lambda: (
            {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} == {"T"}
        )
    )


def is_listened_on(address: str) -> bool:
    """Whether anyone has the abstract Unix socket of an address (``unix:@...``)."""
    return address.removeprefix("unix:") in Path("/proc/net/unix").read_text()
