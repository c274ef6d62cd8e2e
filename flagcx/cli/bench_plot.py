"""The picture of ``flagcx bench --plot``: time and bus bandwidth over size, one line for each subject."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagcx.figure import check_picture, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flagcx.cli.bench_table import BenchRow

_OURS = ("#c2185b", "#e57fa6", "#7b1fa2", "#b39ddb", "#ad6a00", "#e0a84c")
_OTHERS = ("#3b6ea5", "#5f8f5f", "#8a94a0", "#4fa3a5", "#a3a33f", "#555555")
_MARKERS = "osD^vPX*"
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@dataclass(frozen=True, slots=True)
class BenchLine:
    """The measurements of one subject: flagcx, one of its algorithms, or another library.

    Attributes:
        name: What the picture calls it.
        nbytes: Sizes of the whole message, in bytes, ascending.
        time_us: The time of a call at each size, in us.
        bus_gb_per_s: The bus bandwidth at each size, in 10^9 bytes per second.
        other: Whether it is another library, which has a colour and a dashed line of its own.
    """

    name: str
    nbytes: Sequence[int]
    time_us: Sequence[float]
    bus_gb_per_s: Sequence[float]
    other: bool = False


def plot_bench(title: str, lines: Sequence[BenchLine], path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws times and bus bandwidths beside each other.

    Args:
        title: Says what was measured, and on which machine.
        lines: One for each subject.
        path: File to write (.png, .svg or .pdf), or None to only return the figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: The file cannot be written.

    Example:
        >>> figure = plot_bench("allreduce", [BenchLine("ring", [8, 64], [2.0, 2.1], [0.1, 0.8])])
    """
    figure = new_figure(11, 4.4, "a benchmark", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    times, bandwidths = figure.subplots(1, 2)
    plot_lines(times, lines, "time_us", "time of a call (us); lower is better")
    plot_lines(bandwidths, lines, "bus_gb_per_s", "bus bandwidth (GB/s); higher is better")
    bandwidths.legend(frameon=False, fontsize=9)
    if path is not None:
        save_picture(figure, path)
    return figure


def check_drawing(path: str | os.PathLike[str]) -> None:
    """Refuses a picture that could not be drawn, before the work of measuring.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: The file cannot be written.
    """
    check_picture(path)
    new_figure(1, 1, "a benchmark")


def draw_rows(title: str, rows: Sequence[BenchRow], path: str | os.PathLike[str]) -> Figure:
    """Draws the rows of ``flagcx bench``: a line for each subject, of the form that all subjects have.

    Args:
        title: Says what was measured.
        rows: The rows of all subjects.
        path: The file.
    """
    in_place = all(row.in_place is not None for row in rows)
    by_name: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        timing = row.in_place if in_place else row.out_of_place or row.in_place
        assert timing is not None  # every collective has one of the forms
        point = (row.message.nbytes, timing.time_us, row.bus_gb_per_s(timing))
        by_name.setdefault(row.name, []).append(point)
    lines = []
    for name, points in by_name.items():
        nbytes, times, bandwidths = zip(*points, strict=True)
        label = name or "flagcx"
        lines.append(BenchLine(label, nbytes, times, bandwidths, not label.startswith("flagcx")))
    return plot_bench(f"{title}, on {machine()}", lines, path)


def machine() -> str:
    """The processor and its cores, as Linux names them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    return f"{named[1].replace('(R)', '') if named else platform.machine()}, {cores} cores"


def plot_lines(axes: Axes, lines: Sequence[BenchLine], of: str, label: str) -> None:
    """Draws one measure of all lines over the size, both on scales of powers.

    Args:
        axes: Where to draw.
        lines: One for each subject.
        of: The attribute of ``BenchLine`` to draw: "time_us" or "bus_gb_per_s".
        label: What it is, with its unit.
    """
    colours = {True: iter(_OTHERS * len(lines)), False: iter(_OURS * len(lines))}
    for number, line in enumerate(lines):
        style: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 4.5}
        style |= {"linewidth": 1.4, "linestyle": "--"} if line.other else {"linewidth": 2.2, "zorder": 3}
        axes.plot(line.nbytes, getattr(line, of), label=line.name, color=next(colours[line.other]), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({nbytes for line in lines for nbytes in line.nbytes})
    shown = sizes[:: max(1, -(-len(sizes) // 8))]
    axes.set_xticks(shown, [_size(nbytes) for nbytes in shown], fontsize=8)
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("size of the message", fontsize=9)
    axes.set_title(label, loc="left", fontsize=10)
    axes.grid(color="0.9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _size(nbytes: int) -> str:
    """A size with the largest unit that leaves a whole number."""
    unit, name = next((unit, name) for unit, name in _UNITS if nbytes % unit == 0 and nbytes >= unit)
    return f"{nbytes // unit} {name}"
