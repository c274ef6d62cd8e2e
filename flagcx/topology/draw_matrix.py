"""Paints the matrix of classes between a machine's GPUs and NICs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flagcx.topology import paths
from flagcx.topology.graph import DeviceKind, Graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 20
_FILL = {
    "NV": "#bfe0b8",
    "XGMI": "#e6c3b8",
    "PIX": "#dceefb",
    "PXB": "#dceefb",
    "PHB": "#f7efc8",
    "NODE": "#f7e3c8",
    "SYS": "#f4d0d0",
    "X": "#ffffff",
}


def shown_in_matrix(topology: Graph) -> list[str]:
    """The rows of the matrix beside a picture: GPUs and NICs, GPUs alone where both are too many, or none."""
    gpus = [f"GPU{gpu.index}" for gpu in topology.gpus]
    nics = [f"NIC{nic.index}" for nic in topology.devices(DeviceKind.NIC)]
    if not 1 < len(gpus) <= _MOST:
        return []
    return gpus + nics if len(gpus) + len(nics) <= _MOST else gpus


def paint_matrix(ax: Axes, topology: Graph, names: Sequence[str], inches: float) -> None:
    """Paints the matrix.

    Args:
        ax: The axes.
        topology: The machine.
        names: Rows and columns, as ``paths.matrix`` names them.
        inches: Width of the axes, by which the text is sized.
    """
    matrix = paths.matrix(topology)
    count = len(names)
    longest = max(len(matrix[a][b]) for a in names for b in names)
    size = min(8.0, 72 * inches / (count + 3) / (0.9 * longest))
    for row, a in enumerate(names):
        y = count - row - 0.5
        ax.text(-0.15, y, a, ha="right", va="center", fontsize=size, fontweight="bold")
        ax.text(
            row + 0.5,
            count + 0.15,
            a,
            ha="center",
            va="bottom",
            fontsize=size,
            rotation=90,
            fontweight="bold",
        )
        for column, b in enumerate(names):
            cell = matrix[a][b]
            colour = _FILL.get(cell.rstrip("0123456789"), "#eeeeee")
            ax.fill(
                [column, column + 1, column + 1, column], [y - 0.5, y - 0.5, y + 0.5, y + 0.5], color=colour
            )
            ax.text(column + 0.5, y, cell, ha="center", va="center", fontsize=size)
    ax.set_xlim(-0.9 - 0.04 * count, count)
    ax.set_ylim(0, count + 1.2 + 0.08 * count)
    ax.set_aspect("equal", anchor="N")
    ax.axis("off")
