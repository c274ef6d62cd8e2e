"""The command line: ``flagcx run | bench | topo | tune | simulate | explain | doctor | ...``.

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

COMMANDS = ("run", "bench", "topo", "tune", "simulate", "explain", "doctor")
_VERBATIM = {"allow_extra_args": True, "allow_interspersed_args": False}


def main() -> None:
    """Runs the command line. An error of flagcx is printed in one line, without a traceback."""
    try:
        application(sys.argv[1] if len(sys.argv) > 1 else "")()
    except FlagcxError as error:
        print(f"flagcx: {error}", file=sys.stderr)
        raise SystemExit(1) from None


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
        settings = _VERBATIM if name == "run" else {}
        made.command(name, context_settings=settings)(_run if name == "run" else _function(name))
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


def _function(name: str) -> Callable[..., None]:
    return getattr(importlib.import_module(f"flagcx.cli.{name}"), name)


def _run(
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
    from flagcx.cli.run import run

    code = run(
        script,
        context.args,
        ranks=ranks or None,
        module=module,
        timeout_s=timeout or None,
        prefix=prefix,
        share_gpu=share_gpu,
    )
    raise SystemExit(code)
