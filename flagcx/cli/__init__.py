"""The command line: ``flagcx run | bench | topo | tune | simulate | explain | draw | status | doctor``.

Each command is a function in a module of its own, which is imported when the command is asked for. In its
usual form ``flagcx run`` is read without Typer, which takes longer to import than the ranks to start.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from flagcx.errors import FlagcxError
from flagcx.limits import explained

if TYPE_CHECKING:
    import typer

COMMANDS = ("run", "bench", "topo", "tune", "simulate", "explain", "draw", "status", "doctor")
_VERBATIM = {"allow_extra_args": True, "allow_interspersed_args": False}


def main() -> None:
    """Runs the command line. An error of flagcx is printed in one line, without a traceback."""
    try:
        with explained("the command cannot go on"):
            _run_command()
    except KeyboardInterrupt:  # as modules are imported; or a second one: the first ends the ranks
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more ends this process at once, and quietly
        raise SystemExit(128 + signal.SIGINT) from None
    except FlagcxError as error:
        print(f"flagcx: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run_command() -> None:
    from flagcx.cli.run_script import run_plainly

    code = run_plainly(sys.argv[1:])
    if code is not None:
        raise SystemExit(code)
    application(sys.argv[1] if len(sys.argv) > 1 else "")()


def application(asked: str = "") -> typer.Typer:
    """Makes the command line.

    Args:
        asked: The one command to make; all of ``COMMANDS`` if it is none of them.
    """
    import typer

    from flagcx.cli.version import several_commands

    made = typer.Typer(
        name="flagcx",
        help="Collective communication for NumPy and CuPy arrays.",
        no_args_is_help=True,
        add_completion=asked not in COMMANDS,
        pretty_exceptions_enable=False,
    )
    made.callback()(several_commands)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        command: Callable[..., None] = getattr(importlib.import_module(f"flagcx.cli.{name}"), name)
        settings = _VERBATIM if name == "run" else {}
        made.command(name, help=_help_of(command), context_settings=settings)(command)
    return made


def _help_of(command: Callable[..., None]) -> str:
    """A command's docstring with each paragraph in one line, to be broken where the terminal ends."""
    return "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
