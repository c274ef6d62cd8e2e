"""The command line: ``flagcx run | bench | topo | tune | simulate | explain | status | doctor``.

Each command is a function in a module of its own, which is imported when the command is asked for, so that
``flagcx run`` starts its ranks before anything heavy is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import typer

from flagcx._version import __version__
from flagcx.errors import FlagcxError

COMMANDS = ("run", "bench", "topo", "tune", "simulate", "explain", "status", "doctor")
_VERBATIM = {"allow_extra_args": True, "allow_interspersed_args": False}


def main() -> None:
    """Runs the command line. An error of flagcx is printed in one line, without a traceback."""
    try:
        application(sys.argv[1] if len(sys.argv) > 1 else "")()
    except FlagcxError as error:
        print(f"flagcx: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def application(asked: str = "") -> typer.Typer:
    """Makes the command line.

    Args:
        asked: The one command to make; all of ``COMMANDS`` if it is none of them.
    """
    made = typer.Typer(
        name="flagcx",
        help="Collective communication for NumPy and CuPy arrays.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    made.callback()(_several_commands)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        command: Callable[..., None] = getattr(importlib.import_module(f"flagcx.cli.{name}"), name)
        made.command(name, context_settings=_VERBATIM if name == "run" else {})(command)
    return made


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flagcx {__version__}")
        raise typer.Exit


def _several_commands(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_say_version, help="Show the version."
    ),
) -> None:
    """Collective communication for NumPy and CuPy arrays."""
