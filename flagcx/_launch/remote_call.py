"""A function call on all ranks: the launcher's side of ``rank_main``."""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flagcx._launch.output import Lines
from flagcx._launch.rank_main import Failure, Setting, Success, read_file, write_file
from flagcx._launch.ranks import Command, Ending, Exit, Output, Ranks
from flagcx.errors import ArgumentError, LaunchError

_CONSEQUENCES = frozenset(
    f"flagcx.errors.{name}"
    for name in ("PeerDiedError", "PeerTimeoutError", "AbortedError", "CommunicationError")
)


class RemoteCall:
    """Calls a function on all ranks. A context manager: on leaving it, every process is gone.

    Args:
        function: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        size: How many ranks there are.
        environ: The environment that the ranks begin with.

    Raises:
        ArgumentError: The function or its arguments cannot be pickled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        size: int,
        environ: Mapping[str, str],
    ) -> None:
        setting = _pickle_call(function, args, kwargs)
        with contextlib.ExitStack() as resources:
            setting_file = _memory_file(resources)
            write_file(setting_file, setting)
            self._results = [_memory_file(resources) for _ in range(size)]
            commands = [_command(setting_file, result) for result in self._results]
            self._ranks = resources.enter_context(Ranks(commands, environ, _Printer(size)))
            self._resources = resources.pop_all()

    def results(self, timeout_s: float | None) -> list[Any]:
        """Runs the ranks and returns what each gave back.

        Raises:
            LaunchError: One failed.
        """
        try:
            self._ranks.start()
            ending = self._ranks.wait(timeout_s)
        except KeyboardInterrupt:
            self._ranks.end(signal.SIGINT)
            raise
        outcomes = [_read_outcome(result) for result in self._results]
        self._check(ending, outcomes, timeout_s)
        return [pickle.loads(outcome.value) for outcome in outcomes if isinstance(outcome, Success)]

    def close(self) -> None:
        """Ends the ranks and lets go of everything."""
        self._resources.close()

    def __enter__(self) -> RemoteCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(
        self, ending: Ending, outcomes: list[Success | Failure | None], timeout_s: float | None
    ) -> None:
        """Raises the error to blame: the first exception that does not itself blame another rank."""
        if ending.late:
            raise self._lateness(ending, timeout_s)
        raised = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
        raised.sort(key=lambda pair: (pair[1].kind in _CONSEQUENCES, pair[1].at))
        silent = [ended for ended in ending.exits if outcomes[ended.rank] is None]
        silent.sort(key=lambda ended: ended.after_signal)
        if raised and (raised[0][1].kind not in _CONSEQUENCES or not silent or silent[0].after_signal):
            raise _error_of(*raised[0]) from _exception_of(raised[0][1])
        if silent:
            raise self._silent_death(silent[0])

    def _lateness(self, ending: Ending, timeout_s: float | None) -> LaunchError:
        names = ", ".join(map(str, ending.late))
        return LaunchError(
            f"rank {names} did not end within {timeout_s:g} s and was killed; allow more by timeout_s",
            rank=ending.late[0],
            traceback=self._ranks.tails[ending.late[0]].last_words(),
        )

    def _silent_death(self, ended: Exit) -> LaunchError:
        words = self._ranks.tails[ended.rank].last_words()
        return LaunchError(
            f"rank {ended.rank} ended without a result: {ended.describe()}"
            + (f"\n\n{words}" if words else ""),
            rank=ended.rank,
            exit_code=ended.code,
            traceback=words,
        )


class _Printer(Output):
    """Writes the ranks' lines to this program's own sys.stdout and sys.stderr, as a notebook shows them."""

    def __init__(self, size: int) -> None:
        self._lines = {}
        for rank in range(size):
            prefix = b"" if size == 1 else f"[{rank}] ".encode()
            for stream, name in ((1, "stdout"), (2, "stderr")):
                self._lines[rank, stream] = Lines(prefix, _writer(name))

    def receive(self, rank: int, stream: int, data: bytes) -> None:
        self._lines[rank, stream].feed(data)

    def finish(self, rank: int, stream: int) -> None:
        self._lines[rank, stream].finish()


def _writer(name: str) -> Callable[[bytes], None]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(line: bytes) -> None:
        target = getattr(sys, name)
        if target is not None:
            target.write(decoder.decode(line))
            target.flush()

    return write


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    from flagcx._launch.pickling import dump_with_sources

    try:
        call, sources = dump_with_sources((function, args, kwargs))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ArgumentError(
            f"{name} or its arguments cannot be sent to the ranks ({error}); they must not hold open files, "
            f"locks or communicators: make those inside the function"
        ) from error
    return pickle.dumps(Setting([os.path.abspath(entry) for entry in sys.path], sources, call))


def _command(setting_file: int, result_file: int) -> Command:
    home = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.insert(0, {home!r}); from flagcx._launch.rank_main import main; "
        f"main(*map(int, sys.argv[1:]))"
    )
    arguments = (sys.executable, "-c", code, str(setting_file), str(result_file))
    return Command(arguments, (setting_file, result_file), guards_itself=True)


def _memory_file(resources: contextlib.ExitStack) -> int:
    descriptor = os.memfd_create("flagcx-launch")
    resources.callback(os.close, descriptor)
    return descriptor


def _read_outcome(descriptor: int) -> Success | Failure | None:
    """What a rank wrote; None if it ended before it had written all of it."""
    try:
        return pickle.loads(read_file(descriptor))
    except (EOFError, pickle.UnpicklingError):
        return None


def _error_of(rank: int, failure: Failure) -> LaunchError:
    return LaunchError(
        f"rank {rank} raised {failure.kind}: {failure.message}\n\n{failure.traceback}",
        rank=rank,
        exit_code=1,
        traceback=failure.traceback,
    )


def _exception_of(failure: Failure) -> BaseException | None:
    try:
        return None if failure.exception is None else pickle.loads(failure.exception)
    except Exception:  # Its class may want other arguments, or not be known here.
        return None
