"""Space-time pictures of schedules: ranks down; steps, or microseconds, across."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.errors import ArgumentError, MissingDependencyError
from flagcx.figure import check_picture, new_figure, save_picture
from flagcx.schedule.lower import levels
from flagcx.schedule.messages import Message, match_messages
from flagcx.schedule.model import Buffer, Copy, Recv, Reduce, Schedule, Send, Span, Step, check_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LETTER = {Buffer.INPUT: "I", Buffer.OUTPUT: "O", Buffer.SCRATCH: "S"}
_MOST_LABELS, _MOST_NAMES = 160, 40
_MOST_RANKS = 256
_MOST_MESSAGES = 10_000
_WIDEST, _HIGHEST = 40.0, 30.0
_HEAD_INCHES = 0.16
REDUCED = "reduced"
"""The name, in the figure, of the marks of messages that are reduced."""


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


def draw(schedule: Schedule, path: str | os.PathLike[str] | None = None) -> Figure:
    """A picture of ``schedule``: an arrow a message, in the colour of its first chunk.

    A message whose arrow has a plus at its head is reduced into its target. Squares are local work at the end
    of a step: hollow ones copy, filled ones reduce. The schedule is put on levels first. Of one with very
    many messages the first steps are drawn, and the title says how many.

    Args:
        schedule: A schedule of up to 256 ranks.
        path: File to write; its ending gives the format (png, svg, pdf). None writes none.

    Returns:
        The figure, which a notebook shows.

    Raises:
        ArgumentError: There are more ranks than can be told apart, this is no schedule, or the file cannot
            be written.
        MissingDependencyError: matplotlib is not installed.
        ScheduleError: The schedule has unmatched messages or a deadlock.

    Example:
        >>> draw(build("allreduce", "ring", 8), "ring.svg")  # doctest: +SKIP
    """
    check_schedule(schedule)
    if path is not None:
        check_picture(path)
    if schedule.size > _MOST_RANKS:
        raise ArgumentError(
            f"a picture of {schedule.size} ranks cannot be read; expected at most {_MOST_RANKS}: draw the "
            f"same algorithm for fewer"
        )
    matching = match_messages(levels(schedule))
    depth = max((len(p.steps) for p in matching.programs), default=0)
    shown = _shown_steps(matching.messages, depth)
    messages = [m for m in matching.messages if m.send_step < shown]
    steps = [
        (program.rank, number, step)
        for program in matching.programs
        for number, step in enumerate(program.steps[:shown])
    ]
    crowded = len(messages) > 2 * shown * schedule.size
    width, height = (3 if crowded else 1.45) * shown, 0.85 * schedule.size
    if len(messages) > _MOST_LABELS:  # without labels steps and ranks need less room
        width, height = min(max(12, 0.3 * shown), width), min(max(8, 0.2 * schedule.size), height)
    figure = new_figure(min(2.6 + width, _WIDEST), min(1.8 + height, _HIGHEST), "a schedule")
    axes = figure.add_subplot()
    _frame(axes, schedule, shown, depth)
    _arrows(figure, axes, messages, schedule)
    copies = [(rank, number) for rank, number, step in steps if any(isinstance(w, Copy) for w in step.local)]
    reduces = [
        (rank, number) for rank, number, step in steps if any(isinstance(w, Reduce) for w in step.local)
    ]
    _squares(axes, copies, "white", 0.93)
    _squares(axes, reduces, "black", 0.99 if copies else 0.93)
    marks = [(">", "0.3", "message, labelled by its chunks" if len(messages) <= _MOST_LABELS else "message")]
    marks += [("$+$", "0.3", "reduced on arrival")] * any(m.reduces for m in messages)
    marks += [("s", "white", "copies at the end of the step")] * bool(copies)
    marks += [("s", "black", "reduces at the end of the step")] * bool(reduces)
    _legend(axes, marks, -0.02)
    if path is not None:
        save_picture(figure, path)
    return figure


def png(schedule: Schedule) -> bytes | None:
    """``draw``'s picture as a notebook stores it; None where it cannot be drawn."""
    try:
        return draw(schedule)._repr_png_()  # type: ignore[attr-defined]
    except (ArgumentError, MissingDependencyError):
        return None


def html(schedule: Schedule) -> str:
    """``draw``'s picture as HTML, or where it cannot be drawn, the schedule in words."""
    from html import escape

    try:
        return str(draw(schedule)._repr_html_())  # type: ignore[attr-defined]
    except (ArgumentError, MissingDependencyError) as error:
        shown = text(schedule) if schedule.size <= _MOST_NAMES else f"{_title(schedule)}; {error}"
        return f"<pre>{escape(shown)}</pre>"


