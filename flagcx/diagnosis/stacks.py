"""The Python stacks of all threads of this process, as plain values."""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_OWN = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_MOST_THREADS, _MOST_FRAMES, _MOST_TEXT = 32, 40, 200


def stacks() -> list[dict[str, Any]]:
    """The stacks of all threads but those of the recorder, the main thread first.

    Returns:
        For each thread its ``name`` and ``frames``, the innermost last: ``file``, ``line``, ``function`` and
        the ``text`` of the line.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda pair: pair[0] != main):
        frames = _frames(frame)
        if frames and not names.get(ident, "").startswith("flagcx-recorder"):
            found.append({"name": names.get(ident, f"thread {ident}"), "frames": frames})
    return found[:_MOST_THREADS]


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """The frames of one thread, less those that write the record."""
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        if found or not code.co_filename.startswith(_OWN):
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()[:_MOST_TEXT]
            found.append(
                {
                    "file": code.co_filename,
                    "line": frame.f_lineno,
                    "function": code.co_name,
                    "text": text,
                    "own": code.co_filename.startswith(_PACKAGE),
                }
            )
        frame = frame.f_back
    return found[::-1]
