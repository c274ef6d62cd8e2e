"""A topology and its plan as text, as JSON-ready values, and as tables for terminals and notebooks."""

from __future__ import annotations

import html
import math
from dataclasses import asdict
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from flagcx.topology import paths, speeds
from flagcx.topology.cpu_sets import cpu_ranges
from flagcx.topology.graph import Device, DeviceKind, Graph, LinkKind
from flagcx.topology.plan import Plan

#: Most GPUs and NICs for which the matrix is shown; its size is the square of their number.
MOST_IN_MATRIX = 96
_MOST_SHOWN = 32
_LINK_KEYS = ("links", "link_count", "links_gb_per_s", "links_spec_gb_per_s")
_BOUND = "(the bound of schedules without multicast and without reduction in switches)"
#: Columns after the matrix, in nvidia-smi's order.
_FURTHER = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
LEGEND = """\
Legend:

  X    = Self
  SYS  = Path over PCIe and the interconnect between NUMA nodes (QPI, UPI, Infinity Fabric)
  NODE = Path over PCIe and between PCIe roots of one NUMA node
  PHB  = Path over PCIe and one PCIe root (as a rule the CPU)
  PXB  = Path over several PCIe switches, and no PCIe root
  PIX  = Path over one PCIe switch at most
  NV#  = # bonded NVLinks"""


_STYLES = MappingProxyType(
    {
        "NV": ("bold green", "#2e7d32"),
        "PIX": ("cyan", "#00838f"),
        "PXB": ("cyan", "#00838f"),
        "PHB": ("yellow", "#9a6700"),
        "NODE": ("yellow", "#9a6700"),
        "SYS": ("red", "#c62828"),
        "NET": ("magenta", "#777"),
    }
)


def has_matrix(topology: Graph) -> bool:
    """Whether the matrix is small enough to show."""
    return len(topology.gpus) + len(topology.devices(DeviceKind.NIC)) <= MOST_IN_MATRIX


def text_report(topology: Graph, plan: Plan | None, *, legend: bool = True) -> str:
    """The output of ``flagcx topo``: the matrix as nvidia-smi prints it, the plan, and the notes.

    Args:
        topology: The machine.
        plan: Its plan; None where it has no GPU.
        legend: Whether to explain the classes.
    """
    parts = [repr(topology)[1:-1]]
    if has_matrix(topology):
        parts.append(format_matrix(topology, legend=legend))
    else:
        parts.append(f"The matrix of over {MOST_IN_MATRIX} devices is left out.")
    if fabric := fabric_text(topology):
        parts.append(fabric)
    if plan is not None:
        parts.append(plan_text(plan))
    if topology.notes:
        parts.append("Notes:\n" + "\n".join(f"  - {note}" for note in topology.notes))
    return "\n\n".join(parts)


def _fabric(topology: Graph, gpu: Device) -> tuple[str, int, float, float | None]:
    """A GPU's NVLinks or xGMI links: name, number, GB/s each way together, and that by the data sheet."""
    links = [link for link in topology.links_of(gpu.id).values() if link.kind.is_gpu_fabric]
    count = sum(link.count for link in links)
    name = "xGMI links" if any(link.kind is LinkKind.XGMI for link in links) else "NVLinks"
    spec = speeds.spec_gb_per_s(speeds.whole(gpu.attribute("gpu.sm")), gpu.attribute("gpu.gcn"))
    return name, count, sum(link.bandwidth_gb_per_s for link in links), spec and spec * count


def fabric_text(topology: Graph) -> str:
    """A line for each kind of GPU's links; "" where there are none."""
    gpus: dict[tuple, list[int]] = {}
    for gpu in topology.gpus:
        gpus.setdefault(_fabric(topology, gpu), []).append(gpu.index)
    lines = []
    for (name, count, speed, spec), members in gpus.items():
        if count:
            several = f"each of {len(members)} GPUs" if len(members) > 1 else f"GPU{members[0]}"
            sheet = f", {spec:g} by the data sheet" if spec else ""
            lines.append(
                f"{several} has {count} {name}: {speed:g} GB/s each way, as NCCL plans with "
                f"({speed / count:g} a link){sheet}"
            )
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """A plan in lines: its share of the bound, then the rings, and why they reach no more."""
    if len(plan.gpus) == 1:
        return "Plan: one GPU, nothing to send."
    speed = f"all-reduce {plan.bandwidth_gb_per_s:.2f} GB/s by algorithm='{plan.method}'"
    share = f"{100 * plan.ratio:.1f}% of the bound of {plan.bound_gb_per_s:.2f} GB/s"
    lines = [f"Plan for {len(plan.gpus)} GPUs: {speed}, {share}", f"  {_BOUND}"]
    if plan.nvls_bound_gb_per_s is not None:
        lines.append(
            f"  with both in the NVSwitches (NVLS) the bound is {plan.nvls_bound_gb_per_s:.2f} GB/s, "
            "the links of one GPU"
        )
    if plan.pcie_range is not None:
        cases = " to ".join(
            f"{case.bandwidth_gb_per_s:.2f} GB/s (bound {case.bound_gb_per_s:.2f}) with generation "
            f"{case.generation}"
            for case in plan.pcie_range
        )
        lines.append(f"  the generation of PCIe is not known: {cases}")
    if plan.exchange is not None:
        lines.append(
            f"  every GPU with every other at once, bottleneck {plan.exchange.bottleneck}; rings would reach "
            f"{sum(ring.bandwidth_gb_per_s for ring in plan.rings):.2f} GB/s"
        )
    for number, ring in enumerate(plan.rings if plan.exchange is None else ()):
        lines.append(
            f"  ring {number + 1}: {_order(ring.order)}  {ring.bandwidth_gb_per_s:.2f} GB/s, "
            f"{100 * ring.share:.0f}% of the message, bottleneck {ring.bottleneck}"
        )
    if plan.why:
        lines.append(f"  below the bound: {plan.why}")
    return "\n".join(lines)


