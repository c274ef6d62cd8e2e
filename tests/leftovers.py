"""What a run of tests may not leave behind: processes, and files."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

OURS = ("flagcx", "tmp", "ff")
"""How the names of our files and of tempfile's begin. Others, as Open MPI and PyTorch, leave files too."""
_END_S = 10.0


def check_nothing_is_left(place: Path) -> None:
    """Fails if a process that was started with ``place`` in its environment lives, or files are left there.

    Args:
        place: The directory for temporary files that all processes of the run were given.
    """
    deadline = time.monotonic() + _END_S
    while (processes := _processes(place)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    where_ranks_meet = f"flagcx-{os.getuid()}"  # the next job removes what killed ranks leave there
    files = [name for name in os.listdir(place) if name.startswith(OURS) and name != where_ranks_meet]
    assert not processes, f"the tests have left processes: {processes}"
    assert not files, f"the tests have left files: {sorted(files)}"


def _processes(place: Path) -> dict[int, str]:
    """The other processes that have ``place`` in their environment, by their command lines."""
    mark, found = os.fsencode(place), {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    if b"multiprocessing.resource_tracker" not in line:  # of this process; ends with it
                        found[int(folder.name)] = line.decode(errors="replace")[:200]
    return found
