"""Draws a machine with the planned ring over it.

Sockets stand on top, PCIe below them, GPUs in ring order at the foot, NVSwitches under the GPUs.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flagcx.errors import ArgumentError, MissingDependencyError, TopologyError
from flagcx.topology.drawing import ROW, Drawing
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind
from flagcx.topology.plan import Plan, make_plan
from flagcx.topology.presets import preset
from flagcx.topology.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")
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


def _shown_figure(matplotlib: Any) -> type[Figure]:
    """A kind of figure that a notebook shows by itself, without pyplot."""

    class ShownFigure(matplotlib.figure.Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=100)
            return picture.getvalue()

    return ShownFigure


def check_picture(path: str | Path) -> None:
    """Raises TopologyError where a picture cannot be drawn to a file of this name."""
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise TopologyError(
            f"{path}: cannot draw to {Path(path).suffix or 'no ending'!r}; use .png, .svg or .pdf"
        )
    if not Path(path).absolute().parent.is_dir():
        raise TopologyError(f"{path}: cannot be written: there is no such directory")


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
        ax: Axes to draw on; a new figure of fitting size by default.

    Returns:
        The figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: ``topology`` is neither a topology nor a name.
        TopologyError: The file's ending is unknown, there is no such preset, or the topology has nothing to
            draw.

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
    matplotlib = _matplotlib()
    if plan is None and topology.gpus:
        plan = make_plan(topology)
    drawing = Drawing(topology, plan)
    if not drawing.place:
        raise TopologyError(f"{topology!r} has no device that can be drawn")
    if ax is None:
        figure = _shown_figure(matplotlib)(
            figsize=(max(6.0, 0.78 * drawing.width + 1.2), 6.6), layout="constrained"
        )
        ax = figure.subplots()
    else:
        figure = cast("Figure", ax.figure)
    _paint(ax, drawing)
    if path is not None:
        try:
            figure.savefig(path, dpi=130)
        except OSError as error:
            raise TopologyError(f"{path}: cannot be written: {error.strerror or error}") from None
    return figure


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
        import matplotlib.patches
    except ImportError:
        raise MissingDependencyError(
            "drawing a topology needs matplotlib, which is not installed; pip install 'flagcx[plot]'"
        ) from None
    return matplotlib


def _paint(ax: Axes, drawing: Drawing) -> None:
    links = [link for link in drawing.topology.links if link.a in drawing.place and link.b in drawing.place]
    for link in links:
        _paint_link(ax, drawing, link)
    for left, right, text in drawing.bars:
        _paint_bar(ax, drawing, left, right, text)
    _paint_ring(ax, drawing)
    for id, (x, y) in drawing.place.items():
        _paint_device(ax, drawing.topology.device(id), x, y)
    mesh = any(link.kind.is_gpu_fabric for link in links)
    xs = [x for x, _ in drawing.place.values()]
    low = min(min(y for _, y in drawing.place.values()), -0.6 if drawing.bars else 0.6)
    if len(drawing.topology.gpus) > 1:
        low = min(low, 0.6 - 0.1 * (max(xs) - min(xs)) - 0.25) if mesh or not drawing.bars else low
    ax.set_xlim(min(xs) - 1.0, max(xs) + 1.0)
    ax.set_ylim(low - 0.35, max(y for _, y in drawing.place.values()) + 0.75)
    ax.axis("off")
    ax.set_title(_title(drawing), fontsize=11, loc="left")
    _legend(ax, drawing, links)


def _curve(ax: Axes, a: tuple[float, float], b: tuple[float, float], depth: float, **style: Any) -> None:
    """A curve whose middle lies ``depth`` off the straight line between two points, downwards if positive."""
    import matplotlib.patches as patches
    from matplotlib.path import Path as Curve

    middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2 - 2 * depth)
    ax.add_patch(patches.FancyArrowPatch(path=Curve([a, middle, b], [1, 3, 3]), **style))


def _paint_link(ax: Axes, drawing: Drawing, link: Link) -> None:
    a, b = drawing.place[link.a], drawing.place[link.b]
    span = abs(a[0] - b[0])
    direct = link.kind.is_gpu_fabric and a[1] == b[1]
    depth = 0.0
    if direct:
        depth = 0.12 + 0.09 * span
    elif link.kind is LinkKind.SOCKET:
        depth = -min(0.1 + 0.05 * span, 0.6)
    _curve(
        ax,
        a,
        b,
        depth,
        arrowstyle="-",
        linewidth=0.9 + 0.3 * min(link.count, 8) if direct else 1.1,
        linestyle="--" if link.assumed else "-",
        color=_STROKE[link.kind],
        alpha=0.6 if link.kind.is_gpu_fabric else 0.85,
        zorder=1,
    )


def _paint_bar(ax: Axes, drawing: Drawing, left: float, right: float, text: str) -> None:
    import matplotlib.patches as patches

    y = ROW[DeviceKind.NVSWITCH]
    box = patches.FancyBboxPatch(
        (left - 0.3, y - 0.14),
        right - left + 0.6,
        0.28,
        boxstyle="round,pad=0.03",
        facecolor=_FILL[DeviceKind.NVSWITCH],
        edgecolor=_EDGE,
        linewidth=0.8,
        zorder=4,
    )
    ax.add_patch(box)
    ax.text((left + right) / 2, y, text, ha="center", va="center", fontsize=8, zorder=5)
    for x, height in drawing.place.values():
        if height == ROW[DeviceKind.GPU] and left - 1e-9 <= x <= right + 1e-9:
            ax.plot(
                [x, x], [height, y + 0.15], color=_STROKE[LinkKind.NVLINK], linewidth=2.4, alpha=0.7, zorder=1
            )


def _paint_ring(ax: Axes, drawing: Drawing) -> None:
    """The first planned ring: straight to the right neighbour, and under the row for all else."""
    ring = drawing.plan.rings[0].order if drawing.plan else ()
    order = [id for gpu in ring if (id := drawing.topology.gpu(gpu).id) in drawing.place]
    if len(order) < 2:
        return
    row = sorted(order, key=lambda id: drawing.place[id][0])
    rank = {id: position for position, id in enumerate(row)}
    for a, b in zip(order, [*order[1:], order[0]], strict=True):
        (x1, y1), (x2, y2) = drawing.place[a], drawing.place[b]
        near = rank[b] == rank[a] + 1
        depth = 0.0 if near else 0.18 + 0.1 * abs(x2 - x1) if drawing.bars == [] else 0.25
        _curve(
            ax,
            (x1 + 0.3, y1) if near else (x1, y1 - 0.14),
            (x2 - 0.3, y2) if near else (x2, y2 - 0.14),
            depth,
            arrowstyle="-|>",
            mutation_scale=14,
            linewidth=2.3,
            color=_RING,
            zorder=3,
        )


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
        return f"NIC{device.index}\n{device.name if len(device.name) <= 9 else device.name[:8] + '…'}"
    names = {
        DeviceKind.GPU: f"GPU{device.index}",
        DeviceKind.CPU: f"NUMA {device.index}" if device.index >= 0 else "CPU",
        DeviceKind.NIC: f"NIC{device.index}",
        DeviceKind.NVSWITCH: f"NVSwitch {device.index}",
        DeviceKind.HOST_BRIDGE: "root",
        DeviceKind.PCIE_SWITCH: "PCIe\nswitch",
    }
    return names.get(device.kind, device.id)


def _legend(ax: Axes, drawing: Drawing, links: Sequence[Link]) -> None:
    import matplotlib.lines as lines

    handles = []
    for kind in LinkKind:
        own = [link for link in links if link.kind is kind and link.bandwidth_gb_per_s < 900]
        speeds = sorted({link.bandwidth_gb_per_s for link in own})
        if speeds:
            span = f"{speeds[0]:g}" if len(speeds) == 1 else f"{speeds[0]:g} to {speeds[-1]:g}"
            assumed = " (dashed: assumed)" if any(link.assumed for link in own) else ""
            text = f"{_WORD[kind]}, {span} GB/s each way{assumed}"
            handles.append(lines.Line2D([], [], color=_STROKE[kind], linewidth=1.8, label=text))
    for number, ring in enumerate(drawing.plan.rings if drawing.plan and len(drawing.plan.gpus) > 1 else ()):
        shown = [str(gpu) for gpu in ring.order[:16]] + (["..."] if len(ring.order) > 16 else [])
        text = f"ring {number + 1}: {' '.join(shown)}, {ring.bandwidth_gb_per_s:.1f} GB/s"
        drawn: dict[str, Any] = {"color": _RING, "linewidth": 2.3} if number == 0 else {"color": "none"}
        handles.append(lines.Line2D([], [], label=text, **drawn))
    if handles:
        style: dict[str, Any] = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, 0.0),
            "fontsize": 8,
            "frameon": False,
        }
        ax.legend(handles=handles, ncols=2 if drawing.width > 6 else 1, **style)


def _title(drawing: Drawing) -> str:
    parts, plan = [drawing.topology.name or "machine"], drawing.plan
    if plan is not None and len(plan.gpus) > 1:
        speed = f"all-reduce {plan.bandwidth_gb_per_s:.1f} GB/s by {plan.method}"
        parts.append(f"{speed}, {100 * plan.ratio:.0f}% of the bound")
    if drawing.hidden:
        parts.append(f"not drawn: {', '.join(drawing.hidden)}")
    return "\n".join(parts)
