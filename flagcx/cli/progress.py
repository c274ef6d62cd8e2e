"""A progress bar for commands that take long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[int, int, str], object]
"""``report(done, total, what)``."""


@contextlib.contextmanager
def progress_bar(transient: bool = False) -> Iterator[Report]:
    """A progress bar on stderr, which appears with the first report.

    Args:
        transient: Whether it goes away at the end, and is not shown at all where stderr is no terminal.
    """
    if transient and not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=transient) as progress:
        task = progress.add_task("starting", total=None)

        def report(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield report
