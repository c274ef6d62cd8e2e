"""The figures in Prometheus' text format, for a scraper or a file collector.

Source: Prometheus documentation, "Exposition formats", text-based format 0.0.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flagcx.profiler.summary import Summary, SummaryRow

_METRICS: Sequence[tuple[str, str, Callable[[SummaryRow], float]]] = (
    ("calls", "Operations in the records.", lambda row: row.calls),
    ("seconds", "Time of all of them, waiting included.", lambda row: row.total_us / 1e6),
    ("waiting_seconds", "The part of it spent waiting for peers.", lambda row: row.waiting_us / 1e6),
    ("median_seconds", "Median time of one.", lambda row: row.median_us / 1e6),
)


def format_metrics(summary: Summary) -> str:
    """The figures of one rank as gauges, since the records forget: they hold the last operations only."""
    lines = []
    for name, explanation, value in _METRICS:
        full = f"flagcx_recent_operation_{name}"
        lines += [f"# HELP {full} {explanation}", f"# TYPE {full} gauge"]
        lines += [f"{full}{{{_labels(summary.rank, row)}}} {value(row):.9g}" for row in summary.rows]
    return "\n".join(lines) + "\n"


def _labels(rank: int, row: SummaryRow) -> str:
    labels = {
        "rank": rank,
        "collective": row.collective,
        "nbytes": row.nbytes,
        "algorithm": row.algorithm,
    }
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
