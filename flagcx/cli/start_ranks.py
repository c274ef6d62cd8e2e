"""Starts the ranks of a command on this host: their number, their reports, errors and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import typer

from flagcx.errors import (
    ArgumentError,
    FlagcxError,
    LaunchError,
    MissingDependencyError,
    ResourceError,
    TopologyError,
)

_EXPLAINED = (ArgumentError, MissingDependencyError, ResourceError, TopologyError)
"""Errors whose message is enough: a traceback would tell the user nothing more."""
_LAST_REPORTS_S = 10.0
"""How long the last reports of a rank that has ended are waited for."""

Report = Callable[..., object]


def count_ranks(ranks: int | None, gpu: bool, share_gpu: bool) -> int:
    """How many ranks to start: ``ranks``, or if that is 0 or None, one for each core, or each GPU.

    Raises:
        ArgumentError: ``share_gpu`` without ``gpu``.
        MissingDependencyError: CuPy, a driver or a GPU is missing for arrays on GPUs.
        ResourceError: There are fewer GPUs than ranks, which may not share.
    """
    if share_gpu and not gpu:
        raise ArgumentError("--share-gpu was given without --gpu; NumPy arrays need no GPU")
    if not gpu:
        return ranks or len(os.sched_getaffinity(0))
    visible = count_gpus()
    if ranks and ranks > visible and not share_gpu:
        raise ResourceError(
            f"{ranks} ranks and {visible} visible GPUs; start at most {visible}, or add --share-gpu"
        )
    return ranks or visible


def count_gpus() -> int:
    """The number of GPUs that this process sees."""
    from flagcx.kernels.cuda import load_cupy

    return int(load_cupy().cuda.runtime.getDeviceCount())


def launch_quietly(
    function: Callable[..., Any], ranks: int, args: Sequence[Any], share_gpu: bool = False
) -> list[Any]:
    """``fc.launch``, where Ctrl-C ends the ranks without a traceback of each.

    Raises:
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
        LaunchError: A rank failed.
    """
    from flagcx._launch.notebook import launch

    with _quiet_when_interrupted():
        return launch(function, ranks, args, share_gpu=share_gpu)


def launch_reporting(
    function: Callable[[Any, Report], Any], ranks: int, task: Any, report: Report, share_gpu: bool
) -> Any:
    """Calls ``function(task, report)`` on all ranks, whose calls of ``report`` are carried out here.

    Returns:
        Rank 0's result, once all reports have come.
    """
    with _listening(report) as (address, key):
        return launch_quietly(_call_reporting, ranks, (function, task, address, key), share_gpu)[0]


def _call_reporting(function: Callable[[Any, Report], Any], task: Any, address: str, key: bytes) -> Any:
    with Client(address, family="AF_UNIX", authkey=key) as connection:
        return function(task, lambda *values: connection.send(values))


@contextlib.contextmanager
def _listening(report: Report) -> Iterator[tuple[str, bytes]]:
    """Yields address and key for the ranks' reports, which threads take; the last ones as the block ends.

    Nothing is unpickled that does not come from a process that knows the key.
    """
    threads: list[threading.Thread] = []

    def listen(connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), connection:
            while True:
                report(*connection.recv())

    def accept(listener: Listener) -> None:
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):  # A stranger.
                    threads.append(threading.Thread(target=listen, args=(listener.accept(),), daemon=True))
                    threads[-1].start()

    key = secrets.token_bytes(32)
    with _private_directory() as directory:
        address = os.path.join(directory, "progress")
        with Listener(address, family="AF_UNIX", backlog=256, authkey=key) as listener:
            threading.Thread(target=accept, args=(listener,), daemon=True).start()
            yield address, key
            for thread in threads:
                thread.join(_LAST_REPORTS_S)


def _private_directory() -> tempfile.TemporaryDirectory:
    try:
        return tempfile.TemporaryDirectory(prefix="flagcx-")
    except OSError as error:
        raise ResourceError(
            f"no temporary directory can be made, over which ranks report ({error}); set TMPDIR to one that "
            f"can be written"
        ) from error


@contextlib.contextmanager
def reporting_errors(command: str) -> Iterator[None]:
    """Ends the command with exit code 2 and a line for an error of flagcx, and with 130 for Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\nflagcx {command}: interrupted", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except FlagcxError as error:
        # One line where that is enough; else with the traceback of the rank that failed.
        enough = isinstance(error, LaunchError) and isinstance(error.__cause__, _EXPLAINED)
        typer.echo(f"flagcx {command}: {error.__cause__ if enough else error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _quiet_when_interrupted() -> Iterator[None]:
    """In its block, output of the ranks to stderr after Ctrl-C is dropped."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # The signal is ignored, or the caller handles it.
        return
    with contextlib.ExitStack() as silence:

        def interrupt(_number: int, _frame: object) -> None:
            silence.enter_context(contextlib.redirect_stderr(None))
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
