"""Traces for Perfetto and chrome://tracing: every rank a process, on one clock.

Source: "Trace Event Format", the JSON object form with complete ("X") and metadata ("M") events.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcx.errors import ArgumentError
from flagcx.profiler.records import Record

RUNNING, QUEUED = 0, 1
"""The threads of a rank in the trace: its running operations, and its queued ones."""


def trace_events(
    records: Sequence[Sequence[Record]], offsets_ns: Sequence[int], first_rank: int = 0
) -> dict[str, Any]:
    """The trace of all ranks, as an object for JSON; times are in us from the first event.

    Each rank has its records, and the time by which its clock is ahead of rank 0's. The first are those of
    ``first_rank``.
    """
    starts = [
        r.start_ns - r.queued_ns - offset
        for mine, offset in zip(records, offsets_ns, strict=True)
        for r in mine
    ]
    origin_ns = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for rank, (mine, offset) in enumerate(zip(records, offsets_ns, strict=True), first_rank):
        events += _names(rank, any(r.queued_ns for r in mine))
        for record in mine:
            events += _events(rank, record, origin_ns + offset)
    return trace_of(events)


def trace_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A trace of events, as an object for JSON."""
    return {"traceEvents": list(events), "displayTimeUnit": "ns"}


def _names(rank: int, queues: bool) -> Iterator[dict[str, Any]]:
    return process(rank, {RUNNING: "running", **({QUEUED: "queued"} if queues else {})})


def process(rank: int, threads: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """The events that make a rank a process of a trace.

    Args:
        rank: The rank.
        threads: The names of its threads, by number.
    """

    def named(kind: str, thread: int, value: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": value}

    first = min(threads, default=0)
    yield named("process_name", first, {"name": f"rank {rank}"})
    yield named("process_sort_index", first, {"sort_index": rank})
    for thread, name in threads.items():
        yield named("thread_name", thread, {"name": name})


def slice_of(
    rank: int,
    thread: int,
    name: str,
    category: str,
    start_us: float,
    elapsed_us: float,
    details: dict[str, Any],
) -> dict[str, Any]:
    """One thing that a thread of a rank does for some time."""
    times = {"ts": start_us, "dur": elapsed_us}
    return {"ph": "X", "name": name, "cat": category, **times, "pid": rank, "tid": thread, "args": details}


def _events(rank: int, record: Record, origin_ns: int) -> Iterator[dict[str, Any]]:
    operation = record.operation
    details = {
        "bytes": operation.nbytes,
        "dtype": operation.dtype,
        "algorithm": operation.algorithm,
        "pieces": operation.pieces,
        "protocol": operation.protocol or "by rule",
        "transport": operation.transport,
        "call": record.sequence,
        "waiting_us": record.waiting_ns / 1e3,
        "moving_us": record.moving_ns / 1e3,
        "queued_us": record.queued_ns / 1e3,
    }
    if record.sent_nbytes is not None:
        details["sent_bytes"] = record.sent_nbytes

    def event(thread: int, start_ns: int, elapsed_ns: int) -> dict[str, Any]:
        times = (start_ns - origin_ns) / 1e3, elapsed_ns / 1e3
        return slice_of(rank, thread, operation.collective, operation.transport, *times, details)

    yield event(RUNNING, record.start_ns, record.elapsed_ns)
    if record.queued_ns:
        yield event(QUEUED, record.start_ns - record.queued_ns, record.queued_ns)


def write_trace(path: str | os.PathLike, trace: dict[str, Any]) -> None:
    """Writes a trace; an older file is replaced by the whole trace, never by a part of it.

    Raises:
        ArgumentError: The file cannot be written.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(trace, allow_nan=False))
        os.replace(draft, path)
    except OSError as error:
        raise ArgumentError(
            f"the trace cannot be written to {path}: {error.strerror or error}; pass the path of a file in a "
            f"folder that exists and that the rank may write to"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
