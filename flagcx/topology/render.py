"""A topology and its plan as text, as JSON-ready values, and as tables for terminals and notebooks."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable
from typing import Any

from flagcx.topology import paths
from flagcx.topology.graph import DeviceKind, Graph
from flagcx.topology.plan import Plan

#: Most GPUs and NICs whose matrix is shown; its size is the square of their number.
MOST_IN_MATRIX = 96
_MOST_SHOWN = 32
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


def has_matrix(topology: Graph) -> bool:
    """Whether the matrix is small enough to show."""
    return len(topology.gpus) + len(topology.devices(DeviceKind.NIC)) <= MOST_IN_MATRIX


def text_report(topology: Graph, plan: Plan | None, *, legend: bool = True) -> str:
    """What ``flagcx topo`` prints: the matrix as nvidia-smi has it, then the plan, then what was assumed.

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
    if plan is not None:
        parts.append(plan_text(plan))
    if topology.notes:
        parts.append("Notes:\n" + "\n".join(f"  - {note}" for note in topology.notes))
    return "\n\n".join(parts)


def plan_text(plan: Plan) -> str:
    """A plan in lines: the method and its share of the bound, then rings, trees and levels."""
    if len(plan.gpus) == 1:
        return "Plan: one GPU, nothing to send."
    lines = [
        f"Plan for {len(plan.gpus)} GPUs: all-reduce {plan.bandwidth_gb_per_s:.2f} GB/s by {plan.method}, "
        f"{100 * plan.ratio:.1f}% of the bound of {plan.bound_gb_per_s:.2f} GB/s"
    ]
    for number, ring in enumerate(plan.rings[:_MOST_SHOWN]):
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
        affinity = cpu_ranges(numa.attribute("affinity")) if numa else "N/A"
        number = str(numa.index) if numa else "N/A"
        rows.append(
            [f"GPU{gpu.index}", *matrix[f"GPU{gpu.index}"].values(), affinity or "N/A", number, "N/A"]
        )
    nics = topology.devices(DeviceKind.NIC)
    rows += [[f"NIC{nic.index}", *matrix[f"NIC{nic.index}"].values()] for nic in nics]
    text = _aligned(rows)
    if not legend:
        return text
    names = "".join(f"\n  NIC{nic.index}: {nic.name or nic.id}" for nic in nics)
    return text + "\n\n" + LEGEND + (f"\n\nNIC Legend:\n{names}" if names else "")


def cpu_ranges(mask: str) -> str:
    """CPU numbers as ranges, from NCCL's mask in hexadecimal words; "" where it is no mask.

    Example:
        >>> cpu_ranges("00000001,0000000f")
        '0-3,32'
    """
    words = mask.split(",")
    if len(words) > 256 or not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", word) for word in words):
        return ""
    bits = 0
    for word in words:
        bits = bits << 32 | int(word, 16)
    return _ranges(number for number in range(bits.bit_length()) if bits >> number & 1)


def _ranges(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def _aligned(rows: list[list[str]]) -> str:
    widths = [
        max(len(row[column]) for row in rows if column < len(row)) + 2 for column in range(len(rows[0]))
    ]
    lines = []
    for row in rows:
        cells = [
            text.center(width) if text == "X" else text.ljust(width)
            for text, width in zip(row, widths, strict=False)
        ]
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)


def as_dict(topology: Graph, plan: Plan | None) -> dict[str, Any]:
    """A topology and its plan as plain values for JSON. What is infinite (one GPU's bandwidth) is None."""
    gpus = []
    for gpu in topology.gpus:
        node, nic = paths.numa_node(topology, gpu.index), None
        if len(topology.gpus) <= MOST_IN_MATRIX:
            nic = paths.nearest_nic(topology, gpu.index)
        gpus.append(
            {
                "index": gpu.index,
                "id": gpu.id,
                "name": gpu.name,
                "host": gpu.host,
                "pci_bus_id": gpu.pci_bus_id,
                "numa_node": node.index if node else None,
                "nearest_nic": nic.name or nic.id if nic else None,
            }
        )
    links = [
        {
            "a": link.a,
            "b": link.b,
            "kind": link.kind.value,
            "bandwidth_gb_per_s": link.bandwidth_gb_per_s,
            "latency_us": link.latency_us,
            "count": link.count,
            "assumed": link.assumed,
        }
        for link in topology.links
    ]
    return {
        "name": topology.name,
        "gpus": gpus,
        "links": links,
        "matrix": paths.matrix(topology) if has_matrix(topology) else {},
        **_plan_dict(plan),
        "notes": list(topology.notes),
    }


def _plan_dict(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {"rings": [], "method": None, "plan_gb_per_s": None, "bound_gb_per_s": None}
    return {
        "rings": [
            {
                "order": list(ring.order),
                "bandwidth_gb_per_s": _finite(ring.bandwidth_gb_per_s),
                "share": ring.share,
                "bottleneck": str(ring.bottleneck) if ring.bottleneck else None,
            }
            for ring in plan.rings
        ],
        "method": plan.method,
        "plan_gb_per_s": _finite(plan.bandwidth_gb_per_s),
        "bound_gb_per_s": _finite(plan.bound_gb_per_s),
        "why": plan.why,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rich_table(topology: Graph) -> Any:
    """The matrix as a table of the rich package, coloured by class."""
    from rich.table import Table

    table = Table(title=repr(topology)[1:-1], title_justify="left", caption=_caption(topology))
    header, rows = _cells(topology)
    for name in header:
        table.add_column(name, justify="left" if name == "" else "center", no_wrap=True)
    for row in rows:
        table.add_row(row[0], *(f"[{_style(cell)}]{cell}[/]" for cell in row[1:]))
    return table


def html_table(topology: Graph) -> str:
    """The matrix as an HTML table for a notebook."""
    header, rows = _cells(topology)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>"
        + f"<th>{html.escape(row[0])}</th>"
        + "".join(f'<td style="color:{_colour(cell)}">{html.escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    title, caption = html.escape(repr(topology)[1:-1]), html.escape(_caption(topology) or "")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<p><b>{title}</b></p>{table}<p>{caption}</p>"


def _cells(topology: Graph) -> tuple[list[str], list[list[str]]]:
    if not has_matrix(topology):
        counts = [
            [kind.value, str(len(topology.devices(kind)))] for kind in DeviceKind if topology.devices(kind)
        ]
        return ["", "devices"], counts
    matrix = paths.matrix(topology)
    header = ["", *matrix, "NUMA"]
    rows = []
    for name, cells in matrix.items():
        node = paths.numa_node(topology, int(name[3:])) if name.startswith("GPU") else None
        rows.append([name, *cells.values(), str(node.index) if node else ""])
    return header, rows


def _caption(topology: Graph) -> str | None:
    return "; ".join(topology.notes) or None


def _style(cell: str) -> str:
    if cell.startswith(("NV", "XGMI")):
        return "bold green"
    return {
        "PIX": "cyan",
        "PXB": "cyan",
        "PHB": "yellow",
        "NODE": "yellow",
        "SYS": "red",
        "NET": "magenta",
    }.get(cell, "dim")


def _colour(cell: str) -> str:
    if cell.startswith(("NV", "XGMI")):
        return "#2e7d32"
    return {"PIX": "#00838f", "PXB": "#00838f", "PHB": "#9a6700", "NODE": "#9a6700", "SYS": "#c62828"}.get(
        cell, "#777"
    )


def _order(order: tuple[int, ...]) -> str:
    shown = [str(gpu) for gpu in order[:_MOST_SHOWN]]
    return " ".join(shown) + (" ..." if len(order) > _MOST_SHOWN else "")
