"""What the system says of a process: whether it is there, stopped, sleeping or computing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GONE, STOPPED, COMPUTES, SLEEPS = "is gone", "is stopped", "computes", "sleeps"
LOCK, DATA, DISK = "waits for a lock or another thread", "waits for data", "waits for a disk"
_PROC = Path("/proc")
_WAITS = (
    ("futex", LOCK),
    ("nanosleep", SLEEPS),
    ("pipe", DATA),
    ("unix_stream", DATA),
    ("tcp_recv", DATA),
    ("sk_wait", DATA),
    ("n_tty", DATA),
    ("poll", DATA),
    ("ep_poll", DATA),
    ("do_wait", "waits for a child process"),
)
"""What the kernel's function means in which a process sleeps, by a part of its name."""


def own_processes() -> Iterator[int]:
    """The processes of this user."""
    user = os.geteuid()
    for name in os.listdir(_PROC):
        if name.isdecimal():
            try:
                if os.stat(_PROC / name).st_uid == user:
                    yield int(name)
            except OSError:
                continue


def descriptors_called(process: int, name: str) -> Iterator[int]:
    """The descriptors of a process that are anonymous memory files of this name."""
    folder = _PROC / str(process) / "fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        try:
            if os.readlink(folder / number).startswith(f"/memfd:{name} "):
                yield int(number)
        except OSError:
            continue


def number_inside(process: int) -> int:
    """The number of a process in its own PID namespace, as it knows itself."""
    try:
        for line in (_PROC / str(process) / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError):
        pass
    return process


def ancestors(process: int) -> Iterator[int]:
    """The process that started this one, the one that started that, and so on."""
    while process > 1:
        fields = _stat(process)
        if not fields:
            return
        process = int(fields[1])
        yield process


def cpu_ticks(process: int) -> int:
    """The time that a process has computed, in the kernel's ticks."""
    fields = _stat(process)
    return int(fields[11]) + int(fields[12]) if fields else 0


def doing(process: int, ticks: int | None = None, seconds: float = 0.0) -> str:
    """What a process does, in words that follow its name.

    Args:
        process: Its number.
        ticks: Its ``cpu_ticks`` a moment ago, if they were looked at.
        seconds: How long ago that was.
    """
    fields = _stat(process)
    if not fields or fields[0] in "ZX":
        return GONE
    if fields[0] in "Tt":
        return STOPPED
    if ticks is not None and seconds:
        share = (cpu_ticks(process) - ticks) / os.sysconf("SC_CLK_TCK") / seconds
        if share > 0.3:
            return COMPUTES
    elif fields[0] == "R":
        return COMPUTES
    if fields[0] == "D":
        return DISK
    try:
        where = (_PROC / str(process) / "wchan").read_text()
    except OSError:
        where = ""
    return next((words for part, words in _WAITS if part in where), SLEEPS)


def _stat(process: int) -> list[str]:
    """A process's state, parent and so on; nothing if there is no such process."""
    try:
        return (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
