"""Draws a machine with the planned rings over it, beside its matrix.

Sockets stand on top, PCIe below them, GPUs at the foot, NVSwitches under the GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flagcx.errors import ArgumentError, TopologyError
from flagcx.figure import check_picture, new_figure, save_picture
from flagcx.topology.draw_matrix import paint_matrix, shown_in_matrix
from flagcx.topology.drawing import Bar, Drawing
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind
from flagcx.topology.plan import Plan, make_plan
from flagcx.topology.presets import preset
from flagcx.topology.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FILL = {
    DeviceKind.NETWORK_SWITCH: "#e8e2f4",
    DeviceKind.CPU: "#f7e3c8",
    DeviceKind.HOST_BRIDGE: "#f1efe9",
    DeviceKind.PCIE_SWITCH: "#e4e8ec",
    DeviceKind.NIC: "#dceefb",
    DeviceKind.PCI_DEVICE: "#eeeeee",
    DeviceKind.GPU: "#d5ecd0",
    DeviceKind.NVSWITCH: "#bfe0b8",
}
_STROKE = {
    LinkKind.NVLINK: "#4f9d45",
    LinkKind.XGMI: "#b5533c",
    LinkKind.C2C: "#2f7f86",
    LinkKind.PCIE: "#8a94a0",
    LinkKind.SOCKET: "#c98a2b",
    LinkKind.NETWORK: "#6f5bb0",
}
_WORD = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.XGMI: "xGMI",
    LinkKind.C2C: "NVLink-C2C",
    LinkKind.PCIE: "PCIe",
    LinkKind.SOCKET: "socket",
    LinkKind.NETWORK: "network",
}
_RING, _EDGE = "#c2185b", "#5b6570"


def plot_topology(
    topology: Topology | str,
    path: str | Path | None = None,
    *,
    plan: Plan | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draws a topology with its planned rings.

    Args:
        topology: A machine, or a small cluster; of more than 32 GPUs the first hosts are drawn. Or the name
            of a preset.
        path: Where to save the picture (.png, .svg or .pdf), or None to only return it; a notebook shows it.
        plan: The plan to draw; made from the topology by default.
        ax: Axes to draw on, without the matrix; a new figure of fitting size by default.

    Returns:
        The figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: ``topology`` is neither a topology nor a name, or the file cannot be written.
        TopologyError: There is no such preset, or the topology has nothing to draw.

    Example:
        >>> import flagcx.topology as topology
        >>> figure = topology.plot_topology("dgx-1v")      # doctest: +SKIP
    """
    topology = preset(topology) if isinstance(topology, str) else topology
    if not isinstance(topology, Topology):
        raise ArgumentError(
            f"topology={topology!r} is no topology; expected a Topology, such as fc.get_topology(), or the "
            f"name of a preset, such as 'dgx-a100'"
        )
    if path is not None:
        check_picture(path)
    if plan is None and topology.gpus:
        plan = make_plan(topology)
    drawing = Drawing(topology, plan)
    if not drawing.place:
        raise TopologyError(f"{topology!r} has no device that can be drawn")
    if ax is None:
        names = shown_in_matrix(topology)
        wide, more = max(6.0, 0.66 * drawing.width + 1.2), max(3.0, 0.4 * len(names) + 1.0)
        size = (wide + more if names else wide, 6.6)
        figure = new_figure(*size, "a topology", layout="constrained")
        if names:
            ax, matrix = figure.subplots(1, 2, width_ratios=(wide, more))
            paint_matrix(matrix, topology, names, min(more, 6.0))
        else:
            ax = figure.subplots()
    else:
        figure = cast("Figure", ax.figure)
    _paint(ax, drawing)
    if path is not None:
        save_picture(figure, path)
    return figure


