"""The ranks' output: a prefix before each line, lines never mixed, and the end kept for a report.

A progress bar goes back to the start of its line by ``\\r`` and overwrites it. In a file only what remains
of such a line is worth keeping, so a line is shown when it is complete, as it looks then, and until then at
most once a second. On a terminal rank 0's bytes pass through unchanged, with bar and colours, and a line of
another rank is put above the bar.
"""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("flagcx")

_TAIL_LINES = 400
_SHOW_AGAIN_S = 1.0
_LONGEST_LINE_NBYTES = 1 << 16
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERASE_LINE = b"\r\x1b[K"
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("direct cause of the following exception", "another exception occurred")

Write = Callable[[bytes], object]


class Lines:
    """One stream of one rank, cut into lines, which ``write`` gets with the prefix before each.

    Example:
        >>> lines = Lines(b"[1] ", print)
        >>> lines.feed(b"half a li"), lines.feed(b"ne\\n10%\\r90%\\rdone\\n")
        b'[1] half a line\\n'
        b'[1] done\\n'
        (None, None)
    """

    def __init__(self, prefix: bytes, write: Write, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._write = write
        self._clock = clock
        self._line = b""
        self._shown_at = clock()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream, and writes the lines that they complete."""
        # The state comes first: an interrupt in the middle of a write must not have the line shown twice.
        *complete, self._line = (self._line + data).split(b"\n")
        for line in complete:
            self._show(_as_it_looks(line))
        if len(self._line) > _LONGEST_LINE_NBYTES or b"\r" in self._line:
            self._line = self._shorten(self._line)

    def finish(self) -> None:
        """Shows what there is of the last line, since the stream has ended."""
        line, self._line = self._line, b""
        if line:
            self._show(_as_it_looks(line))

    def _shorten(self, line: bytes) -> bytes:
        """Drops what a bar has overwritten. Shows the bar now and then, and parts of an endless line."""
        looks = _as_it_looks(line)
        if len(looks) > _LONGEST_LINE_NBYTES:
            self._show(looks)
            return b""
        if self._clock() - self._shown_at >= _SHOW_AGAIN_S:
            self._show(looks)
            self._shown_at = self._clock()
            return b""
        return looks + b"\r" if line.endswith(b"\r") else looks

    def _show(self, line: bytes) -> None:
        self._write(self._prefix + line + b"\n")


def _as_it_looks(line: bytes) -> bytes:
    """A line as its carriage returns leave it; one at the end has overwritten nothing yet."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class RankOutput:
    """Where the ranks' output goes: to ``writer(stream)``, line by line, with the rank before each.

    Args:
        size: How many ranks there are.
        prefix: Whether lines begin with their rank; those of a lone rank never do.
        writer: Makes what takes the lines of a rank's stdout (stream 1) or stderr (stream 2).
    """

    def __init__(self, size: int, prefix: bool, writer: Callable[[int], Write]) -> None:
        self._lines = {
            (rank, stream): Lines(b"[%d] " % rank if prefix and size > 1 else b"", writer(stream))
            for rank in range(size)
            for stream in (1, 2)
        }

    def streams(self, rank: int) -> dict[str, Any]:
        """A rank's stdin, stdout and stderr, as ``subprocess.Popen`` takes them."""
        return {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def say(self, text: str) -> None:
        """Writes a message of the launcher's own."""
        logger.warning("%s", text)

    def receive(self, rank: int, stream: int, data: bytes) -> None:
        """Takes the next bytes of a rank's stream."""
        self._lines[rank, stream].feed(data)

    def finish(self, rank: int, stream: int) -> None:
        """Called when a rank's stream has ended."""
        self._lines[rank, stream].finish()


class Screen:
    """A terminal to which rank 0 writes directly, with the other ranks' lines above its unfinished line."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._drawing = b""

    def pass_through(self, data: bytes) -> None:
        """Writes rank 0's bytes."""
        self._write(data)
        last = (self._drawing + data).rpartition(b"\n")[2]
        looks = _as_it_looks(last)[-_LONGEST_LINE_NBYTES:]
        self._drawing = looks + b"\r" if looks and last.endswith(b"\r") else looks

    def insert(self, lines: bytes) -> None:
        """Writes another rank's whole lines."""
        self._write(_ERASE_LINE + lines + self._drawing if self._drawing else lines)

    def finish(self) -> None:
        """Ends rank 0's last line, if it did not."""
        if self._drawing:
            self._write(b"\n")
        self._drawing = b""


class Tail:
    """The last lines of a rank's stderr, which may end with a traceback."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        splitter = Lines(b"", self._keep)
        self.feed, self.finish = splitter.feed, splitter.finish

    def _keep(self, line: bytes) -> None:
        # Python colours its tracebacks on a terminal.
        self._lines.append(_COLOUR.sub("", line.decode(errors="replace").rstrip("\n")))

    def traceback(self) -> str:
        """The last traceback, with those of the exceptions that led to it; "" if there is none."""
        lines = list(self._lines)
        starts = [index for index, line in enumerate(lines) if line.strip(" +|") == _TRACEBACK]
        if not starts:
            return ""
        first = starts.pop()
        while starts and any(
            phrase in line for line in lines[max(0, first - 3) : first] for phrase in _CHAIN
        ):
            first = starts.pop()
        return "".join(f"{line}\n" for line in lines[first:])

    def last_words(self, count: int = 20) -> str:
        """The traceback, or else the last ``count`` lines."""
        return self.traceback() or "".join(f"{line}\n" for line in list(self._lines)[-count:])
