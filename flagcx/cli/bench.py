"""``flagcx bench``: times one collective over a range of sizes and prints the table of nccl-tests."""

from __future__ import annotations

import json as json_format
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flagcx.cli.bench_again import run_again
from flagcx.cli.bench_plot import check_drawing, draw_rows
from flagcx.cli.own_algorithms import Load, load_algorithms, with_algorithms
from flagcx.cli.start_ranks import Report, count_ranks, launch_reporting, reporting_errors

if TYPE_CHECKING:
    from flagcx.cli.bench_table import BenchRow
    from flagcx.cli.bench_task import BenchTask


def bench(
    collective: Annotated[str, typer.Argument(help="allreduce, allgather, broadcast, ...")] = "allreduce",
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", min=0, help="How many ranks; 0: each core, or each GPU.")
    ] = 0,
    begin: Annotated[str, typer.Option("--begin", "-b", help="First size, of the whole message.")] = "8",
    end: Annotated[str, typer.Option("--end", "-e", help="Last size: 64M, 1GiB.")] = "64M",
    factor: Annotated[int, typer.Option("--factor", "-f", help="From one size to the next.")] = 4,
    dtype: Annotated[str, typer.Option("--dtype", "-d")] = "float32",
    op: Annotated[str, typer.Option("--op", "-o", help="sum, max, avg, ...")] = "sum",
    root: Annotated[int, typer.Option("--root", "-r")] = 0,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", "-a", help="One, or several as in ring,tree; flagcx chooses if none is."),
    ] = None,
    compare: Annotated[
        str,
        typer.Option("--compare", help="Other libraries to measure beside it: mpi,gloo; nccl with --gpu."),
    ] = "",
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Use arrays of comm.empty.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Use arrays on GPUs.")] = False,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let several ranks use one GPU; with --gpu.")
    ] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="For each time; the median counts.")] = 7,
    load: Load = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each size.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw time and bus bandwidth over size: a .png, .svg or .pdf file."),
    ] = None,
) -> None:
    """Time a collective over a range of sizes, verify its results, and print the table of nccl-tests.

    Under mpirun, srun or flagcx run the ranks that there are take part. Each time is the median of several
    rounds, and a round counts with its slowest rank. The exit code is 1 where a result was wrong. Where
    several algorithms or libraries are measured, they take turns at every size; with MPI among them, mpirun
    starts the ranks.
    """
    from flagcx.cli.bench_subjects import check_compare
    from flagcx.cli.bench_task import BenchTask
    from flagcx.cli.sizes import parse_nbytes

    with reporting_errors("bench"):
        task = BenchTask(
            collective,
            parse_nbytes(begin),
            parse_nbytes(end),
            factor,
            dtype,
            op,
            root,
            algorithm,
            symmetric,
            gpu,
            rounds,
            tuple(filter(None, compare.split(","))),
        )
        task.check()
        check_compare(task)
        if plot is not None:
            check_drawing(plot)
        load_algorithms(load)
        ranked = with_algorithms(load, measure)
        report = _as_json() if json else _as_table()
        if plot is not None:
            report = _and_drawn(report, plot)
        if "mpi" in task.compare and not _under_mpi():
            raise typer.Exit(run_again(ranks or count_ranks(ranks, gpu, share_gpu)))
        wrong = _run(ranked, task, ranks, share_gpu, report)
    raise typer.Exit(int(wrong > 0))


def _run(
    ranked: Callable[[BenchTask, Report], int], task: BenchTask, ranks: int, share_gpu: bool, report: Report
) -> int:
    """Lets the ranks measure; returns how many elements were wrong."""
    from flagcx.bootstrap.environment import identify
    from flagcx.config import environment

    size = identify(environment()).size
    if size > 1:
        task.check_ranks(size)
        return measure(task, report)
    count = count_ranks(ranks, task.gpu, share_gpu)
    task.check_ranks(count)
    return launch_reporting(ranked, count, task, report, share_gpu)


def measure(task: BenchTask, report: Report) -> int:
    """The part of every rank. Rank 0 reports the job ("head"), each row, and all rows ("end").

    Returns:
        How many elements were wrong.
    """
    import numpy as np

    import flagcx
    from flagcx.cli.bench_ranks import ArraySource, rows
    from flagcx.cli.bench_subjects import subjects

    with flagcx.init() as comm:
        if comm.rank:
            report = lambda *_: None  # noqa: E731
        arrays = ArraySource(comm, task)
        chosen = task.algorithm or "chosen by flagcx"
        title = f"{task.collective}, {comm.size} ranks, {arrays.describe()}, algorithm {chosen}"
        versions = {
            "flagcx": flagcx.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        further = {"algorithm": task.algorithm, "symmetric": task.symmetric, "gpu": task.gpu}
        report("head", (title, {**further, "versions": versions}))
        found: list[BenchRow] = []
        for row in rows(comm, task, arrays, subjects(comm, task)):
            found.append(row)
            report("row", row)
        report("end", found)
        return sum(timing.wrong for row in found for timing in row.timings)


def _under_mpi() -> bool:
    """Whether MPI's launcher started this process as a rank."""
    from flagcx.bootstrap.environment import identify, launched_by_mpi
    from flagcx.config import environment

    environ = environment()
    return launched_by_mpi(identify(environ), environ)


def _and_drawn(report: Report, path: Path) -> Report:
    """A report that draws all rows at the end, too."""

    def both(kind: str, value: Any) -> None:
        report(kind, value)
        if kind == "head":
            title.append(value[0])
        elif kind == "end":
            draw_rows(title[0], value, path)
            typer.echo(f"# drawn to {path}", err=True)

    title: list[str] = []
    return both


def _as_table() -> Report:
    from flagcx.cli.bench_table import footer, format_row, header

    def report(kind: str, value: Any) -> None:
        if kind == "head":
            typer.echo(f"# {value[0]}\n{header()}")
        elif kind == "row":
            typer.echo(format_row(value))
        else:
            typer.echo(footer(value))

    return report


def _as_json() -> Report:
    common: dict[str, Any] = {}

    def report(kind: str, value: Any) -> None:
        if kind == "head":
            common.update(value[1])
        elif kind == "row":
            typer.echo(json_format.dumps({**value.as_json(), **common}))

    return report
