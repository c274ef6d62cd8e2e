"""``--load my_algorithms.py``: a user's own algorithms for a command, and for the ranks that it starts."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from flagcx.errors import ArgumentError, FlagcxError

Load = Annotated[
    list[Path] | None,
    typer.Option(
        "--load",
        help="A Python file that registers algorithms of your own by fc.register; may be repeated. Those of "
        "packages (entry points flagcx.algorithms) are found without it.",
    ),
]
"""The option of a command."""


def load_algorithms(paths: Sequence[Path] | None) -> None:
    """Runs files that register algorithms, once each, as modules of their names.

    Raises:
        ArgumentError: A file is not there, raises, or registers nothing.
    """
    from flagcx.algorithms import catalogue

    for path in paths or ():
        known = set(catalogue())
        if not path.is_file():
            raise ArgumentError(f"--load {path}: there is no such file")
        try:
            runpy.run_path(str(path), run_name=path.stem)
        except FlagcxError as error:
            raise ArgumentError(f"--load {path}: {error}") from error
        except Exception as error:
            raise ArgumentError(f"--load {path}: it raised {type(error).__name__}: {error}") from error
        if set(catalogue()) == known:
            raise ArgumentError(
                f"--load {path}: it registers no algorithm; expected calls of "
                f"fc.register(name, collective, function)"
            )


def with_algorithms(paths: Sequence[Path] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for the ranks of a command, each of which loads the files before."""
    return partial(_call, [path.absolute() for path in paths], function) if paths else function


def _call(paths: Sequence[Path], function: Callable[..., Any], *args: Any) -> Any:
    load_algorithms(paths)
    return function(*args)