def format_matrix(topology: Graph, *, legend: bool = True) -> str:
    """The matrix as ``nvidia-smi topo -m`` prints it, of any topology.

    Args:
        topology: The machine.
        legend: Whether to explain the classes and name the NICs below.
    """
    matrix = paths.matrix(topology)
    header = ["", *matrix, *_FURTHER]
    rows = [header]
    for gpu in topology.gpus:
        numa = paths.numa_node(topology, gpu.index)
        cpu = paths.nearest_cpu(topology, gpu.index)
        affinity = cpu_ranges(cpu.attribute("affinity")) if cpu else "N/A"
        further = [affinity or "N/A", str(numa.index) if numa else "N/A", gpu.attribute("gpu.numa_id", "N/A")]
        rows.append([f"GPU{gpu.index}", *matrix[f"GPU{gpu.index}"].values(), *further])
    nics = topology.devices(DeviceKind.NIC)
    rows += [[f"NIC{nic.index}", *matrix[f"NIC{nic.index}"].values()] for nic in nics]
    text = _aligned(rows)
    if not legend:
        return text
    names = "".join(f"\n  NIC{nic.index}: {nic.name or nic.id}" for nic in nics)
    return text + "\n\n" + LEGEND + (f"\n\nNIC Legend:\n{names}" if names else "")


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) + 2 for column in zip_longest(*rows, fillvalue="")]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=False)
        lines.append(
            "".join(text.center(width) if text == "X" else text.ljust(width) for text, width in cells)
        )
    return "\n".join(line.rstrip() for line in lines)


def as_dict(topology: Graph, plan: Plan | None) -> dict[str, Any]:
    """A topology and its plan as plain values for JSON. Infinite bandwidth (one GPU) is None."""
    few = len(topology.gpus) <= MOST_IN_MATRIX
    gpus = []
    for gpu in topology.gpus:
        node = paths.numa_node(topology, gpu.index)
        nic = paths.nearest_nic(topology, gpu.index) if few else None
        gpus.append(
            {name: getattr(gpu, name) for name in ("index", "id", "name", "host", "pci_bus_id")}
            | {
                "numa_node": node.index if node else None,
                "nearest_nic": nic.name or nic.id if nic else None,
            }
            | dict(zip(_LINK_KEYS, _fabric(topology, gpu), strict=True))
        )
    return {
        "name": topology.name,
        "gpus": gpus,
        "links": [asdict(link) | {"kind": link.kind.value} for link in topology.links],
        "matrix": paths.matrix(topology) if has_matrix(topology) else {},
        "rings": [
            {
                "order": list(ring.order),
                "bandwidth_gb_per_s": _finite(ring.bandwidth_gb_per_s),
                "share": ring.share,
                "bottleneck": str(ring.bottleneck) if ring.bottleneck else None,
            }
            for ring in (plan.rings if plan and plan.exchange is None else ())
        ],
        "order": list(plan.order) if plan else [],
        "method": plan.method if plan else None,
        "plan_gb_per_s": _finite(plan.bandwidth_gb_per_s) if plan else None,
        "bound_gb_per_s": _finite(plan.bound_gb_per_s) if plan else None,
        "nvls_bound_gb_per_s": plan.nvls_bound_gb_per_s if plan else None,
        "pcie_range": [case._asdict() for case in plan.pcie_range] if plan and plan.pcie_range else None,
        "why": plan.why if plan else "",
        "notes": list(topology.notes),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rich_table(topology: Graph) -> Any:
    """The matrix as a table of the rich package, coloured by class."""
    from rich.table import Table

    table = Table(title=repr(topology)[1:-1], title_justify="left", caption="; ".join(topology.notes) or None)
    header, rows = _cells(topology)
    for name in header:
        table.add_column(name, justify="left" if name == "" else "center", no_wrap=True)
    for row in rows:
        table.add_row(row[0], *(f"[{_style(cell)[0]}]{cell}[/]" for cell in row[1:]))
    return table


def html_table(topology: Graph) -> str:
    """The matrix as an HTML table for a notebook."""
    header, rows = _cells(topology)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        cells = [f'<td style="color:{_style(cell)[1]}">{html.escape(cell)}</td>' for cell in row[1:]]
        body += f"<tr><th>{html.escape(row[0])}</th>{''.join(cells)}</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    title, caption = html.escape(repr(topology)[1:-1]), html.escape("; ".join(topology.notes))
    return f"<p><b>{title}</b></p>{table}<p>{caption}</p>"


def _cells(topology: Graph) -> tuple[list[str], list[list[str]]]:
    if not has_matrix(topology):
        counts = [(kind.value, len(topology.devices(kind))) for kind in DeviceKind]
        return ["", "devices"], [[kind, str(count)] for kind, count in counts if count]
    matrix = paths.matrix(topology)
    rows = []
    for name, cells in matrix.items():
        node = paths.numa_node(topology, int(name[3:])) if name.startswith("GPU") else None
        rows.append([name, *cells.values(), str(node.index) if node else ""])
    return ["", *matrix, "NUMA"], rows


def _style(cell: str) -> tuple[str, str]:
    """The style of a class in a terminal, and its colour in HTML."""
    word = "NV" if cell.startswith(("NV", "XGMI")) else cell
    return _STYLES.get(word, ("dim", "#777"))


def _order(order: tuple[int, ...]) -> str:
    shown = [str(gpu) for gpu in order[:_MOST_SHOWN]]
    return " ".join(shown) + (" ..." if len(order) > _MOST_SHOWN else "")
