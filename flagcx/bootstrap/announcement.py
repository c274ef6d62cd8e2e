"""The file in which rank 0 tells the ranks of its host where the job's store is, and the store's key.

It lies in a directory that this user alone can enter, until all ranks are connected.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flagcx.bootstrap.sockets import parse_address
from flagcx.descriptors import occupy_standard_streams
from flagcx.errors import BootstrapError

_PROBE_LIMIT_S = 0.5


class Place(NamedTuple):
    """Where a store may be, and the key that it must know."""

    address: str
    authkey: bytes


def private_directory(environ: Mapping[str, str]) -> Path:
    """A directory of this user alone, made if it is not there.

    Raises:
        BootstrapError: It cannot be made, is another user's, or other users can enter it.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and is_private(Path(runtime)):
        directory = Path(runtime) / "flagcx"
    else:
        directory = _temporary_directory(environ) / f"flagcx-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise unusable(directory, error) from error
    if not is_private(directory):
        raise BootstrapError(
            f"{directory} must be a directory that user {os.getuid()} owns and nobody else can enter (mode "
            f"0700); remove it, or set XDG_RUNTIME_DIR to one that is"
        )
    return directory


def _temporary_directory(environ: Mapping[str, str]) -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise unusable(Path(environ.get("TMPDIR", "/tmp")), error) from error


def unusable(path: Path, error: OSError) -> BootstrapError:
    """The error for a file or directory that cannot be written."""
    return BootstrapError(
        f"{path}, by which the ranks of one host find each other, cannot be written ({error.strerror}); set "
        f"TMPDIR or XDG_RUNTIME_DIR to a directory that all ranks can write, or set "
        f"FLAGCX_STORE_ADDRESS=127.0.0.1:PORT and FLAGCX_STORE_KEY on all, or start them with flagcx run"
    )


def is_private(directory: Path) -> bool:
    """Whether a directory is this user's, and nobody else can enter it."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def write_file(path: Path, place: Place) -> None:
    """Writes the file whole or not at all, in place of one that a dead job of this name may have left."""
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    occupy_standard_streams()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump({"address": place.address, "key": place.authkey.hex()}, file)
    draft.replace(path)


def remove_stale_files(directory: Path) -> None:
    """Removes files whose store has ended. (A store listens before its file is there.)"""
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            for place in read_file(path):
                family, address = parse_address(place.address)
                with socket.socket(family) as probe:
                    probe.settimeout(_PROBE_LIMIT_S)
                    try:
                        probe.connect(address)
                    except ConnectionRefusedError:
                        path.unlink()


def read_file(path: Path) -> list[Place]:
    """Reads the file. One that a dead job left leads nowhere: its socket went with its process."""
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        return [Place(str(content["address"]), bytes.fromhex(content["key"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []
