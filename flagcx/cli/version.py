"""``flagcx --version``, and what all commands have in common."""

from __future__ import annotations

import typer

from flagcx._version import __version__


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flagcx {__version__}")
        raise typer.Exit


def several_commands(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_say_version, help="Show the version."
    ),
) -> None:
    """Collective communication for NumPy and CuPy arrays."""
