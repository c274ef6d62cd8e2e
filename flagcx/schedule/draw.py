"""Space-time pictures of schedules: ranks down; steps, or microseconds, across."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flagcx.errors import MissingDependencyError
from flagcx.schedule.lower import levels
from flagcx.schedule.messages import Message, match_messages
from flagcx.schedule.model import Buffer, Copy, Recv, Reduce, Schedule, Send, Span, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LETTER = {Buffer.INPUT: "I", Buffer.OUTPUT: "O", Buffer.SCRATCH: "S"}
_MOST_LABELS = 160


def text(schedule: Schedule, width: int = 28) -> str:
    """A table of what each rank does in each step, for terminals and docstrings.

    Args:
        schedule: A schedule of not too many ranks. It is put on levels, so that the two sides of a message
            stand in one column.
        width: Characters that a cell may take; a longer one is cut.

    Returns:
        Lines of text: a title, a header, a line a rank, a legend.

    Example:
        >>> print(text(one_shot(2)))  # doctest: +SKIP
        allreduce, one_shot: 2 ranks, 1 chunk
        rank | step 0
           0 | I0→1 S1←1 S0=I0 O0=S0 O0+=S1
           1 | I0→0 S0←0 S1=I0 O0=S0 O0+=S1
        I, O, S: INPUT, OUTPUT, SCRATCH. O1→2 sends chunk 1 of OUTPUT to rank 2;
        O1←2 receives it from rank 2; O1+←2 receives and reduces. O1=I1 copies; O1+=S1 reduces.
    """
    rows = [[_cell(step, width) for step in program.steps] for program in levels(schedule).programs()]
    depth = max((len(row) for row in rows), default=0)
    columns = [[f"step {s}", *(row[s] for row in rows)] for s in range(depth)]
    widths = [max(map(len, column)) for column in columns]
    lines = [_title(schedule), _line("rank", [column[0] for column in columns], widths)]
    for rank in range(schedule.size):
        lines.append(_line(f"{rank:4d}", [column[rank + 1] for column in columns], widths))
    lines.append(
        "I, O, S: INPUT, OUTPUT, SCRATCH. O1→2 sends chunk 1 of OUTPUT to rank 2;\n"
        "O1←2 receives it from rank 2; O1+←2 receives and reduces. O1=I1 copies; O1+=S1 reduces."
    )
    return "\n".join(lines)


def _title(schedule: Schedule) -> str:
    ranks = "1 rank" if schedule.size == 1 else f"{schedule.size} ranks"
    chunks = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    root = "" if schedule.root is None else f", root {schedule.root}"
    return f"{schedule.collective}, {schedule.algorithm}: {ranks}, {chunks}{root}"


def _line(head: str, cells: list[str], widths: list[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return " | ".join([head, *padded]).rstrip()


def _cell(step: Step, width: int) -> str:
    words = []
    for t in step.transfers:
        if isinstance(t, Send):
            words.append(f"{_short(t.src)}→{t.peer}")
        else:
            words.append(f"{_short(t.dst)}{'←' if isinstance(t, Recv) else '+←'}{t.peer}")
    for work in step.local:
        words.append(f"{_short(work.dst)}{'=' if isinstance(work, Copy) else '+='}{_short(work.src)}")
    cell = ""
    for place, word in enumerate(words):
        longer = f"{cell} {word}".lstrip()
        left = len(words) - place
        if len(longer) > width and left > 1 and cell:
            return f"{cell} ... {left} more"
        cell = longer
    return cell


def _short(span: Span) -> str:
    return f"{_LETTER[span.buffer]}{_chunks(span)}"


def _chunks(span: Span) -> str:
    return f"{span.start}" if len(span) == 1 else f"{span.start}-{span.stop - 1}"


def draw(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Saves a picture of ``schedule``: an arrow a message, in the colour of its first chunk.

    A message whose arrow has a plus at its head is reduced into its target. Squares are local work at the end
    of a step: hollow ones copy, filled ones reduce. The schedule is put on levels first.

    Args:
        schedule: A schedule of not too many ranks and steps.
        path: File to write; its ending gives the format (png, svg, pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ScheduleError: The schedule has unmatched messages or a deadlock.
    """
    matching = match_messages(levels(schedule))
    depth = max((len(p.steps) for p in matching.programs), default=0)
    crowded = len(matching.messages) > 2 * depth * schedule.size
    width = min(2.6 + (3 if crowded else 1.45) * depth, 40)
    figure, axes = _figure(width, min(1.8 + 0.85 * schedule.size, 30))
    _frame(axes, schedule, depth)
    labelled = len(matching.messages) <= _MOST_LABELS
    for message in matching.messages:
        _arrow(axes, message, schedule, labelled)
    for program in matching.programs:
        for number, step in enumerate(program.steps):
            _local(axes, program.rank, number, step)
    work = [w for p in matching.programs for s in p.steps for w in s.local]
    marks = [(">", "0.3", "message, labelled by its chunks")]
    marks += [("$+$", "0.3", "reduced on arrival")] * any(m.reduces for m in matching.messages)
    marks += [("s", "white", "copies at the end of the step")] * any(isinstance(w, Copy) for w in work)
    marks += [("s", "black", "reduces at the end of the step")] * any(isinstance(w, Reduce) for w in work)
    _legend(axes, marks, -0.02)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _figure(width: float, height: float) -> tuple[Any, Axes]:
    """A figure of that many inches with one pair of axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "drawing a schedule needs matplotlib, which is not installed: pip install 'flagcx[plot]'"
        ) from error
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _legend(axes: Axes, marks: list[tuple[str, str, str]], below: float) -> None:
    """Explains marks, given as (marker, colour, text), ``below`` the axes."""
    from matplotlib.lines import Line2D

    handles = []
    for marker, colour, label in marks:
        edge = "black" if marker == "s" else colour
        style: dict[str, Any] = {"marker": marker, "markerfacecolor": colour, "markeredgecolor": edge}
        handles.append(Line2D([], [], linestyle="none", label=label, **style))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, below), "ncols": len(handles)}
    axes.legend(handles=handles, frameon=False, fontsize=8, **place)


def _ranks(axes: Axes, size: int, colour: str) -> None:
    """A line for each rank, the first one on top; names for about 40 of them."""
    axes.set_ylim(size - 0.45, -0.55)
    named = range(0, size, max(1, -(-size // 40)))
    axes.set_yticks(named, [f"rank {r}" for r in named])
    for rank in range(size):
        axes.axhline(rank, color=colour, linewidth=0.8, zorder=1)


def _frame(axes: Axes, schedule: Schedule, depth: int) -> None:
    axes.set_title(_title(schedule), loc="left", fontsize=11, pad=22)
    axes.set_xlim(-0.1, depth + 0.05)
    _ranks(axes, schedule.size, "0.7")
    axes.set_xticks([s + 0.5 for s in range(depth)], [f"step {s}" for s in range(depth)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    for step in range(0, depth, 2):
        axes.axvspan(step, step + 1, color="0.95", zorder=0)


def _arrow(axes: Axes, message: Message, schedule: Schedule, labelled: bool) -> None:
    from matplotlib import colormaps

    chunk = message.src.start % schedule.chunks
    shade = chunk if schedule.chunks <= 10 else 0.08 + 0.84 * chunk / (schedule.chunks - 1)
    colour = colormaps["tab10" if schedule.chunks <= 10 else "turbo"](shade)
    start, end = message.send_step + 0.08, message.recv_step + 0.78
    gap = 0.06 if message.target > message.source else -0.06
    head = (end, message.target - gap)
    axes.annotate(
        "",
        xy=head,
        xytext=(start, message.source),
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 2},
        zorder=3,
    )
    axes.plot([start], [message.source], marker="o", markersize=3.5, color=colour, zorder=4)
    if message.reduces:
        circle = {"boxstyle": "circle,pad=0.12", "facecolor": colour, "edgecolor": "white", "linewidth": 0.6}
        axes.text(
            end + 0.05, message.target, "+", color="white", fontsize=8, fontweight="bold",
            ha="center", va="center", bbox=circle, zorder=5,
        )  # fmt: skip
    if labelled:
        # The longer an arrow, the later its label: those of one rank stand apart.
        far = abs(message.target - message.source)
        at = (0.26 + 0.17 * (far - 1)) / far
        x = start + at * (end - start)
        y = message.source + at * (head[1] - message.source)
        box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
        axes.text(
            x, y, _chunks(message.src), color=colour, fontsize=8, ha="center", va="center", bbox=box, zorder=4
        )


def _local(axes: Axes, rank: int, number: int, step: Step) -> None:
    copies = any(isinstance(w, Copy) for w in step.local)
    reduces = any(not isinstance(w, Copy) for w in step.local)
    style: dict[str, Any] = {"marker": "s", "markersize": 6, "markeredgecolor": "black", "zorder": 6}
    if copies:
        axes.plot([number + 0.93], [rank], markerfacecolor="white", **style)
    if reduces:
        axes.plot([number + (0.99 if copies else 0.93)], [rank], markerfacecolor="black", **style)


def draw_times(title: str, size: int, moments: Iterable[Any], path: str | os.PathLike[str]) -> None:
    """Saves a picture: a line a message, from its begin at the sender to its end at the receiver.

    Messages of one step share a colour. A square is the end of a rank's local work (reductions, copies).

    Args:
        title: Stands above.
        size: Number of ranks.
        moments: Level by level, the messages with their times: see ``flagcx.cost.simulate.Moment``.
        path: File to write; its ending gives the format (png, svg, pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure, axes = _figure(12, min(2.2 + 0.55 * size, 30))
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    drawn = [moment for moment in moments if len(moment.source) or len(moment.worker)]
    shades = colormaps["turbo"]
    last = max((float(m.end_us.max()) for m in drawn if len(m.source)), default=0.0)
    for number, moment in enumerate(drawn):
        colour = shades(0.08 + 0.84 * number / max(len(drawn) - 1, 1))
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
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlim(-0.02 * last if last else -1, 1.03 * last or 1)
    _ranks(axes, size, "0.85")
    axes.set_xlabel("time (us)")
    axes.tick_params(length=2, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    marks = [("o", "0.3", "begins, at the sender"), (">", "0.3", "over, at the receiver")]
    _legend(axes, [*marks, ("s", "black", "reduced or copied")], -0.1)
    figure.savefig(path, dpi=130, bbox_inches="tight")
