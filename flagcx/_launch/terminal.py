"""The launcher's own stdin, stdout and stderr, which its ranks share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import termios
from collections.abc import Callable
from typing import Any

from flagcx._launch.output import RankOutput, Screen, Write
from flagcx._launch.ranks import Ranks
from flagcx.descriptors import occupy_standard_streams


class Terminal(RankOutput):
    """The launcher's own stdin, stdout and stderr, shared by all ranks.

    On a terminal rank 0 gets pseudo-terminals of the same size, so that its progress bars and colours are
    those of a script that runs alone.
    """

    def __init__(self, size: int, prefix: bool) -> None:
        occupy_standard_streams(os.devnull, os.O_RDWR)
        self.interrupted = False
        self._told: set[int] = set()
        self._masters: dict[int, int] = {}
        self._own_ends: list[int] = []
        self._keyboard: _Keyboard | None = None
        self._passes_through = {stream: os.isatty(stream) for stream in (1, 2)}
        self._screen = Screen(self._writer(1 if self._passes_through[1] else 2))
        super().__init__(size, prefix, self._line_writer)

    def _line_writer(self, stream: int) -> Write:
        return self._screen.insert if self._passes_through[stream] else self._writer(stream)

    def streams(self, rank: int) -> dict[str, Any]:
        chosen = super().streams(rank)
        if rank == 0:
            chosen["stdin"] = self._stdin()
            for stream, name in ((1, "stdout"), (2, "stderr")):
                if self._passes_through[stream]:
                    chosen[name] = self._pseudo_terminal(stream)
        return chosen

    def serve(self, job: Ranks) -> None:
        """Begins to read rank 0's pseudo-terminals, and the keyboard for it."""
        for own_end in self._own_ends:
            os.close(own_end)
        self._own_ends.clear()
        for stream, master in self._masters.items():
            job.read_from(0, stream, os.dup(master))
        if self._keyboard is not None:
            self._keyboard.serve(job)

    def receive(self, rank: int, stream: int, data: bytes) -> None:
        if self.interrupted and stream == 2:
            return  # Every rank's traceback of KeyboardInterrupt would be of no use.
        if rank == 0 and self._passes_through[stream]:
            self._screen.pass_through(data)
        else:
            super().receive(rank, stream, data)

    def finish(self, rank: int, stream: int) -> None:
        if not (self.interrupted and stream == 2):
            super().finish(rank, stream)

    def say(self, text: str) -> None:
        """Writes a message of the launcher's own to stderr."""
        self._screen.finish()
        self._writer(2)(f"\nflagcx run: {text}\n".encode())

    def resume(self, job: Ranks) -> None:
        """Reads the keyboard again after the launcher was stopped, and takes the terminal's present size."""
        if self._keyboard is not None:
            self._keyboard.serve(job)
        self.resize(job)

    def resize(self, job: Ranks) -> None:
        """Passes the terminal's new size on to rank 0."""
        for stream, master in self._masters.items():
            _copy_size(stream, master)
        job.signal_rank(0, signal.SIGWINCH)

    def close(self) -> None:
        """Closes the descriptors that were opened for rank 0."""
        self._screen.finish()
        for descriptor in [*self._masters.values(), *self._own_ends]:
            os.close(descriptor)
        self._masters.clear()
        self._own_ends.clear()
        if self._keyboard is not None:
            self._keyboard.close()

    def _writer(self, stream: int) -> Write:
        """Makes what writes to a stream. What the stream doesn't take is dropped: no job ends for it."""

        def write(data: bytes) -> None:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(stream, view) :]
                except BlockingIOError:
                    select.select([], [stream], [])
                except OSError as error:  # A full disk, a reader that has ended, a terminal that is gone.
                    self._tell_of_loss(stream, error)
                    return

        return write

    def _tell_of_loss(self, stream: int, error: OSError) -> None:
        if stream not in self._told:
            self._told.add(stream)
            name = {1: "stdout", 2: "stderr"}[stream]
            self.say(f"{name} takes no more output ({error.strerror}); the ranks go on without it")

    def _pseudo_terminal(self, stream: int) -> int:
        master, own_end = os.openpty()
        self._masters[stream] = master
        self._own_ends.append(own_end)
        attributes = termios.tcgetattr(own_end)
        attributes[1] &= ~termios.OPOST  # The real terminal processes the output.
        termios.tcsetattr(own_end, termios.TCSANOW, attributes)
        _copy_size(stream, master)
        return own_end

    def _stdin(self) -> int:
        if not os.isatty(0):
            return 0
        # Rank 0 leads a session of its own and so may not read this terminal: the launcher passes input on.
        reading, writing = os.pipe()
        self._own_ends.append(reading)
        self._keyboard = _Keyboard(writing)
        return reading


class _Keyboard:
    """Passes the input from the keyboard on to rank 0."""

    def __init__(self, writing: int) -> None:
        self._writing: int | None = writing
        self._stop: Callable[[], object] | None = None
        os.set_blocking(writing, False)

    def serve(self, job: Ranks) -> None:
        """Begins to read the keyboard, or goes on with it."""
        if self._stop is None and self._writing is not None:
            job.selector.register(0, 1, self._read)
            self._stop = lambda: job.selector.unregister(0)

    def _read(self) -> None:
        data = b""
        with contextlib.suppress(OSError):  # The terminal is gone.
            if os.tcgetpgrp(0) != os.getpgrp():
                self._pause()  # A job in the background may not read; trying would stop the whole launcher.
                return
            data = os.read(0, 4096)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            if data and self._writing is not None:
                os.write(self._writing, data)
        if not data:
            self._pause()
            self.close()

    def _pause(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None

    def close(self) -> None:
        """Ends rank 0's input."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None


def _copy_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
