"""``flagcx tune``: measures the algorithms on this machine, and remembers which is fastest when."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flagcx.cli.own_algorithms import Load, load_algorithms, with_algorithms
from flagcx.cli.progress import progress_bar
from flagcx.cli.start_ranks import count_ranks, launch_reporting, reporting_errors
from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.communicator import Communicator
    from flagcx.selection.table import Fit, Table
    from flagcx.selection.tuning import Bench

_LEAST_NBYTES, _FACTOR = 256, 4
_LARGEST_NBYTES, _QUICK_LARGEST_NBYTES = 256 << 20, 16 << 20
_BUDGET_S, _QUICK_BUDGET_S = 80.0, 40.0
_COMMON = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall")

Report = Callable[[int, int, str], object]


def tune(
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", min=0, help="How many ranks; 0: each core or GPU.")
    ] = 0,
    collective: Annotated[
        list[str] | None,
        typer.Option("--collective", "-c", help="One to measure; may be repeated. The common ones if none."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, up to 16 MiB: half of the time.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="How long it may take, in seconds; 80, or 40 if --quick. 0: no limit."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the table there, not to the cache directory.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Measure arrays on GPUs: NCCL's own collectives, and what else can.")
    ] = False,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let several ranks use one GPU; with --gpu.")
    ] = False,
    load: Load = None,
) -> None:
    """Measure all algorithms on this machine; from then on flagcx chooses by the measured times.

    The table is kept for this machine, number of ranks and versions in the user's cache directory, and loaded
    by fc.init(), or with --gpu by the first call with an array on a GPU. With --gpu a time is what the GPUs
    need for a call, without what the host needs to enqueue it. Under mpirun, srun, torchrun or flagcx run the
    ranks that there are do the measuring. A table of several hosts lies on the host of rank 0, and holds for
    the same ranks on each host, where messages between hosts take about as long as they did.
    """
    from flagcx.selection.table import read_table
    from flagcx.selection.tuning import unsteady

    with reporting_errors("tune"):
        total_s = (_QUICK_BUDGET_S if quick else _BUDGET_S) if budget is None else budget or math.inf
        what = Task(tuple(collective or _COMMON), quick, output and output.absolute(), gpu, total_s)
        load_algorithms(load)
        path = _tune(ranks, what, share_gpu, with_algorithms(load, measure))
    if path is not None:
        typer.echo(f"measured; the table is {path}")
        if warning := unsteady(read_table(path)):
            typer.echo(f"flagcx tune: {warning}", err=True)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be measured.

    Attributes:
        collectives: Names of the collectives.
        quick: Whether to measure less.
        output: Where to write the table; to the user's cache directory if None.
        gpu: Whether arrays are on GPUs.
        total_s: How long it should take, in seconds.
    """

    collectives: tuple[str, ...]
    quick: bool = False
    output: Path | None = None
    gpu: bool = False
    total_s: float = math.inf


def _tune(
    ranks: int, task: Task, share_gpu: bool, ranked: Callable[[Task, Report], Path | None]
) -> Path | None:
    from flagcx.bootstrap.environment import identify
    from flagcx.config import environment
    from flagcx.selection.tuning import TUNED

    for name in task.collectives:
        if name not in TUNED:
            raise ArgumentError(f"--collective {name} cannot be tuned; use some of {', '.join(TUNED)}")
    identity = identify(environment())
    if identity.size > 1:
        with nullcontext(_say_nothing) if identity.rank else progress_bar() as report:
            return measure(task, report)
    count = count_ranks(ranks, task.gpu, share_gpu)
    if task.total_s < math.inf:
        typer.echo(
            f"measuring for about {task.total_s:g} s, longer where other work runs; --budget 0: no limit",
            err=True,
        )
    with progress_bar() as report:
        return launch_reporting(ranked, count, task, report, share_gpu)


def _say_nothing(done: int, total: int, what: str) -> None:
    """The report of ranks but the first."""


def sizes(quick: bool) -> list[int]:
    """The sizes of messages that are measured, in bytes."""
    found, largest = [_LEAST_NBYTES], _QUICK_LARGEST_NBYTES if quick else _LARGEST_NBYTES
    while found[-1] < largest:
        found.append(min(found[-1] * _FACTOR, largest))
    return found


def measure(task: Task, report: Report) -> Path | None:
    """What every rank does: measures; rank 0 writes the table.

    Args:
        task: What is to be measured.
        report: Hears on rank 0 how far it is.

    Returns:
        On rank 0 the path of the table.
    """
    import flagcx
    from flagcx.config import environment
    from flagcx.selection.table import save_table, table_path
    from flagcx.selection.tuning import QUICK, TimeBudget
    from flagcx.selection.tuning import tune as measure_all

    with flagcx.init(tuning=False) as comm:
        bench, fit = _gpu_bench(comm) if task.gpu else _host_bench(comm)
        tell = _say_nothing if comm.rank else report
        pace = replace(QUICK if task.quick else TimeBudget(), total_s=task.total_s)
        table: Table = measure_all(bench, fit, task.collectives, sizes(task.quick), pace, tell)
        if comm.rank:
            return None
        path = task.output or table_path(fit, environment())
        save_table(table, path)
        return path


def _host_bench(comm: Communicator) -> tuple[Bench, Fit]:
    from flagcx.executor.open import exchange_of
    from flagcx.selection.host_links import describe_hosts, measure_host_links
    from flagcx.selection.table import fit_here
    from flagcx.selection.tuning import HostBench
    from flagcx.transport.base import groups_of

    transport, groups, hosts = comm._host.transport, groups_of(comm.hosts), {}
    if len(groups) == 1:
        groups = ()
    else:
        exchange = exchange_of(comm._context)
        hosts = describe_hosts(groups, measure_host_links(transport, groups, exchange), exchange)
    fit = fit_here(comm.size, transport.name, transport.settings(comm.config), hosts)
    return HostBench(transport, groups), fit


def _gpu_bench(comm: Communicator) -> tuple[Bench, Fit]:
    from flagcx.kernels.cuda import load_cupy
    from flagcx.selection.selector import fit_on_device
    from flagcx.selection.tuning import Clock
    from flagcx.selection.tuning_on_device import DeviceBench

    cupy = load_cupy()
    comm.executor_of(cupy.zeros(1))
    executor = comm._device
    assert executor is not None
    bench = DeviceBench(executor.transport, cupy, Clock(comm._host.transport), executor.selector.order)
    return bench, fit_on_device(executor.transport)
