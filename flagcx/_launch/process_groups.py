"""Process groups: each rank leads one, to which the processes that it starts belong too.

``own_group`` makes a group, ``end_with_launcher`` ends it when the launcher dies, ``sweep`` ends what ended
ranks left running, ``reporting_children`` has the kernel keep how a rank ended until the launcher asks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_SETTLE_S = 0.3
_HEED_S = 1.0
_LOOK_AGAIN_S = 0.005


def own_group(reads: bool) -> dict[str, Any]:
    """Options that give a rank a process group of its own, so that it can be ended with its children.

    All ranks stay in one session where that is possible: Linux schedules each session as a group, and ranks
    that outnumber the cores give way to each other only within one. A rank that reads from
    a terminal gets a session of its own.

    Args:
        reads: Whether the rank has this process's standard input.
    """
    if sys.version_info >= (3, 11) and not (reads and os.isatty(0)):
        return {"process_group": 0}
    return {"start_new_session": True}


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None on a kernel without them."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def end_with_launcher(pipe: int) -> None:
    """Has the kernel kill this process's group when the launcher dies, however it dies.

    The launcher holds the writing end of the pipe, whose reading end stays open here. When the launcher ends,
    the kernel closes the writing end and signals the owner that is set here. That needs no thread, works
    while the interpreter is busy in C, and reaches the processes that this rank started.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # It died before the signal was set.
        os.killpg(os.getpgrp(), signal.SIGKILL)


def sweep(groups: Sequence[int]) -> None:
    """Ends the processes that ended ranks left running: waits a moment, then SIGTERM, then SIGKILL."""
    remaining = [group for group in groups if has_members(group)]
    for number, patience_s in ((0, _SETTLE_S), (signal.SIGTERM, _HEED_S), (signal.SIGKILL, _HEED_S)):
        deadline = time.monotonic() + patience_s
        for group in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        while remaining and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
            remaining = [group for group in remaining if has_members(group)]


@contextlib.contextmanager
def reporting_children() -> Iterator[None]:
    """In its block exit codes are kept, also where the program that started this one ignores SIGCHLD.

    Without it a rank that failed would seem to have ended well, and so would what the ranks start.
    """
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def is_stopped(pid: int) -> bool:
    """Whether a child process is stopped by a signal, such as SIGSTOP."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def has_members(group: int) -> bool:
    """Whether a process group has a member that is more than a zombie."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, its_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
