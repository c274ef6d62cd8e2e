"""Starts the jobs of the fault suite: for each line on stdin a launcher is forked, which forks its ranks.

All of them have the modules that this process has imported, so that a job costs no start of an interpreter;
and each ends as an interpreter does, for it returns to the end of this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

import ml_dtypes  # noqa: F401
import numpy as np

import flagcx as fc
from flagcx.bootstrap.environment import identify  # noqa: F401
from flagcx.bootstrap.sockets import parse_address
from flagcx.bootstrap.store import StoreServer
from flagcx.bootstrap.thread_rank import thread_rank
from flagcx.executor import host  # noqa: F401
from flagcx.transport import shared_memory  # noqa: F401
from tests.bootstrap.processes import launched_environment, mpirun_environment
from tests.bootstrap.test_store_fuzz import stranger
from tests.faults.plan import Plan
from tests.faults.rank import Log, descriptors, read_plan, work

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def main() -> None:
    """Takes orders: a plan and its directory, as JSON, one a line."""
    while line := sys.stdin.readline():
        while _reaped():
            pass
        if not os.fork():
            plan, directory = json.loads(line)
            _lead(read_plan(plan), Path(directory))
            return


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _lead(plan: Plan, directory: Path) -> None:
    """What a launcher does; in a rank, which is forked here, the rank's work."""
    os.setsid()
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(descriptor, number)
    os.environ.update(TMPDIR=str(directory), XDG_RUNTIME_DIR=str(directory), FLAGCX_RECORD="0")
    log = Log(directory / "launcher")
    log("start", descriptors=descriptors())
    if plan.transport == "threads":
        _lead_threads(plan, directory, log)
    elif plan.fault == "small /dev/shm":
        log("fault")
        _shrink_shared_memory()
        if _lead_processes(plan, directory):
            return
    elif _lead_processes(plan, directory):
        return
    gc.collect()
    log("end", descriptors=descriptors())


def _lead_threads(plan: Plan, directory: Path, log: Log) -> None:
    def rank() -> None:
        here = thread_rank.get()
        assert here is not None
        with contextlib.closing(Log(directory / f"rank{here.rank}")) as of_rank:
            work(plan, here.rank, of_rank)

    try:
        fc.launch(rank, plan.size, threads=True, timeout_s=plan.bound_s)
    except fc.LaunchError as error:
        log("launch error", peer=error.rank, text=str(error)[:300])


def _lead_processes(plan: Plan, directory: Path) -> bool:
    """Forks the ranks and waits for them; whether this is one of them, which has done its work."""
    server = StoreServer(plan.size) if plan.store == "the launcher" else None
    ranks: dict[int, int] = {}
    strangers = 0
    for rank in range(plan.size):
        pid = os.fork()
        if not pid:
            if server is not None:
                environ = launched_environment(server, rank)
            else:
                environ = mpirun_environment(rank, plan.size, f"job{plan.seed}", directory)
            os.environ.clear()
            os.environ.update(environ, FLAGCX_RECORD="0", FLAGCX_TUNING="0")
            work(plan, rank, Log(directory / f"rank{rank}"))
            return True
        ranks[pid] = rank
    if plan.fault == "strangers" and server is not None:
        strangers = os.fork()
        if not strangers:
            _be_strange(server.address, plan.seed)
    if server is None:
        while ranks:
            ranks.pop(os.wait()[0], None)
        return False
    with server:
        while ranks:
            pid, status = os.wait()
            if pid in ranks:
                code = os.waitstatus_to_exitcode(status)
                server.rank_ended(ranks.pop(pid), "" if code == 0 else f"ended with {code}")
        if strangers:
            os.kill(strangers, signal.SIGKILL)
            os.waitpid(strangers, 0)
    return False


def _be_strange(address: str, seed: int) -> None:
    chance, kept = random.Random(seed), deque[socket.socket](maxlen=100)
    try:
        while True:
            kept.append(stranger(chance, parse_address(address)[1]))
            time.sleep(0.002)
    finally:
        os._exit(0)


def _shrink_shared_memory() -> None:
    """Gives this process and its children a /dev/shm of 64 KiB, and no nameless memory files."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "a mount namespace of its own")

    def memfd_create(*_: object) -> int:
        raise PermissionError("not allowed here")

    os.memfd_create = memfd_create


if __name__ == "__main__":
    np.ones(1)
    main()
