"""``flagcx run``: a script on several ranks of this host, watched from one terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

from flagcx._launch.output import RankOutput, Screen, Write
from flagcx._launch.ranks import Command, Exit, Ranks
from flagcx._launch.share_gpu import sharing
from flagcx.config import environment
from flagcx.errors import LaunchError

_TIMED_OUT = 124
_RULE = "=" * 24
_INTERPRETER = re.compile(r"python[\d.]*")


class _Ended(BaseException):
    """A signal told the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="The script, or after -m the module; its own arguments follow."),
    ranks: int = typer.Option(0, "-n", "--ranks", min=0, help="How many ranks; 0: one for each core."),
    module: bool = typer.Option(False, "-m", "--module", help="SCRIPT is the name of a module."),
    timeout: float = typer.Option(
        0.0, "--timeout", min=0.0, help="End the ranks after so many seconds; 0: never."
    ),
    prefix: bool = typer.Option(
        True, "--prefix/--no-prefix", help="Put the rank before each line of output."
    ),
    share_gpu: bool = typer.Option(False, "--share-gpu", help="Let several ranks use one GPU."),
) -> None:
    """Run a Python script, or a module, on several ranks of this host.

    Lines of output have their rank before them. If a rank fails, all are ended, its traceback is shown
    last, and its exit code is returned.
    """
    raise SystemExit(run_script(script, context.args, ranks, module, timeout, prefix, share_gpu))


def run_script(
    script: str,
    arguments: Sequence[str],
    ranks: int = 0,
    module: bool = False,
    timeout_s: float = 0.0,
    prefix: bool = True,
    share_gpu: bool = False,
) -> int:
    """Runs a script as ``flagcx run`` does, whose options its arguments are.

    Returns:
        The exit code for the shell: 0; or that of the rank that failed first, 128 + n if signal n killed it;
        124 after the time-out; 130 after Ctrl-C.

    Raises:
        LaunchError: The ranks cannot be started.
    """
    if not module:
        _check_script(script)
    size = ranks or len(os.sched_getaffinity(0))
    program = ("-m", script) if module else (script,)
    command = Command((sys.executable, *program, *arguments))
    terminal = _Terminal(size, prefix)
    with (
        sharing(environment(), share_gpu) as environ,
        Ranks([command] * size, environ, terminal) as job,
    ):
        try:
            # Handlers come after the start: the ranks must not inherit a signal that is ignored.
            job.start()
            with _signals(lambda number: terminal.resize(job)):
                terminal.serve(job)
                late = job.wait(timeout_s or None)
        except KeyboardInterrupt:
            terminal.interrupted = True
            job.end(signal.SIGINT)
            terminal.say("interrupted; all ranks have ended")
            return 128 + signal.SIGINT
        except _Ended as error:
            job.end(signal.SIGTERM)
            return 128 + error.number
        except BrokenPipeError:
            return _output_is_gone()
        finally:
            terminal.close()
        if late:
            who, were = ("rank", "was") if len(late) == 1 else ("ranks", "were")
            names = ", ".join(map(str, late))
            terminal.say(f"{who} {names} had not ended after {timeout_s:g} s, and {were} ended (--timeout)")
            return _TIMED_OUT
        failed = job.first_failure()
        if failed is None:
            return 0
        terminal.say(_describe(failed, job))
        return failed.code if failed.code > 0 else 128 - failed.code


def _check_script(script: str) -> None:
    is_program = os.path.isfile(script) and os.access(script, os.X_OK)
    if _INTERPRETER.fullmatch(os.path.basename(script)) and (is_program or not os.path.exists(script)):
        raise LaunchError(
            f"{script!r} is a Python interpreter, which flagcx run starts itself; leave it out: "
            f"flagcx run -n 2 script.py",
            rank=0,
        )
    if not os.path.exists(script):
        raise LaunchError(f"there is no script {script!r}; to run a module, put -m before its name", rank=0)


def _describe(failed: Exit, job: Ranks) -> str:
    heading = f"rank {failed.rank} of {job.size} failed first: {failed.describe()}"
    traceback, words = job.tails[failed.rank].traceback(), job.tails[failed.rank].last_words()
    if not words:
        return heading
    what = "Its traceback" if traceback else "The end of its error output"
    return f"{heading}\n{_RULE} {what} (rank {failed.rank}) {_RULE}\n{words.rstrip()}"


def _output_is_gone() -> int:
    """Ends as other programs do when the reader of their output has ended, such as ``head``: silently."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return 128 + signal.SIGPIPE


class _Terminal(RankOutput):
    """The launcher's own stdin, stdout and stderr, shared by all ranks.

    On a terminal rank 0 gets pseudo-terminals of the same size, so that its progress bars and colours are
    those of a script that runs alone.
    """

    def __init__(self, size: int, prefix: bool) -> None:
        self.interrupted = False
        self._masters: dict[int, int] = {}
        self._own_ends: list[int] = []
        self._keyboard: _Keyboard | None = None
        self._passes_through = {stream: os.isatty(stream) for stream in (1, 2)}
        self._screen = Screen(_writer(1 if self._passes_through[1] else 2))
        super().__init__(size, prefix, self._line_writer)

    def _line_writer(self, stream: int) -> Write:
        return self._screen.insert if self._passes_through[stream] else _writer(stream)

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
        _writer(2)(f"\nflagcx run: {text}\n".encode())

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
        self._stop: Callable[[], object] = lambda: None
        os.set_blocking(writing, False)

    def serve(self, job: Ranks) -> None:
        """Begins to read the keyboard."""
        job.selector.register(0, 1, self._read)
        self._stop = lambda: job.selector.unregister(0)

    def _read(self) -> None:
        # A job in the background may not read the keyboard; trying would stop the whole launcher.
        data = os.read(0, 4096) if os.tcgetpgrp(0) == os.getpgrp() else b""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            if data and self._writing is not None:
                os.write(self._writing, data)
        if not data:
            self._stop()
            self.close()

    def close(self) -> None:
        """Ends rank 0's input."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None


def _writer(stream: int) -> Write:
    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(stream, view) :]

    return write


def _copy_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


@contextlib.contextmanager
def _signals(resized: Callable[[int], None]) -> Iterator[None]:
    """In its block the signals that would end the launcher at once raise, so that it can end its ranks."""

    def end(number: int, _frame: object) -> None:
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, _frame: resized(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
