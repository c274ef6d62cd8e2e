"""The trace of a training step: when layers were computed and buckets reduced, for ``overlap.py``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flagcx.gradients.buckets import Bucket
from flagcx.profiler.trace import trace_events, write_trace

COMPUTATION, COMMUNICATION = 2, 3
"""Rows of a rank in the trace, behind those of the profiler."""

Span = tuple[int, str, int, int]
"""Row, name, start and end, in ns of the host's clock."""


class Spans:
    """When layers were computed and buckets reduced, by the clock of the host or of the GPU."""

    def __init__(self, xp: Any) -> None:
        self._xp, self._marks = xp, []
        self._began_ns, self._base = time.perf_counter_ns(), None
        if xp is not np:
            xp.cuda.Device().synchronize()
            self._began_ns = time.perf_counter_ns()
            self._base = xp.cuda.get_current_stream().record()

    def now(self) -> Any:
        """A moment: on a GPU, on the current stream."""
        return time.perf_counter_ns() if self._xp is np else self._xp.cuda.get_current_stream().record()

    def add(self, row: int, name: str, start: Any) -> None:
        """Adds what began at ``start`` and ends now."""
        self._marks.append((row, name, start, self.now()))

    def in_ns(self) -> list[Span]:
        """All of them, in the order in which they were added."""
        if self._xp is np:
            return self._marks
        self._xp.cuda.Device().synchronize()

        def at(event: Any) -> int:
            return self._began_ns + int(self._xp.cuda.get_elapsed_time(self._base, event) * 1e6)

        return [(row, name, at(start), at(end)) for row, name, start, end in self._marks]


def save_trace(trial: Any, path: Path) -> tuple[float, float]:
    """Writes the trace of two steps of either kind: what the profiler has, and the rows of ``Spans``.

    Args:
        trial: A ``Trial`` of ``overlap.py``.
        path: Where to.

    Returns:
        Of the steps that overlap: how long this rank's buckets took, and how long of it something was
        computed, in ms.
    """
    comm = trial.comm
    comm.profiler.clear()
    both = {kind: Spans(trial.xp) for kind in ("one_after_the_other", "overlapped")}
    for kind, spans in both.items():
        with _spied_buckets(spans):
            for _ in range(2):
                comm.barrier()
                _traced_step(trial, kind == "overlapped", spans)
    mine = [span for spans in both.values() for span in spans.in_ns()]
    everybodys = comm.allgather_object((comm.profiler.records(), mine))
    if comm.rank == 0:
        records = [theirs for theirs, _ in everybodys]
        trace = trace_events(records, [0] * comm.size)
        recorded = [r.start_ns - r.queued_ns for theirs in records for r in theirs]
        origin = min(recorded or [start for _, spans in everybodys for _, _, start, _ in spans])
        trace["traceEvents"] += [e for q, (_, s) in enumerate(everybodys) for e in _events(q, s, origin)]
        write_trace(path, trace)
    return beside_ms(both["overlapped"].in_ns())


def beside_ms(spans: Sequence[Span]) -> tuple[float, float]:
    """How long buckets took, and how long of it something was computed, in ms.

    Args:
        spans: A rank's; those of a row do not overlap.

    Example:
        >>> beside_ms([(COMPUTATION, "", 0, 5_000_000), (COMMUNICATION, "", 4_000_000, 7_000_000)])
        (3.0, 1.0)
    """
    computed = [(start, end) for row, _, start, end in spans if row == COMPUTATION]
    reduced = [(start, end) for row, _, start, end in spans if row == COMMUNICATION]
    common = sum(max(min(e, f) - max(s, t), 0) for s, e in reduced for t, f in computed)
    return sum(end - start for start, end in reduced) / 1e6, common / 1e6


def _traced_step(trial: Any, overlapped: bool, spans: Spans) -> None:
    start = spans.now()

    def computed(i: int) -> None:
        nonlocal start
        spans.add(COMPUTATION, f"layer {i}", start)
        if overlapped:
            trial.sync.ready(i)
        start = spans.now()

    trial.network.compute(trial.x, trial.y, computed)
    if not overlapped:
        trial.communicate()
    for i in trial.sync.reduced() if overlapped else range(len(trial.network.weights)):
        start = spans.now()
        trial.network.learn(i)
        spans.add(COMPUTATION, f"optimizer {i}", start)
    trial.finish()


@contextmanager
def _spied_buckets(spans: Spans) -> Iterator[None]:
    """Adds a span for each bucket that is reduced inside a ``with`` block."""
    run = Bucket.run

    def spied(bucket: Bucket, given: Any, result: Any) -> None:
        start = spans.now()
        run(bucket, given, result)
        spans.add(COMMUNICATION, f"bucket of {len(bucket.members)}", start)

    Bucket.run = spied  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bucket.run = run  # type: ignore[method-assign]


def _events(rank: int, spans: Sequence[Span], origin_ns: int) -> list[dict[str, Any]]:
    rows = {COMPUTATION: "computation", COMMUNICATION: "buckets"}
    named = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        for row, name in rows.items()
    ]
    return named + [
        {
            "ph": "X",
            "name": name,
            "cat": rows[row],
            "ts": (start - origin_ns) / 1e3,
            "dur": (end - start) / 1e3,
            "pid": rank,
            "tid": row,
        }
        for row, name, start, end in spans
    ]
