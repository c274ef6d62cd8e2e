"""A function call on all ranks: the launcher's side of ``rank_main``."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcx._launch.failure import Failure, name_ranks
from flagcx._launch.output import RankOutput
from flagcx._launch.rank_main import PickledCall, Success, read_file, write_file
from flagcx._launch.ranks import Command, Ranks
from flagcx.descriptors import occupy_standard_streams
from flagcx.errors import ArgumentError, LaunchError

logger = logging.getLogger("flagcx")


def call_on_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    size: int,
    environ: Mapping[str, str],
    timeout_s: float | None,
) -> list[Any]:
    """Calls a function on ``size`` ranks and returns their results; see ``notebook.launch``.

    Raises:
        ArgumentError: The function or its arguments cannot be pickled.
        LaunchError: A rank failed.
    """
    content = _pickle_call(function, args, kwargs)
    with contextlib.ExitStack() as resources:
        call_file = _memory_file(resources)
        write_file(call_file, content)
        result_files = [_memory_file(resources) for _ in range(size)]
        commands = [_command(call_file, result_file) for result_file in result_files]
        ranks = resources.enter_context(Ranks(commands, environ, RankOutput(size, True, _writer)))
        try:
            ranks.start()
            late = ranks.wait(timeout_s)
        except KeyboardInterrupt:
            ranks.end(signal.SIGINT)
            raise
        outcomes = [_read_outcome(result_file) for result_file in result_files]
    if late:
        raise LaunchError(
            f"{name_ranks(late)} ended: not done within {timeout_s:g} s; allow more by timeout_s",
            rank=late[0],
            traceback=ranks.tails[late[0]].last_words(),
        )
    _check(ranks, outcomes)
    return [pickle.loads(outcome.value) for outcome in outcomes if isinstance(outcome, Success)]


def _check(ranks: Ranks, outcomes: Sequence[Success | Failure | None]) -> None:
    """Raises the error to blame: the first exception that does not itself blame another rank."""
    raised = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
    raised.sort(key=lambda pair: (pair[1].is_consequence, pair[1].at))
    silent = [ended for ended in ranks.exits.values() if outcomes[ended.rank] is None]
    silent.sort(key=lambda ended: ended.after_signal)
    if raised and (not raised[0][1].is_consequence or not silent or silent[0].after_signal):
        rank, failure = raised[0]
        raise failure.launch_error(rank) from _exception_of(failure)
    if silent:
        ended, words = silent[0], ranks.tails[silent[0].rank].last_words()
        raise LaunchError(
            f"rank {ended.rank} ended without a result: {ended.describe()}"
            + (f"\n\n{words}" if words else ""),
            rank=ended.rank,
            exit_code=ended.code,
            traceback=words,
        )


def _writer(stream: int) -> Callable[[bytes], None]:
    """Writes lines to this program's own sys.stdout or sys.stderr, as a notebook shows them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lost = False

    def write(line: bytes) -> None:
        nonlocal lost
        target = sys.stdout if stream == 1 else sys.stderr
        if target is not None:
            try:
                target.write(decoder.decode(line))
                target.flush()
            except (OSError, ValueError) as error:  # A full disk, a reader that has ended, a closed stream.
                if not lost:
                    logger.warning("the ranks go on, but output of theirs is lost: %s", error)
                lost = True

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
    return pickle.dumps(PickledCall([os.path.abspath(entry) for entry in sys.path], sources, call))


def _command(call_file: int, result_file: int) -> Command:
    home = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.insert(0, {home!r}); from flagcx._launch.rank_main import main; "
        f"main(*map(int, sys.argv[1:]))"
    )
    arguments = (sys.executable, "-c", code, str(call_file), str(result_file))
    return Command(arguments, (call_file, result_file), guards_itself=True)


def _memory_file(resources: contextlib.ExitStack) -> int:
    occupy_standard_streams()
    descriptor = os.memfd_create("flagcx-launch")
    resources.callback(os.close, descriptor)
    return descriptor


def _read_outcome(descriptor: int) -> Success | Failure | None:
    """A rank's outcome; None if the rank ended before it had written all of it."""
    try:
        return pickle.loads(read_file(descriptor))
    except (EOFError, pickle.UnpicklingError):
        return None


def _exception_of(failure: Failure) -> BaseException | None:
    try:
        return None if failure.exception is None else pickle.loads(failure.exception)
    except Exception:  # Its class may want other arguments, or not be known here.
        return None
