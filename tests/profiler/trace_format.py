"""A strict reader of traces, by the description of the Trace Event Format."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

_ARGUMENTS = {
    "bytes": int, "dtype": str, "algorithm": str, "pieces": int, "protocol": str, "transport": str,
    "call": int, "waiting_us": float, "moving_us": float, "queued_us": float,
}  # fmt: skip
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}


def check_trace(trace: Any, ranks: int) -> list[dict]:
    """Raises AssertionError where a trace is not what Perfetto and Chrome read; returns its slices."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[str, int, int]] = set()
    slices = []
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M"), event
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and 0 <= event["pid"] < ranks, event
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert set(event["args"]) == {_METADATA[event["name"]]}, event
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert set(event) == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
        for key in ("ts", "dur"):
            assert type(event[key]) is float and math.isfinite(event[key]) and event[key] >= 0, event
        assert {key: type(value) for key, value in event["args"].items()} == _ARGUMENTS, event
        slices.append(event)
    for rank in range(ranks):
        assert ("process_name", rank, 0) in named
    for event in slices:
        assert ("thread_name", event["pid"], event["tid"]) in named
    _check_nesting(slices)
    return slices


def _check_nesting(slices: list[dict]) -> None:
    """Slices of what runs follow one another; one that reaches into the next is drawn wrong."""
    running = sorted((e for e in slices if e["tid"] == 0), key=lambda e: (e["pid"], e["ts"]))
    for before, after in pairwise(running):
        if before["pid"] == after["pid"]:
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, (before, after)