def _paint(ax: Axes, drawing: Drawing) -> None:
    links = [link for link in drawing.topology.links if link.a in drawing.place and link.b in drawing.place]
    barred = {(bar.kind, frozenset(pair)) for bar in drawing.bars for pair in combinations(bar.ends, 2)}
    links = [link for link in links if (link.kind, frozenset((link.a, link.b))) not in barred]
    styles = _styles(links)
    for link in links:
        _paint_link(ax, drawing, link, styles)
    for bar in drawing.bars:
        _paint_bar(ax, drawing, bar)
    for a, b, text in drawing.trunks:
        _paint_trunk(ax, drawing.bars[a], drawing.bars[b], text)
    _paint_ring(ax, drawing)
    for id, (x, y) in drawing.place.items():
        _paint_device(ax, drawing.topology.device(id), x, y)
    xs, ys = zip(*drawing.place.values(), strict=True)
    low, high = _span(ax, min(ys), max(ys))
    ax.set_xlim(min(xs) - 1.0, max(xs) + 1.0)
    ax.set_ylim(low - 0.3, high + 0.4)
    ax.axis("off")
    ax.set_title(_title(drawing), fontsize=11, loc="left")
    _legend(ax, drawing, links, styles)


def _span(ax: Axes, low: float, high: float) -> tuple[float, float]:
    """The lowest and the highest point of what is drawn."""
    import matplotlib.patches as patches

    for patch in ax.patches:
        if isinstance(patch, patches.FancyArrowPatch):
            extent = patch.get_path().get_extents()
            low, high = min(low, extent.y0), max(high, extent.y1)
        elif isinstance(patch, patches.FancyBboxPatch):
            low, high = min(low, patch.get_y()), max(high, patch.get_y() + patch.get_height())
    return low, high


def _styles(links: Sequence[Link]) -> dict[tuple[LinkKind, int], tuple[float, float]]:
    """Width and opacity of the links between GPUs by kind and number: one step for each number there is."""
    styles = {}
    for kind in (LinkKind.NVLINK, LinkKind.XGMI):
        counts = sorted({link.count for link in links if link.kind is kind})
        for step, count in enumerate(counts):
            part = step / max(1, len(counts) - 1)
            styles[kind, count] = (1.0 + 2.8 * part, 0.45 + 0.5 * part) if len(counts) > 1 else (1.8, 0.6)
    return styles


def _curve(ax: Axes, a: tuple[float, float], b: tuple[float, float], depth: float, **style: Any) -> None:
    """A curve whose middle lies ``depth`` off the straight line between two points, downwards if positive."""
    import matplotlib.patches as patches
    from matplotlib.path import Path as Curve

    middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2 - 2 * depth)
    ax.add_patch(patches.FancyArrowPatch(path=Curve([a, middle, b], [1, 3, 3]), **style))


def _paint_link(
    ax: Axes, drawing: Drawing, link: Link, styles: Mapping[tuple[LinkKind, int], tuple[float, float]]
) -> None:
    a, b = drawing.place[link.a], drawing.place[link.b]
    width, opacity = styles.get((link.kind, link.count), (1.1, 0.85))
    _curve(
        ax,
        a,
        b,
        _depth(drawing, link.kind, a, b),
        arrowstyle="-",
        linewidth=width,
        linestyle="--" if link.assumed else "-",
        color=_STROKE[link.kind],
        alpha=opacity,
        zorder=1,
    )


def _depth(drawing: Drawing, kind: LinkKind, a: tuple[float, float], b: tuple[float, float]) -> float:
    """How far the middle of a link hangs below the straight line."""
    span = abs(a[0] - b[0])
    if kind.is_gpu_fabric and a[1] == b[1]:
        return 0.1 + min(0.1 * span, 1.0 * (span / max(drawing.width, 1.0)) ** 0.5 + 0.04 * span)
    return -min(0.1 + 0.05 * span, 0.6) if kind is LinkKind.SOCKET else 0.0


