"""The ranks' output: told apart by a prefix, never mixed inside a line, and its end kept for a report.

A progress bar goes back to the start of its line by ``\\r`` and writes over what it wrote. In a file only
what remains of such a line is worth keeping, so a line is shown when it is complete, as it looks then, and
in between at most once a second. On a terminal rank 0's bytes pass through as they are, bar and colours
included, and a line of another rank is put above the bar.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

_TAIL_LINES = 400
_SHOW_AGAIN_S = 1.0
_LONGEST_LINE_NBYTES = 1 << 16
_ERASE_LINE = b"\r\x1b[K"
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("direct cause of the following exception", "another exception occurred")
_CONSEQUENCE = re.compile(
    r"^flagcx\.errors\.(PeerDied|PeerTimeout|Aborted|Communication)Error\b", re.MULTILINE
)

Write = Callable[[bytes], object]


class Lines:
    """One stream of one rank, cut into lines.

    Args:
        prefix: What every line begins with.
        write: Takes whole lines.
        clock: Gives the time in seconds.

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
        """The stream has ended: what there is of the last line is shown."""
        line, self._line = self._line, b""
        if line:
            self._show(_as_it_looks(line))

    def _shorten(self, line: bytes) -> bytes:
        """Drops what a bar has written over. Shows the bar now and then, and pieces of an endless line."""
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
    """What stands in a line after its carriage returns; one at the end has overwritten nothing yet."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen:
    """A terminal that rank 0 writes to as it likes, with the others' lines above what it is drawing.

    Args:
        write: Takes bytes for the terminal.
    """

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
    """The last lines of a rank's stderr, in which a traceback may stand."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._splitter = Lines(b"", self._keep)

    def _keep(self, line: bytes) -> None:
        self._lines.append(line.decode(errors="replace").rstrip("\n"))

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._splitter.feed(data)

    def finish(self) -> None:
        """The stream has ended."""
        self._splitter.finish()

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


def is_consequence(traceback: str) -> bool:
    """Whether a traceback only says that another rank failed."""
    return _CONSEQUENCE.search(traceback) is not None
