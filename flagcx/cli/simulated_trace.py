"""The trace of a simulated schedule: every rank a process, its messages and local work on lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.profiler.trace import process, slice_of, trace_of

if TYPE_CHECKING:
    from flagcx.cost.simulate import Moment

_LOCAL = 0
"""The thread of a rank's local work. Those of its messages follow: as many as there are at once."""


def simulated_trace(size: int, moments: Iterable[Moment]) -> dict[str, Any]:
    """A trace for Perfetto, in us from the call on.

    A rank sends to one peer after the other on lines of their own where it sends to several at once, and so
    it receives; so lines of one rank never overlap. An arrow joins both ends of a message.

    Args:
        size: Number of ranks.
        moments: The messages with their times.
    """
    events = [event for moment in moments for event in _events(moment)]
    lines: dict[int, dict[int, str]] = {rank: {_LOCAL: "local work"} for rank in range(size)}
    for event in events:
        if event["ph"] == "X" and event["tid"] != _LOCAL:
            number, receives = divmod(event["tid"] - 1, 2)
            words = "receives" if receives else "sends"
            lines[event["pid"]][event["tid"]] = words if not number else f"{words} {number + 1}"
    named = (
        event for rank, threads in lines.items() for event in process(rank, dict(sorted(threads.items())))
    )
    return trace_of([*named, *events])


def _events(moment: Moment) -> Iterator[dict[str, Any]]:
    columns = (moment.source, moment.target, moment.nbytes, moment.begin_us, moment.end_us)
    ends = zip(*(column.tolist() for column in columns), strict=True)
    lines = zip(_place(moment.source).tolist(), _place(moment.target).tolist(), strict=True)
    for (source, target, nbytes, begin, end), (out, into) in zip(ends, lines, strict=True):
        details = {"step": moment.level, "bytes": nbytes}
        sides = ((source, 2 * out + 1, f"to rank {target}"), (target, 2 * into + 2, f"from rank {source}"))
        for rank, thread, name in sides:
            yield slice_of(rank, thread, name, "message", begin, end - begin, details)
        for (rank, thread, _), kind, at in zip(sides, ("s", "f"), (begin, end), strict=True):
            number = (moment.level << 40) + (source << 20) + target
            arrow = {"name": "message", "cat": "message", "id": number, "ts": at, "pid": rank, "tid": thread}
            yield {"ph": kind, **arrow, **({"bp": "e"} if kind == "f" else {})}
    if len(moment.worker):
        ready = _ready(moment)
        for rank, done in zip(moment.worker.tolist(), moment.done_us.tolist(), strict=True):
            begin = min(ready.get(rank, done), done)
            yield slice_of(
                rank, _LOCAL, "reduce or copy", "local", begin, done - begin, {"step": moment.level}
            )


def _place(ranks: np.ndarray) -> np.ndarray:
    """For each entry how many before it are of the same rank."""
    order = np.argsort(ranks, kind="stable")
    grouped = ranks[order]
    first = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]]) if len(ranks) else np.zeros(0, np.int64)
    counts = np.diff(np.r_[first, len(ranks)])
    place = np.empty(len(ranks), np.int64)
    place[order] = np.arange(len(ranks)) - np.repeat(first, counts)
    return place


def _ready(moment: Moment) -> dict[int, float]:
    """When the last message of each rank is over."""
    found: dict[int, float] = {}
    for ranks in (moment.source, moment.target):
        for rank, end in zip(ranks.tolist(), moment.end_us.tolist(), strict=True):
            found[rank] = max(found.get(rank, 0.0), end)
    return found