def _paint_bar(ax: Axes, drawing: Drawing, bar: Bar) -> None:
    import matplotlib.patches as patches

    fill = _FILL[DeviceKind.NVSWITCH if bar.kind is LinkKind.NVLINK else DeviceKind.CPU]
    box = patches.FancyBboxPatch(
        (bar.left - 0.3, bar.height - 0.14),
        bar.right - bar.left + 0.6,
        0.28,
        boxstyle="round,pad=0.03",
        facecolor=fill,
        edgecolor=_EDGE,
        linewidth=0.8,
        zorder=4,
    )
    ax.add_patch(box)
    ax.text((bar.left + bar.right) / 2, bar.height, bar.label, ha="center", va="center", fontsize=8, zorder=5)
    for x, height in (drawing.place[id] for id in bar.ends):
        ax.plot([x, x], [height, bar.height], color=_STROKE[bar.kind], linewidth=2.2, alpha=0.7, zorder=1)


def _paint_trunk(ax: Axes, a: Bar, b: Bar, text: str) -> None:
    """The links between the NVSwitches of two boards."""
    left, right = sorted((a, b), key=lambda bar: bar.left)
    ax.plot(
        [left.right + 0.3, right.left - 0.3], [left.height] * 2, color=_STROKE[a.kind], linewidth=5, zorder=2
    )
    middle = (left.right + right.left) / 2
    ax.text(middle, left.height + 0.28, text, ha="center", va="center", fontsize=8, zorder=5)


def _paint_ring(ax: Axes, drawing: Drawing) -> None:
    """The planned rings: straight to a neighbour, along the link between two GPUs, and else under the row.

    A hop to a GPU that is not drawn leaves to the right; one from such a GPU comes from the left.
    """
    plan = drawing.plan
    order = [drawing.topology.gpu(gpu).id for gpu in plan.rings[0].order] if plan else []
    if plan is None or plan.exchange is not None or len(order) < 2:
        return
    row = sorted((id for id in order if id in drawing.place), key=lambda id: drawing.place[id][0])
    rank = {id: position for position, id in enumerate(row)}
    hops = list(zip(order, [*order[1:], order[0]], strict=True)) if len(order) > 2 else [(order[0], order[1])]
    both = len(plan.rings) > 1 or len(order) == 2
    style = {
        "arrowstyle": "<|-|>" if both else "-|>",
        "mutation_scale": 13,
        "linewidth": 2.3,
        "color": _RING,
        "zorder": 3,
    }
    for a, b in hops:
        if a in rank and b in rank:
            _paint_hop(ax, drawing, a, b, abs(rank[b] - rank[a]) == 1, style)
        elif a in rank:
            x, y = drawing.place[a]
            _curve(ax, (x + 0.3, y), (x + 0.95, y), 0.0, **style)
        elif b in rank:
            x, y = drawing.place[b]
            _curve(ax, (x - 0.95, y), (x - 0.3, y), 0.0, **style)


def _paint_hop(ax: Axes, drawing: Drawing, a: str, b: str, near: bool, style: Mapping[str, Any]) -> None:
    (x1, y1), (x2, y2) = drawing.place[a], drawing.place[b]
    side = 0.3 if x2 > x1 else -0.3
    if near:
        _curve(ax, (x1 + side, y1), (x2 - side, y2), 0.0, **style)
        return
    link = drawing.topology.link(a, b)
    if link is not None and link.kind.is_gpu_fabric:
        depth = _depth(drawing, link.kind, (x1, y1), (x2, y2))
    else:
        lowest = min((bar.height for bar in drawing.bars if bar.kind is LinkKind.NVLINK), default=y1)
        depth = max(0.18 + 0.04 * abs(x2 - x1), y1 - lowest + 0.1)
    _curve(ax, (x1, y1 - 0.14), (x2, y2 - 0.14), depth, **style)


def _paint_device(ax: Axes, device: Device, x: float, y: float) -> None:
    box = {
        "boxstyle": "round,pad=0.32",
        "facecolor": _FILL[device.kind],
        "edgecolor": _EDGE,
        "linewidth": 0.8,
    }
    gpu = device.kind is DeviceKind.GPU
    font: dict[str, Any] = {"fontsize": 8.5 if gpu else 7, "fontweight": "bold" if gpu else "normal"}
    ax.text(x, y, _label(device), ha="center", va="center", zorder=5, bbox=box, **font)


