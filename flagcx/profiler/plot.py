"""The records of one rank as a picture."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from flagcx.arguments import format_nbytes
from flagcx.figure import check_picture, new_figure, save_picture
from flagcx.profiler.records import Record
from flagcx.profiler.summary import Summary, key_of

_MOST_BARS = 12


def plot_records(records: Sequence[Record], rank: int, path: str | os.PathLike | None = None) -> Any:
    """Draws where the time went, and how long operations took by size; see ``Profiler.plot``."""
    if path is not None:
        check_picture(path)
    figure = new_figure(12, 5, "records", layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_shares(left, Summary.of(rank, records))
    _draw_times(right, records)
    figure.suptitle(f"flagcx, rank {rank}: the last {len(records):,} operations")
    if path is not None:
        save_picture(figure, path)
    return figure


def _draw_shares(axes: Any, summary: Summary) -> None:
    """One bar for each operation: time moving data, then time waiting."""
    rows = summary.rows[:_MOST_BARS][::-1]
    names = [
        f"{row.collective} {format_nbytes(row.nbytes)}\n{row.algorithm}, {row.calls:,} calls" for row in rows
    ]
    moving = [row.moving_us / 1e3 for row in rows]
    axes.barh(names, moving, color="#3b6fb6", label="moving")
    axes.barh(names, [row.waiting_us / 1e3 for row in rows], left=moving, color="#e0a33a", label="waiting")
    axes.tick_params(axis="y", labelsize=8)
    axes.set(xlabel="time in all (ms)", title="Where the time went")
    if rows:
        axes.legend(frameon=False)


def _draw_times(axes: Any, records: Sequence[Record]) -> None:
    """One dot for each run, by size; a colour for each collective and algorithm."""
    dots: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        collective, nbytes, algorithm = key_of(record)
        dots[f"{collective}: {algorithm}"].append((max(nbytes, 1), max(record.elapsed_ns, 1) / 1e3))
    for label, points in sorted(dots.items()):
        axes.scatter(*zip(*points, strict=True), s=8, alpha=0.5, label=label)
    axes.set(xlabel="bytes", ylabel="time of a run (us)", title="How long operations took")
    if dots:
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize=7, frameon=False, loc="best")
    axes.grid(alpha=0.3)
