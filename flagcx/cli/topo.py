"""``flagcx topo``: shows this machine, a file's or a preset's, and the planned all-reduce over it."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flagcx.cli.machines import GpuModel, NetworkSpeed, Sm, capability
from flagcx.errors import FlagcxError, TopologyError

if TYPE_CHECKING:
    from flagcx.topology import Topology


def topo(
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="NCCL topology XML, or the output of 'nvidia-smi topo -m'."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", "-p", help="A known machine: dgx-h100, dgx-1v, 8xa100-pcie, ..."),
    ] = None,
    hosts: Annotated[int, typer.Option(help="So many of the file's or preset's machine, as a cluster.")] = 1,
    network_gb_per_s: NetworkSpeed = None,
    sm: Sm = None,
    gpu_model: GpuModel = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="Plan over these GPUs only: 0,2,3 or 0-3."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the machine and the plan as JSON.")] = False,
    xml: Annotated[bool, typer.Option("--xml", help="Print NCCL's XML, for NCCL_TOPO_FILE.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the machine with the planned ring to a .png, .svg or .pdf file."),
    ] = None,
) -> None:
    """Show the machine's topology as nvidia-smi does, and the planned rings with their share of the bound."""
    from flagcx.topology.named import joined

    try:
        machine = _machine(file, preset, capability(sm, gpu_model))
        _run(joined(machine, hosts, network_gb_per_s), gpus, json, xml, plot)
    except FlagcxError as error:
        typer.echo(f"flagcx topo: {error}", err=True)
        raise typer.Exit(2) from None


def _machine(file: Path | None, preset: str | None, sm: int | None) -> Topology:
    from flagcx.topology import detect, files
    from flagcx.topology.named import known

    if file is not None and preset is not None:
        raise TopologyError("--file and --preset were both given; use one of them")
    if file is not None:
        return files.read(file, sm=sm)
    if preset is not None:
        return known(preset, sm)
    if sm is not None:
        raise TopologyError(
            "--sm and --gpu-model are about a file that does not name its GPUs; name it by --file"
        )
    return detect()


def _run(machine: Topology, gpus: str | None, json: bool, xml: bool, plot: Path | None) -> None:
    from flagcx.figure import check_picture
    from flagcx.topology import make_plan, nccl_xml_write, plot_topology, render

    if json and xml:
        raise TopologyError("--json and --xml were both given; use one of them")
    if plot is not None:
        check_picture(plot)
    if xml and plot is None:
        typer.echo(nccl_xml_write.format_xml(machine), nl=False)
        return
    plan = make_plan(machine, _numbers(gpus)) if machine.gpus else None
    if xml:
        typer.echo(nccl_xml_write.format_xml(machine), nl=False)
    elif json:
        typer.echo(json_format.dumps(render.as_dict(machine, plan), allow_nan=False))
    else:
        typer.echo(render.text_report(machine, plan))
    if plot is not None:
        plot_topology(machine, plot, plan=plan)
        typer.echo(f"drawn to {plot}", err=True)


def _numbers(text: str | None) -> list[int] | None:
    """GPU numbers of ``0,2,4-7``."""
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 12:
            raise TopologyError(f"--gpus {text!r}: {part!r} is not a number or a range; write 0,2,3 or 0-3")
        numbers += range(int(first), int(last if dash else first) + 1)
        if len(numbers) > 1 << 16:
            raise TopologyError(f"--gpus {text!r} names over {1 << 16} GPUs")
    return numbers
