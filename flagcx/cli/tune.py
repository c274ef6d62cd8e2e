"""``flagcx tune``: measures the algorithms on this machine, and remembers which is fastest when."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flagcx.errors import ArgumentError, FlagcxError

if TYPE_CHECKING:
    from flagcx.selection.table import Table

_LEAST_NBYTES, _FACTOR = 256, 4
_LARGEST_NBYTES, _QUICK_LARGEST_NBYTES = 256 << 20, 16 << 20
_COMMON = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall")

Report = Callable[[int, int, str], object]


def tune(
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=0, help="How many ranks; 0: each core.")] = 0,
    collective: Annotated[
        list[str] | None,
        typer.Option("--collective", "-c", help="One to measure; may be repeated. The common ones if none."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, up to 16 MiB: a minute or so.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the table there, not to the cache directory.")
    ] = None,
) -> None:
    """Measure all algorithms on this machine; from then on flagcx chooses by the measured times.

    The table is kept for this machine, number of ranks and versions in the user's cache directory, and loaded
    by fc.init(). Under mpirun, srun or flagcx run the ranks that there are do the measuring.
    """
    try:
        path = _tune(ranks, tuple(collective or _COMMON), quick, output)
    except FlagcxError as error:
        typer.echo(f"flagcx tune: {error}", err=True)
        raise typer.Exit(2) from None
    if path is not None:
        typer.echo(f"measured; the table is {path}")


def _tune(ranks: int, collectives: tuple[str, ...], quick: bool, output: Path | None) -> Path | None:
    from flagcx._launch.notebook import launch
    from flagcx.bootstrap.environment import identify
    from flagcx.config import environment

    _check(collectives)
    output = None if output is None else output.absolute()
    if identify(environment()).size > 1:
        with _bar() as report:
            return measure(collectives, quick, output, report)
    count = ranks or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="flagcx-tune-") as directory, _bar() as report:
        address = os.path.join(directory, "progress")
        with _heard(address, report):
            return launch(_measure_and_tell, count, (collectives, quick, output, address))[0]


def _check(collectives: tuple[str, ...]) -> None:
    from flagcx.selection.tuner import TUNED

    for name in collectives:
        if name not in TUNED:
            raise ArgumentError(f"--collective {name} cannot be tuned; use some of {', '.join(TUNED)}")


def sizes(quick: bool) -> list[int]:
    """The sizes of messages that are measured, in bytes."""
    found, largest = [_LEAST_NBYTES], _QUICK_LARGEST_NBYTES if quick else _LARGEST_NBYTES
    while found[-1] < largest:
        found.append(min(found[-1] * _FACTOR, largest))
    return found


def measure(collectives: tuple[str, ...], quick: bool, output: Path | None, report: Report) -> Path | None:
    """What every rank does: measures; rank 0 writes the table.

    Args:
        collectives: Names of the collectives.
        quick: Whether to measure less.
        output: Where to write the table; to the user's cache directory if None.
        report: Hears on rank 0 how far it is.

    Returns:
        On rank 0 the path of the table.
    """
    import flagcx
    from flagcx.config import environment
    from flagcx.selection.table import fit_here, save_table, table_path
    from flagcx.selection.tuner import QUICK, Pace
    from flagcx.selection.tuner import tune as measure_all

    with flagcx.init(tuning=False) as comm:
        transport = comm._transport
        fit = fit_here(comm.size, transport.name, transport.settings(comm.config))
        tell: Report = report if comm.rank == 0 else lambda done, total, what: None
        pace = QUICK if quick else Pace()
        table: Table = measure_all(transport, fit, collectives, sizes(quick), pace, tell)
        if comm.rank:
            return None
        path = output or table_path(fit, environment())
        save_table(table, path)
        return path


def _measure_and_tell(
    collectives: tuple[str, ...], quick: bool, output: Path | None, address: str
) -> Path | None:
    """A rank that the command started: rank 0 tells the command how far it is."""
    with Client(address, family="AF_UNIX") as line:
        return measure(collectives, quick, output, lambda *progress: line.send(progress))


@contextlib.contextmanager
def _heard(address: str, report: Report) -> Iterator[None]:
    """Listens to the ranks, each of which connects, on a thread of its own."""
    listener = Listener(address, family="AF_UNIX", backlog=256)

    def listen(line) -> None:
        with contextlib.suppress(EOFError, OSError), line:
            while True:
                report(*line.recv())

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=listen, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        listener.close()


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    """A progress bar on stderr, which appears with the first report."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)

        def report(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield report
