"""Space-time pictures of schedules: ranks down, steps across."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flagcx.errors import MissingDependencyError
from flagcx.schedule.lower import levels
from flagcx.schedule.messages import Message, wire
from flagcx.schedule.model import Buffer, Copy, Recv, Schedule, Send, Span, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LETTER = {Buffer.INPUT: "I", Buffer.OUTPUT: "O", Buffer.SCRATCH: "S"}
_MOST_LABELS = 160


def text(schedule: Schedule, width: int = 28) -> str:
    """A table of who does what in which step, for terminals and docstrings.

    Args:
        schedule: A schedule of not too many ranks. It is put on levels, so that the two sides of a message
            stand in one column.
        width: Characters that a cell may take; what is longer is cut.

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

    An arrow with a plus at its head is reduced into what is there. Squares are local work at the end of
    a step: hollow ones copy, filled ones reduce. The schedule is put on levels first.

    Args:
        schedule: A schedule of not too many ranks and steps.
        path: File to write; its ending says the format (png, svg, pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ScheduleError: The schedule has unmatched messages or a deadlock.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "drawing a schedule needs matplotlib, which is not installed: pip install 'flagcx[plot]'"
        ) from error
    wiring = wire(levels(schedule))
    depth = max((len(p.steps) for p in wiring.programs), default=0)
    crowded = len(wiring.messages) > 2 * depth * schedule.size
    figure = Figure(
        figsize=(min(2.6 + (3 if crowded else 1.45) * depth, 40), min(1.8 + 0.85 * schedule.size, 30))
    )
    axes = figure.add_subplot()
    _frame(axes, schedule, depth)
    labelled = len(wiring.messages) <= _MOST_LABELS
    for message in wiring.messages:
        _arrow(axes, message, schedule, labelled)
    for program in wiring.programs:
        for number, step in enumerate(program.steps):
            _local(axes, program.rank, number, step)
    _legend(axes, wiring.messages, wiring.programs)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _frame(axes: Axes, schedule: Schedule, depth: int) -> None:
    axes.set_title(_title(schedule), loc="left", fontsize=11, pad=22)
    axes.set_xlim(-0.1, depth + 0.05)
    axes.set_ylim(schedule.size - 0.45, -0.55)
    axes.set_yticks(range(schedule.size), [f"rank {r}" for r in range(schedule.size)])
    axes.set_xticks([s + 0.5 for s in range(depth)], [f"step {s}" for s in range(depth)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    for step in range(0, depth, 2):
        axes.axvspan(step, step + 1, color="0.95", zorder=0)
    for rank in range(schedule.size):
        axes.axhline(rank, color="0.7", linewidth=0.8, zorder=1)


def _arrow(axes: Axes, message: Message, schedule: Schedule, labelled: bool) -> None:
    from matplotlib import colormaps

    colour = _colour(colormaps, _chunk_of_message(message, schedule), schedule.chunks)
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


def _chunk_of_message(message: Message, schedule: Schedule) -> int:
    """The chunk that gives an arrow its colour."""
    return message.src.start % schedule.chunks


def _colour(colormaps: Any, chunk: int, chunks: int) -> Any:
    if chunks <= 10:
        return colormaps["tab10"](chunk)
    return colormaps["turbo"](0.08 + 0.84 * chunk / (chunks - 1))


def _local(axes: Axes, rank: int, number: int, step: Step) -> None:
    copies = any(isinstance(w, Copy) for w in step.local)
    reduces = any(not isinstance(w, Copy) for w in step.local)
    style: dict[str, Any] = {
        "marker": "s",
        "markersize": 6,
        "markeredgecolor": "black",
        "linestyle": "none",
        "zorder": 6,
    }
    if copies:
        axes.plot([number + 0.93], [rank], markerfacecolor="white", **style)
    if reduces:
        axes.plot([number + (0.99 if copies else 0.93)], [rank], markerfacecolor="black", **style)


def _legend(axes: Axes, messages: list[Message], programs: Any) -> None:
    from matplotlib.lines import Line2D

    work = [w for p in programs for s in p.steps for w in s.local]
    marks = [
        (True, "->", "0.3", "message, labelled by its chunks"),
        (any(m.reduces for m in messages), "$+$", "0.3", "reduced on arrival"),
        (any(isinstance(w, Copy) for w in work), "s", "white", "copies at the end of the step"),
        (any(not isinstance(w, Copy) for w in work), "s", "black", "reduces at the end of the step"),
    ]
    handles = []
    for used, marker, face, label in marks:
        if not used:
            continue
        if marker == "->":
            handles.append(Line2D([], [], color=face, marker=">", markevery=[-1], label=label))
        else:
            edge = "black" if marker == "s" else face
            handles.append(
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker=marker,
                    markerfacecolor=face,
                    markeredgecolor=edge,
                    label=label,
                )
            )
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -0.02),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