def _label(device: Device) -> str:
    if device.kind is DeviceKind.NIC and device.name:
        name, more, _ = device.name.partition("+")
        return f"NIC{device.index}\n{name if len(name) <= 8 else name[:7] + '…'}{more}"
    names = {
        DeviceKind.GPU: f"GPU{device.index}",
        DeviceKind.CPU: f"NUMA {device.index}" if device.index >= 0 else "CPU",
        DeviceKind.NIC: f"NIC{device.index}",
        DeviceKind.NVSWITCH: f"NVSwitch {device.index}",
        DeviceKind.HOST_BRIDGE: "root",
        DeviceKind.PCIE_SWITCH: "PCIe\nswitch",
    }
    return names.get(device.kind, device.id)


def _legend(
    ax: Axes,
    drawing: Drawing,
    links: Sequence[Link],
    styles: Mapping[tuple[LinkKind, int], tuple[float, float]],
) -> None:
    import matplotlib.lines as lines

    handles = []
    for (kind, count), (width, opacity) in styles.items():
        own = [link for link in links if link.kind is kind and link.count == count]
        short = "NV" if kind is LinkKind.NVLINK else "XGMI"
        text = f"{short}{count}: {_WORD[kind]}, {_speeds(own)}"
        handles.append(lines.Line2D([], [], color=_STROKE[kind], linewidth=width, alpha=opacity, label=text))
    for kind in (kind for kind in LinkKind if not kind.is_gpu_fabric):
        own = [link for link in links if link.kind is kind and link.bandwidth_gb_per_s < 900]
        if own:
            text = f"{_WORD[kind]}, {_speeds(own)}"
            handles.append(lines.Line2D([], [], color=_STROKE[kind], linewidth=1.8, label=text))
    if drawing.plan and len(drawing.plan.gpus) > 1:
        text = _ring_text(drawing.plan)
        width = 0.0 if drawing.plan.exchange is not None else 2.3  # an exchange is over the links as drawn
        handles.append(lines.Line2D([], [], label=text, color=_RING, linewidth=width))
    if handles:
        style: dict[str, Any] = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, 0.0),
            "fontsize": 8,
            "frameon": False,
        }
        ax.legend(handles=handles, ncols=2 if drawing.width > 6 else 1, **style)


def _speeds(links: Sequence[Link]) -> str:
    speeds = sorted({link.bandwidth_gb_per_s for link in links})
    span = f"{speeds[0]:g}" if len(speeds) == 1 else f"{speeds[0]:g} to {speeds[-1]:g}"
    return f"{span} GB/s each way{' (dashed: assumed)' if any(link.assumed for link in links) else ''}"


def _ring_text(plan: Plan) -> str:
    ring = plan.rings[0]
    if plan.exchange is not None:
        return f"two_shot: every GPU with every other at once, {plan.bandwidth_gb_per_s:.1f} GB/s"
    shown = " ".join(map(str, ring.order[:16])) + (" ..." if len(ring.order) > 16 else "")
    if len(plan.rings) == 1:
        return f"ring 1: {shown}, {ring.bandwidth_gb_per_s:.1f} GB/s"
    return f"ring 1: {shown}, and ring 2 backwards, {ring.bandwidth_gb_per_s:.1f} GB/s each"


def _title(drawing: Drawing) -> str:
    parts, plan = [drawing.topology.name or "machine"], drawing.plan
    if plan is not None and len(plan.gpus) > 1:
        rings = "one ring" if len(plan.rings) == 1 else "a ring both ways round"
        rings = "an exchange of all with all" if plan.exchange is not None else rings
        speed = f"{plan.bandwidth_gb_per_s:.1f} GB/s, {100 * plan.ratio:.0f}% of the bound"
        parts.append(f"all-reduce over {len(plan.gpus)} GPUs by {rings} ({plan.method}): {speed}")
    if drawing.hidden:
        left_out = (f"{count} {what}" for what, count in drawing.hidden.items())
        parts.append(f"not drawn: {', '.join(left_out)}")
    return "\n".join(parts)
