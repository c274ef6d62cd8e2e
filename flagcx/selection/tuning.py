"""Measures the candidates on the machine at hand, and makes a table of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Protocol

from flagcx.algorithms.candidate import Candidate
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.measurement import DTYPE, Measurement, TimeBudget
from flagcx.selection.table import Fit, Point, Table

TUNED = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "reduce", "gather", "scatter")
"""The collectives that are measured."""
_HOPELESS = 4.0
"""A candidate so many times slower than the fastest is not measured at the next, larger size."""
_HOPELESS_FROM_NBYTES = 1 << 20
_LARGE_NBYTES = 8 << 20
_SCATTERED = 0.5
"""Rounds of one candidate that lie apart by this part of its time say little."""


class Bench(Protocol):
    """One kind of array between the ranks of a job: what can be measured, and how.

    Attributes:
        size: Number of ranks.
    """

    size: int

    def candidates(self, collective: str, nbytes: int) -> Sequence[Candidate]:
        """Every way to carry out a collective that differs from the others at this size."""

    def measurement(self, collective: str, nbytes: int) -> Measurement:
        """Arrays and plans for one collective at one size."""


def measure_point(
    bench: Bench,
    collective: str,
    nbytes: int,
    pace: TimeBudget,
    skip: Sequence[Candidate] = (),
) -> Point:
    """Measures all candidates at one size. All ranks must call it.

    Args:
        bench: What is measured.
        collective: Name of the collective.
        nbytes: Bytes of the message or block.
        pace: How much is measured.
        skip: Candidates that are not worth it.
    """
    tried = [c for c in bench.candidates(collective, nbytes) if c not in skip]
    measurement = bench.measurement(collective, nbytes)
    if nbytes >= _LARGE_NBYTES:
        pace = replace(pace, rounds=(pace.rounds + 1) // 2)
    times = measurement.time_all([c.at(nbytes) for c in tried], pace)
    fastest = min(times, key=quick)
    return Point(nbytes, {c: quick(t) * 1e6 for c, t in zip(tried, times, strict=True)}, _spread(fastest))


def _spread(times: Sequence[float]) -> float:
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return high / low - 1


def unsteady(table: Table) -> str:
    """A warning where many times scattered, since then other work ran beside; empty where few did.

    Args:
        table: As measured.
    """
    points = [point for points in table.measured.values() for point in points]
    scattered = sum(point.spread > _SCATTERED for point in points)
    if scattered <= len(points) // 4:
        return ""
    return (
        f"the times of {scattered} of {len(points)} sizes scattered by over {_SCATTERED:.0%}: other work ran "
        f"on this machine; tune again when it is quiet"
    )


def quick(times: Sequence[float]) -> float:
    """The lower quartile: what else runs on the machine only ever makes a round longer.

    Example:
        >>> quick([9.0, 1.0, 2.0, 50.0, 3.0])
        2.0
    """
    return quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def hopeless(point: Point) -> list[Candidate]:
    """The candidates too far behind at a size to be worth measuring at the next."""
    if point.nbytes < _HOPELESS_FROM_NBYTES:
        return []
    fastest = min(point.times_us.values())
    return [c for c, time_us in point.times_us.items() if time_us > _HOPELESS * fastest]


def tune(
    bench: Bench,
    fit: Fit,
    collectives: Sequence[str],
    sizes: Sequence[int],
    pace: TimeBudget,
    report: Callable[[int, int, str], object] = lambda done, total, what: None,
) -> Table:
    """Measures the candidates of collectives over sizes. All ranks must call it.

    Args:
        bench: What is measured.
        fit: Where the table will hold.
        collectives: Names of collectives.
        sizes: Bytes of whole messages: all blocks together, where a collective has blocks.
        pace: How much is measured.
        report: ``report(done, total, what)`` is called before each point, and at the end.

    Returns:
        The table; the same on every rank.
    """
    total = len(collectives) * len(sizes)
    measured: dict[str, tuple[Point, ...]] = {}
    for i, collective in enumerate(collectives):
        points: list[Point] = []
        skip: set[Candidate] = set()
        for j, nbytes in enumerate(counted(collective, sizes, bench.size)):
            report(i * len(sizes) + j, total, f"{collective} of {sizes[j]:,} bytes")
            point = measure_point(bench, collective, nbytes, pace, tuple(skip))
            skip = set(hopeless(point))  # at the next size alone: what is slow here may win further on
            if not points or point.nbytes > points[-1].nbytes:
                points.append(point)
        measured[collective] = tuple(points)
    report(total, total, "done")
    return Table(fit, measured)


def counted(collective: str, sizes: Sequence[int], ranks: int) -> Iterator[int]:
    """Whole messages as tables count them: bytes of the message, or of one block where there are blocks."""
    for nbytes in sizes:
        per_rank = nbytes // ranks if COLLECTIVES[collective].blocks else nbytes
        yield max(per_rank // DTYPE.itemsize, 1) * DTYPE.itemsize
