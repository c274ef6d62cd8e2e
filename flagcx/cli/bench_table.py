"""The table that nccl-tests prints, for any collective: rows, bandwidths and their layout.

Algorithm bandwidth is size / time, where size counts the whole message: of all ranks together for
collectives that have a block for each rank. Bus bandwidth is the algorithm bandwidth times the share of
the message that the busiest link has to carry, so that it can be compared with the link's own speed.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flagcx.cli.bench_oracle import BenchMessage
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import bus_share


@dataclass(frozen=True, slots=True)
class BenchTiming:
    """The measurement of one form of a call, in place or not: one half of a row.

    Attributes:
        time_us: Time of a call, in us.
        wrong: Wrong elements, over all ranks.
    """

    time_us: float
    wrong: int


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One line of the table.

    Attributes:
        message: The collective and its message.
        out_of_place: Its timing, or None where the collective has no such form.
        in_place: The same for the form in place.
        name: What was measured, where it is one of several.
    """

    message: BenchMessage
    out_of_place: BenchTiming | None
    in_place: BenchTiming | None
    name: str = ""

    def algorithm_gb_per_s(self, timing: BenchTiming) -> float:
        """Algorithm bandwidth, in 10^9 bytes per second."""
        return self.message.nbytes / timing.time_us / 1e3 if timing.time_us else 0.0

    def bus_gb_per_s(self, timing: BenchTiming) -> float:
        """Bus bandwidth, in 10^9 bytes per second."""
        return self.algorithm_gb_per_s(timing) * bus_share(self.message.collective, self.message.size)

    @property
    def timings(self) -> Sequence[BenchTiming]:
        """The timings of the forms that the collective has."""
        return [timing for timing in (self.out_of_place, self.in_place) if timing]

    def as_json(self) -> dict[str, Any]:
        """The row as one flat JSON object."""
        row = {"collective": self.message.collective, **self.message.columns(), "ranks": self.message.size}
        for place, timing in (("out_of_place", self.out_of_place), ("in_place", self.in_place)):
            if timing:
                row[f"{place}_us"] = round(timing.time_us, 3)
                row[f"{place}_algbw_gb_per_s"] = round(self.algorithm_gb_per_s(timing), 4)
                row[f"{place}_busbw_gb_per_s"] = round(self.bus_gb_per_s(timing), 4)
                row[f"{place}_wrong"] = timing.wrong
        return {"measured": self.name, **row} if self.name else row


_HALF = "{:>9}{:>8}{:>8}{:>8}"
_LEFT = "{:>14}{:>13}{:>15}{:>8}{:>6} "


def header() -> str:
    """The lines above the rows."""
    lines = (
        _LEFT.format("", "", "", "", "") + f"{'out-of-place':>22}{'':11}{'in-place':>20}",
        _LEFT.format("size", "count", "type", "redop", "root")
        + 2 * _HALF.format("time", "algbw", "busbw", "#wrong"),
        _LEFT.format("(B)", "(elements)", "", "", "") + 2 * _HALF.format("(us)", "(GB/s)", "(GB/s)", ""),
    )
    return "\n".join(f"#{line[1:]}".rstrip() for line in lines)


def format_row(row: BenchRow) -> str:
    """One line of the table; a form that the collective does not have shows as dashes."""
    left = _LEFT.format(*row.message.columns().values())
    halves = "".join(_half(row, timing) for timing in (row.out_of_place, row.in_place))
    return f"{left}{halves}  {row.name}".rstrip()


def _half(row: BenchRow, timing: BenchTiming | None) -> str:
    if timing is None:
        return _HALF.format("-", "-", "-", "-")
    time_us = f"{timing.time_us:.2f}" if timing.time_us < 1e4 else f"{timing.time_us:.0f}"
    bandwidths = (row.algorithm_gb_per_s(timing), row.bus_gb_per_s(timing))
    return _HALF.format(time_us, *(f"{bandwidth:.2f}" for bandwidth in bandwidths), timing.wrong)


def footer(rows: Sequence[BenchRow]) -> str:
    """The lines below the rows: wrong elements, and bus bandwidth on average over all timings."""
    wrong = sum(timing.wrong for row in rows for timing in row.timings)
    lines = [f"# Out of bounds values : {wrong} {'OK' if not wrong else 'FAILED'}"]
    for name in dict.fromkeys(row.name for row in rows):
        found = [row.bus_gb_per_s(t) for row in rows if row.name == name for t in row.timings]
        lines.append(f"# Avg bus bandwidth    : {sum(found) / max(1, len(found)):.4g}  {name}".rstrip())
    return "\n".join(lines if rows else [*lines, "# Avg bus bandwidth    : 0"])


def sizes(begin: int, end: int, factor: int) -> list[int]:
    """The sizes from ``begin`` to ``end``, each ``factor`` times the one before.

    Raises:
        ArgumentError: There is none, or they would not end.

    Example:
        >>> sizes(8, 128, 4)
        [8, 32, 128]
    """
    if begin < 1 or factor < 2:
        raise ArgumentError(
            f"sizes from {begin} by a factor of {factor} don't end; begin at 1 byte or more, by 2 or more"
        )
    if begin > end:
        raise ArgumentError(
            f"sizes from {begin} to {end} bytes are none; begin at {end} or less, or end later"
        )
    result = [begin]
    while result[-1] * factor <= end:
        result.append(result[-1] * factor)
    return result