def _shown_steps(messages: Sequence[Message], depth: int) -> int:
    """How many of the first steps are drawn: all, or those of a few thousand messages."""
    begun = np.bincount([m.send_step for m in messages], minlength=depth)
    return max(1, int(np.searchsorted(np.cumsum(begun), _MOST_MESSAGES, side="right")))


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
    named = range(0, size, max(1, -(-size // _MOST_NAMES)))
    axes.set_yticks(named, [f"rank {r}" for r in named])
    for rank in range(size):
        axes.axhline(rank, color=colour, linewidth=0.8, zorder=1)


def _frame(axes: Axes, schedule: Schedule, shown: int, depth: int) -> None:
    part = "" if shown == depth else f"; the first {shown} of {depth} steps"
    axes.set_title(_title(schedule) + part, loc="left", fontsize=11, pad=22)
    axes.set_xlim(-0.1, shown + 0.05)
    _ranks(axes, schedule.size, "0.7")
    named = range(0, shown, max(1, -(-shown // _MOST_NAMES)))
    axes.set_xticks([s + 0.5 for s in named], [f"step {s}" for s in named])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    for step in range(0, shown, 2):
        axes.axvspan(step, step + 1, color="0.95", zorder=0)


def _arrows(figure: Figure, axes: Axes, messages: Sequence[Message], schedule: Schedule) -> None:
    """All messages in a few collections, which takes a tenth of the time of an annotation for each."""
    from matplotlib.collections import LineCollection, PolyCollection

    if not messages:
        return
    labelled = len(messages) <= _MOST_LABELS
    colours = _colours(schedule.chunks)[[m.src.start % schedule.chunks for m in messages]]
    source, target = (np.array([getattr(m, side) for m in messages], float) for side in ("source", "target"))
    tail = np.stack([[m.send_step + 0.08 for m in messages], source], axis=1)
    head = np.stack(
        [[m.recv_step + 0.78 for m in messages], target - 0.06 * np.sign(target - source)], axis=1
    )
    inches = figure.get_size_inches() / (np.abs(np.ptp([axes.get_xlim(), axes.get_ylim()], axis=1)))
    along = (head - tail) * inches
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    across = np.stack([-along[:, 1], along[:, 0]], axis=1)
    length = _HEAD_INCHES if labelled else 0.6 * _HEAD_INCHES
    neck = head - along * length / inches
    wing = across * (length / 3) / inches
    axes.add_collection(
        LineCollection(
            list(np.stack([tail, neck], axis=1)),
            colors=colours,
            linewidths=1.5 if labelled else 0.7,
            zorder=3,
        )
    )
    axes.add_collection(
        PolyCollection(list(np.stack([head, neck + wing, neck - wing], axis=1)), facecolors=colours, zorder=3)
    )
    if labelled or len(messages) < 10 * _MOST_LABELS:
        axes.scatter(tail[:, 0], tail[:, 1], s=12 if labelled else 4, c=colours, zorder=4)
    reduced = np.array([m.reduces for m in messages])
    if reduced.any():
        x, y = (head[reduced] + [0.05, 0]).T
        axes.scatter(
            x, y, s=70 if labelled else 10, c=colours[reduced], edgecolors="white", linewidths=0.6, zorder=5
        )
        width = 1.2 if labelled else 0.5
        plus = axes.scatter(x, y, s=32 if labelled else 5, marker="+", c="white", linewidths=width, zorder=6)
        plus.set_gid(REDUCED)
    if labelled:
        for message, colour, start, end in zip(messages, colours, tail, head, strict=True):
            _label(axes, message, colour, start, end)


def _colours(chunks: int) -> np.ndarray:
    """A colour for each chunk, float64 of shape (chunks, 4)."""
    from matplotlib import colormaps

    if chunks <= 10:
        return colormaps["tab10"](np.arange(chunks))
    return colormaps["turbo"](0.08 + 0.84 * np.arange(chunks) / (chunks - 1))


def _label(axes: Axes, message: Message, colour: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Names the chunks of a message. The longer its arrow, the later: labels of one rank stand apart."""
    far = abs(message.target - message.source)
    x, y = start + (0.26 + 0.17 * (far - 1)) / far * (end - start)
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
    axes.text(
        x, y, _chunks(message.src), color=colour, fontsize=8, ha="center", va="center", bbox=box, zorder=4
    )


def _squares(axes: Axes, places: Sequence[tuple[int, int]], colour: str, late: float) -> None:
    """A square for each (rank, step) with local work."""
    if places:
        ranks, steps = np.array(places).T
        style: dict[str, Any] = {"marker": "s", "edgecolors": "black", "linewidths": 0.8, "zorder": 6}
        axes.scatter(steps + late, ranks, s=36 if len(places) <= _MOST_LABELS else 5, c=colour, **style)


def draw_times(
    title: str, size: int, moments: Iterable[Any], path: str | os.PathLike[str] | None = None
) -> Figure:
    """A picture of times: a line a message, from its begin at the sender to its end at the receiver.

    Messages of one step share a colour. A square is the end of a rank's local work (reductions, copies).

    Args:
        title: Stands above.
        size: Number of ranks.
        moments: Level by level, the messages with their times: see ``flagcx.cost.simulate.Moment``.
        path: File to write; its ending gives the format (png, svg, pdf). None writes none.

    Returns:
        The figure, which a notebook shows.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = new_figure(12, min(2.2 + 0.55 * size, _HIGHEST), "a schedule")
    axes = figure.add_subplot()
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
    if path is not None:
        save_picture(figure, path)
    return figure
