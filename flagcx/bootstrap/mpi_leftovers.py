"""Files that Open MPI keeps in /dev/shm, 16 MiB for each rank, and leaves there where it does not end."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_NAMES = "sm_segment.*", "vader_segment.*"
_PROCESSES = Path("/proc")
_YOUNG_S, _HIDDEN_S = 60.0, 86400.0
"""How old a file is at least that is removed: where all processes can be seen, and where some cannot."""
_FIRST_NAMESPACE = "pid:[4026531836]"


def remove_own() -> None:
    """Removes the files of this process's MPI as it ends, whose ranks won't open them any more."""
    for path in _mapped(_PROCESSES / "self"):
        with contextlib.suppress(OSError):
            path.unlink()


def remove_ownerless() -> int:
    """Removes this user's files that no process has mapped, and returns how many bytes that frees.

    A process of another container that shares /dev/shm may be hidden from this one, so that a file must be a
    day old then.
    """
    candidates = [path for name in _NAMES for path in _SHARED_MEMORY.glob(name)]
    if not candidates:
        return 0
    used = set[Path]()
    for process in _PROCESSES.iterdir():
        if process.name.isdecimal():
            # One that has just ended, or has more rights than this user's programs, as ranks have not.
            with contextlib.suppress(OSError):
                used |= _mapped(process)
    hidden = True
    with contextlib.suppress(OSError):
        hidden = os.readlink(_PROCESSES / "self/ns/pid") != _FIRST_NAMESPACE
    oldest, freed = time.time() - (_HIDDEN_S if hidden else _YOUNG_S), 0
    for path in candidates:
        with contextlib.suppress(OSError):
            about = path.lstat()
            if path not in used and about.st_uid == os.getuid() and about.st_mtime < oldest:
                path.unlink()
                freed += about.st_size
    return freed


def _mapped(process: Path) -> set[Path]:
    """The files of MPI that a process has mapped."""
    found = set[Path]()
    for line in (process / "maps").read_text(errors="replace").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.parent == _SHARED_MEMORY and any(path.match(name) for name in _NAMES):
            found.add(path)
    return found
