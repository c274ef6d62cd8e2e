"""The options about what a file of a machine does not say, for every command that takes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flagcx.errors import TopologyError

if TYPE_CHECKING:
    from flagcx.topology import Topology

NetworkSpeed = Annotated[
    float | None,
    typer.Option(
        "--network-gb-per-s",
        help="GB/s of each NIC in one direction, between several hosts; needed where the file has none.",
    ),
]
Sm = Annotated[
    int | None,
    typer.Option("--sm", help="Compute capability times ten (90, 100, ...), where a file does not name it."),
]
GpuModel = Annotated[
    str | None, typer.Option("--gpu-model", help="The GPUs' model, instead of --sm: H100, B300, ...")
]


def machine_of(name: str, ranks: int | None, sm: int | None, network_gb_per_s: float | None) -> Topology:
    """The machine that ``--topology`` names; says so where the ranks need several of it.

    Raises:
        TopologyError: There is no such preset or file, or it cannot make a cluster.
    """
    from flagcx.topology import machine_for

    machine = machine_for(name, ranks, sm=sm, network_gb_per_s=network_gb_per_s)
    width = len(machine_for(name, sm=sm).gpus)
    if ranks is not None and ranks > width:
        typer.echo(
            f"{ranks} ranks need more than the {width} GPUs of {name}: {-(-ranks // width)} of it are taken, "
            f"joined by their network",
            err=True,
        )
    return machine


def capability(sm: int | None, model: str | None) -> int | None:
    """Compute capability times ten, by either option.

    Raises:
        TopologyError: Both are given, or one makes no sense.
    """
    from flagcx.topology.gpu_models import compute_capability

    if sm is not None and model is not None:
        raise TopologyError("--sm and --gpu-model were both given; use one of them")
    if sm is not None and not 30 <= sm < 1000:
        raise TopologyError(f"--sm {sm} is no compute capability times ten; a H100 has 90, a B200 100")
    return sm if model is None else compute_capability(model)
