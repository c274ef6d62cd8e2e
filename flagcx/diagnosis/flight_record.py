"""The file that holds a job's flight record: one JSON object, to which ranks add one record after another.

::

    {"format": "flagcx flight record", "job": ..., "size": ..., "records": [
    {"rank": 0, ...},
    {"rank": 1, ...}
    ]}

A rank adds its record by one write over the last line, with the file locked. A file that has grown too large
begins anew, and the oldest files of a directory are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flagcx.descriptors import occupy_standard_streams
from flagcx.errors import ArgumentError

FORMAT = "flagcx flight record"
MOST_FILES = 20
_MOST_NBYTES = 64 << 20
_TAIL = b"\n]}\n"
_LOCK_S = 2.0


def add(path: Path, job: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Adds a record to a file, which is made if it is not there, with its directory.

    Args:
        path: The file.
        job: What is said of the job, if this is the first record.
        record: The record: plain values.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = json.dumps(record).encode()
    with _locked(path) as descriptor:
        end = os.fstat(descriptor).st_size
        whole = os.pread(descriptor, len(_TAIL), max(end - len(_TAIL), 0)) == _TAIL
        if whole and end + len(line) <= _MOST_NBYTES:
            text, at = b",\n" + line + _TAIL, end - len(_TAIL)
        else:
            head = json.dumps({"format": FORMAT, "version": 1, **job})[:-1]
            text, at = f'{head}, "records": [\n'.encode() + line + _TAIL, 0
            os.ftruncate(descriptor, 0)
        while text:
            written = os.pwrite(descriptor, text, at)
            text, at = text[written:], at + written
    if at == 0 or not whole:
        _remove_oldest(path.parent)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    occupy_standard_streams()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_oldest(directory: Path) -> None:
    found = []
    for path in directory.glob("flagcx-*.json"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[:-MOST_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()


def read(path: Path) -> dict[str, Any]:
    """Reads a file.

    Returns:
        What it says of the job, and its ``records``.

    Raises:
        ArgumentError: It cannot be read, or is no flight record.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read as a flight record: {error}") from None
    known = isinstance(found, dict) and found.get("format") == FORMAT
    if not known or not isinstance(found.get("records"), list):
        raise ArgumentError(f"{path} is no flight record, which is a JSON object whose format is {FORMAT!r}")
    return found
