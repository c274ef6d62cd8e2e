"""Space-time pictures with true times: ranks down, microseconds across."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol

from flagcx.errors import MissingDependencyError


class Moment(Protocol):
    """The messages of one level with their times, as ``flagcx.cost.simulate`` gives them."""

    @property
    def source(self) -> Any: ...
    @property
    def target(self) -> Any: ...
    @property
    def begin_us(self) -> Any: ...
    @property
    def end_us(self) -> Any: ...
    @property
    def worker(self) -> Any: ...
    @property
    def done_us(self) -> Any: ...


def draw_times(title: str, size: int, moments: Iterable[Moment], path: str | os.PathLike[str]) -> None:
    """Saves a picture: a line a message, from its begin at the sender to its end at the receiver.

    Messages of one step share a colour. A square is the end of a rank's local work (reductions, copies).

    Args:
        title: Stands above.
        size: Number of ranks.
        moments: Level by level.
        path: File to write; its ending says the format (png, svg, pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.collections import LineCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "drawing a schedule needs matplotlib, which is not installed: pip install 'flagcx[plot]'"
        ) from error
    levels = [moment for moment in moments if len(moment.source) or len(moment.worker)]
    figure = Figure(figsize=(12, min(2.2 + 0.55 * size, 30)))
    axes = figure.add_subplot()
    shades = colormaps["turbo"]
    last = max((float(m.end_us.max()) for m in levels if len(m.source)), default=0.0)
    for number, moment in enumerate(levels):
        colour = shades(0.08 + 0.84 * number / max(len(levels) - 1, 1))
        lines = [
            ((begin, a), (end, b))
            for a, b, begin, end in zip(
                moment.source, moment.target, moment.begin_us, moment.end_us, strict=True
            )
        ]
        axes.add_collection(LineCollection(lines, colors=[colour], linewidths=1.3, zorder=3))
        axes.plot(moment.begin_us, moment.source, "o", color=colour, markersize=3.5, zorder=4)
        axes.plot(moment.end_us, moment.target, ">", color=colour, markersize=5, zorder=4)
        axes.plot(moment.done_us, moment.worker, "s", color="black", markersize=3.5, zorder=5)
        last = max(last, float(moment.done_us.max(initial=0.0)))
    _frame(axes, title, size, last)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _frame(axes: Any, title: str, size: int, last: float) -> None:
    from matplotlib.lines import Line2D

    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlim(-0.02 * last if last else -1, 1.03 * last or 1)
    axes.set_ylim(size - 0.45, -0.55)
    step = max(1, -(-size // 40))
    axes.set_yticks(range(0, size, step), [f"rank {r}" for r in range(0, size, step)])
    axes.set_xlabel("time (us)")
    axes.tick_params(length=2, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for rank in range(size):
        axes.axhline(rank, color="0.85", linewidth=0.7, zorder=1)
    marks = [("o", "0.3", "begins, at the sender"), (">", "0.3", "over, at the receiver")]
    marks.append(("s", "black", "reduced or copied"))
    handles = [
        Line2D([], [], linestyle="none", marker=mark, color=colour, label=text)
        for mark, colour, text in marks
    ]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3, frameon=False, fontsize=8
    )
