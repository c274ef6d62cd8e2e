"""The picture of ``convergence.py --plot``: each codec's loss over the dense one's, for all seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcx.figure import new_figure, save_picture

FAR = 12.0
"""Ratios above are put into words."""
GOOD, BAD, DENSE = "#c2185b", "#8a94a0", "#3b6ea5"


def draw(rows: Sequence[Mapping[str, Any]], within: float, path: Path) -> None:
    """Draws rows as the JSON lines have them.

    Args:
        rows: One for each task and codec; a ratio that is None is that of a training that diverged.
        within: The ratio that is promised, as a line.
        path: The file to write.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = new_figure(4.2 * len(tasks), 4.6, "convergence", layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        found = [row for row in rows if row["task"] == task]
        near = [ratio for row in found for ratio in row["ratios"] if ratio is not None and ratio <= FAR]
        top = max(1.3, *near)
        for place, row in enumerate(found):
            ratios = [ratio for ratio in row["ratios"] if ratio is not None]
            if row["ratio"] is None or row["ratio"] > FAR:
                said = "diverged" if row["ratio"] is None else f"{row['ratio']:.0f} times"
                axes.text(top, place, said, ha="right", va="center", color=BAD, fontsize=8)
                continue
            colour = DENSE if row["codec"] == "dense" else GOOD if row["ratio"] <= within else BAD
            axes.plot([min(ratios), max(ratios)], [place, place], color=colour, linewidth=2)
            axes.plot(ratios, [place] * len(ratios), ".", color=colour, markersize=5)
            axes.plot(row["ratio"], place, "o", color=colour, markersize=7)
        axes.axvline(within, color="0.6", linewidth=1, linestyle=":")
        axes.set_yticks(range(len(found)), [row["codec"] for row in found], fontsize=9)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.minorticks_off()
        shown = [tick for tick in (1, 1.25, 1.5, 2, 3, 5, 10) if tick <= 1.05 * top]
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown], fontsize=8)
        facts = found[0]
        axes.set_title(f"{task}: {facts['ranks']} ranks, {facts['steps']} steps", loc="left", fontsize=10)
        axes.set_xlabel("loss over the dense training's", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"dots: seeds; large: their mean; red: within {within:g} of the dense loss (the dotted line)",
        x=0.01, ha="left", fontsize=9,
    )  # fmt: skip
    save_picture(figure, path)
