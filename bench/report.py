"""What measurements are turned into: statistics, the tables that are printed, and JSON lines."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flagcx.report import Report


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Makes a reader of ``a,b,c`` out of a reader of ``a``; of nothing there is an empty list."""
    return lambda text: [kind(part) for part in text.split(",")] if text else []


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lays out cells in columns: the first to the left, the others to the right.

    Example:
        >>> print(format_table(["size", "us"], [["1 KiB", "2.1"]]))
        size    us
        1 KiB  2.1
    """
    return "\n".join(Report("", header, list(rows), words=(0,)).lay_out())


@dataclass(frozen=True, slots=True)
class Result:
    """The time of one implementation at one size.

    Attributes:
        implementation: Its name.
        ranks: How many ranks took part.
        nbytes: The message, in bytes.
        rounds: How many rounds were timed.
        median_us: Median over the rounds, in us a call; a round counts with its slowest rank.
        p25_us: First quartile.
        p75_us: Third quartile.
        min_us: Fastest round.
        wrong: Wrong elements, over all ranks and rounds.
    """

    implementation: str
    ranks: int
    nbytes: int
    rounds: int
    median_us: float
    p25_us: float
    p75_us: float
    min_us: float
    wrong: int

    @classmethod
    def of(cls, implementation: str, ranks: int, nbytes: int, seconds: Sequence[float], wrong: int) -> Result:
        """Sums up the rounds of one implementation at one size; ``seconds`` a call, one for each round."""
        times = [1e6 * value for value in seconds]
        quartiles = statistics.quantiles(times, method="inclusive") if len(times) > 1 else 3 * times
        p25, median, p75 = quartiles
        return cls(implementation, ranks, nbytes, len(times), median, p25, p75, min(times), wrong)


def describe_machine() -> dict[str, Any]:
    """The processor, its cores and the system: what a figure needs beside it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
    }


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends one JSON object a line to ``path``, each with the date and the machine; NaN as null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **describe_machine()}
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps({**stamp, **{key: _plain(value) for key, value in row.items()}}), file=file)


def _plain(value: Any) -> Any:
    """The value for JSON, which knows no NaN."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if value != value else value


def result_row(result: Result, versions: Mapping[str, str], collective: str = "allreduce") -> dict[str, Any]:
    """A result as a JSON object, with times rounded to nanoseconds."""
    row = {key: round(value, 3) if key.endswith("_us") else value for key, value in asdict(result).items()}
    return {"collective": collective, "dtype": "float32", "op": "sum", **row, "versions": dict(versions)}
