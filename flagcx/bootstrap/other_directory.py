"""Finds rank 0's file where rank 0 has another directory for temporary files than this rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from flagcx.bootstrap.announcement import Place, is_private, read_file
from flagcx.bootstrap.environment import Identity, identify
from flagcx.errors import BootstrapError

_PROCESSES = Path("/proc")
_FIRST_S, _NEXT_S = 1.0, 1.0
"""After what time the processes of this host are looked at first, and again."""


class OtherDirectory:
    """The file in the directories that the process of rank 0 was started with.

    Args:
        identity: This rank.
        name: The file's name.
    """

    def __init__(self, identity: Identity, name: str) -> None:
        self._identity, self._name = identity, name
        self._look_at = time.monotonic() + _FIRST_S

    def places(self) -> list[Place]:
        """What the file says, now and then; nothing where it is not found."""
        if time.monotonic() < self._look_at:
            return []
        found = [
            place
            for environ in _environments()
            if self._is_of_rank_0(environ)
            for directory in _directories(environ)
            if is_private(directory)
            for place in read_file(directory / self._name)
        ]
        self._look_at = time.monotonic() + _NEXT_S
        return list(dict.fromkeys(found))

    def _is_of_rank_0(self, environ: Mapping[str, str]) -> bool:
        try:
            theirs = identify(environ)
        except BootstrapError:
            return False
        ours = self._identity
        return (theirs.rank, theirs.size, theirs.job) == (0, ours.size, ours.job)


def _environments() -> Iterator[dict[str, str]]:
    """The environments that this user's processes were started with."""
    for process in _PROCESSES.iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                raw = (process / "environ").read_bytes().decode(errors="surrogateescape")
                yield dict(line.split("=", 1) for line in raw.split("\0") if "=" in line)


def _directories(environ: Mapping[str, str]) -> list[Path]:
    """Where ``announcement.private_directory`` may be in another environment."""
    temporary = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    folders = [
        Path(folder) / f"flagcx-{os.getuid()}" for folder in (*temporary, "/tmp", "/var/tmp", "/usr/tmp")
    ]
    runtime = environ.get("XDG_RUNTIME_DIR")
    return [*([Path(runtime) / "flagcx"] if runtime else []), *folders]
