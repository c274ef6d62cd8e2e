"""``flagcx explain``: which algorithm a call would use on a machine, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from flagcx.cli.machines import GpuModel, NetworkSpeed, Sm, capability, machine_of
from flagcx.cli.over_hosts import LINK, Hosts, Link, asked_over_hosts
from flagcx.cli.own_algorithms import Load, load_algorithms, with_algorithms
from flagcx.cli.progress import progress_bar
from flagcx.cli.start_ranks import count_ranks, launch_quietly, reporting_errors
from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.selection.explain import Explanation


def explain(
    collective: Annotated[str, typer.Argument(help="allreduce, allgather, broadcast, ...")],
    nbytes: Annotated[
        str,
        typer.Option(
            "--nbytes", "-b", help="Bytes of the message (of one block, where each rank has one): 64MiB, 1e6."
        ),
    ],
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help="A preset (dgx-a100, ...) or a topology file; this machine if none is named.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="How many ranks; one for each GPU or core by default."),
    ] = None,
    network_gb_per_s: NetworkSpeed = None,
    sm: Sm = None,
    gpu_model: GpuModel = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Arrays on the GPUs of this machine, in place of NumPy arrays.")
    ] = False,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let several ranks use one GPU; with --gpu.")
    ] = False,
    hosts: Hosts = None,
    link: Link = LINK,
    load: Load = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the algorithms for a call (steps, bytes, busiest link, time) and say which would run, and why.

    For this machine ranks are started and asked, so that what flagcx tune measured is part of the answer.
    """
    from flagcx.cli.sizes import parse_nbytes
    from flagcx.selection.explain import explain as explain_over

    with reporting_errors("explain"):
        count, chip = parse_nbytes(nbytes), capability(sm, gpu_model)
        load_algorithms(load)
        if hosts is not None:
            if topology is not None or ranks is not None or gpu:
                raise ArgumentError("--hosts says how many ranks there are, and is about NumPy arrays alone")
            selector, request = asked_over_hosts(collective, count, hosts, link)
            found = selector.explain(request)
        elif topology is None:
            if chip is not None or network_gb_per_s is not None:
                raise ArgumentError(
                    "--sm, --gpu-model and --network-gb-per-s are about a machine named by --topology"
                )
            asked = with_algorithms(load, _asked)
            found = _here(asked, collective, count, ranks, gpu, share_gpu)
        elif gpu or share_gpu:
            raise ArgumentError("--gpu and --share-gpu are about this machine; leave out --topology")
        else:
            machine = machine_of(topology, ranks, chip, network_gb_per_s)
            size = len(machine.gpus) if ranks is None else ranks
            with progress_bar(transient=True) as report:
                found = explain_over(collective, count, size, machine, report=report)
    if json:
        typer.echo(found.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(found, crop=False)
    else:
        typer.echo(str(found))


def _here(
    asked: Callable[..., Explanation],
    collective: str,
    nbytes: int,
    ranks: int | None,
    gpu: bool,
    share_gpu: bool,
) -> Explanation:
    from flagcx.schedule.collectives import check_collective

    check_collective(collective)
    count = count_ranks(ranks, gpu, share_gpu)
    return launch_quietly(asked, count, (collective, nbytes, gpu), share_gpu)[0]


def _asked(collective: str, nbytes: int, gpu: bool) -> Explanation:
    """What every rank does."""
    import flagcx

    with flagcx.init() as comm:
        if gpu:
            comm.empty(1, device="gpu")
        return comm.explain(collective, nbytes, gpu=gpu)
