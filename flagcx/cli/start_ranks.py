"""What the commands that start ranks on this host have in common: how many there are, errors, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
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
"""Errors whose message says all there is to know: where they were raised tells the user nothing."""


def count_ranks(ranks: int | None, gpu: bool, share_gpu: bool) -> int:
    """How many ranks to start.

    Args:
        ranks: As many as the user asks for; if 0 or None, one for each core, or each GPU.
        gpu: Whether arrays are on GPUs.
        share_gpu: Whether several ranks may use one.

    Raises:
        ArgumentError: ``share_gpu`` without ``gpu``.
        MissingDependencyError: Arrays shall be on GPUs, and CuPy, a driver or a GPU is missing.
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
    """The GPUs that this process sees."""
    from flagcx.kernels.cuda import load_cupy

    return int(load_cupy().cuda.runtime.getDeviceCount())


def launch_quietly(
    function: Callable[..., Any], ranks: int, args: Sequence[Any], share_gpu: bool = False
) -> list[Any]:
    """``fc.launch``, where Ctrl-C ends the ranks without a traceback of each: those tell nobody anything.

    Args:
        function: What every rank calls.
        ranks: How many ranks there are.
        args: Its arguments.
        share_gpu: Whether several ranks may use one GPU.

    Raises:
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
        LaunchError: A rank failed.
    """
    from flagcx._launch.notebook import launch

    with _quiet_when_interrupted():
        return launch(function, ranks, args, share_gpu=share_gpu)


@contextlib.contextmanager
def reporting_errors(command: str) -> Iterator[None]:
    """Ends the command with exit code 2 and a line for an error of our own, and with 130 for Ctrl-C.

    Args:
        command: Its name.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\nflagcx {command}: interrupted", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except FlagcxError as error:
        typer.echo(f"flagcx {command}: {_words(error)}", err=True)
        raise typer.Exit(2) from None


def _words(error: FlagcxError) -> str:
    """An error in a line where that says it all; else with the traceback of the rank that failed."""
    cause = error.__cause__
    return str(cause if isinstance(error, LaunchError) and isinstance(cause, _EXPLAINED) else error)


@contextlib.contextmanager
def _quiet_when_interrupted() -> Iterator[None]:
    """Within it, what ranks write to stderr after Ctrl-C is not passed on."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # It is ignored, or somebody else's to handle.
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
