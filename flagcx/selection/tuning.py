"""Measures candidates on the machine at hand, and makes a table of their times.

Candidates take turns, round by round, so that a machine that speeds up or slows down does so for all of
them. A round is a batch of calls after a barrier and counts with its slowest rank. After two rounds only
those go on that are near the fastest.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from flagcx.algorithms import build, entries
from flagcx.algorithms.candidate import Candidate, Groups
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Schedule
from flagcx.selection.candidates import Request, schedules
from flagcx.selection.rules import PIECE_NBYTES, serving_over_hosts
from flagcx.selection.table import Fit, Point, Table
from flagcx.transport.base import Call, Plan, Transport

TUNED = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "reduce", "gather", "scatter")
"""The collectives that are measured."""
DTYPE = np.dtype(np.float32)
"""What is measured: float32, and sums of it."""
_SURELY = 1.5
"""A candidate that is slower by so much more than ``TimeBudget.near`` leaves after its first turn."""
_HOPELESS = 4.0
"""A candidate so many times slower than the fastest is not measured at the next, larger size."""
_HOPELESS_FROM_NBYTES = 1 << 20
_LARGE_NBYTES = 8 << 20
_SCATTERED = 0.5
"""Rounds of one candidate that lie apart by this part of its time say little."""


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """How much is measured.

    Attributes:
        batch_s: How long a batch should take, in seconds.
        rounds: Rounds for each size; half as many for large messages.
        near: Candidates slower than the fastest by this factor leave after two rounds.
        total_s: How long all of it should take, in seconds: each size gets an equal part of what is left,
            in which there are fewer rounds, and of large messages fewer candidates, if need be.
    """

    batch_s: float = 0.015
    rounds: int = 11
    near: float = 1.6
    total_s: float = math.inf


QUICK = TimeBudget(batch_s=0.003, rounds=4, near=1.4)
_LEAST_TRIED = 4
"""So many candidates are timed however short the time is: those that were fastest at the size before."""


class Clock:
    """Starts the ranks that a transport joins together, and tells the slowest's time to all."""

    def __init__(self, transport: Transport) -> None:
        self._barrier = _small(transport, "barrier", "dissemination", 0, np.uint8)
        self._largest = _small(transport, "allreduce", "one_shot", 1, np.float64)

    def barrier(self) -> None:
        """Waits until every rank has come."""
        self._barrier.run(None, None)

    def slowest(self, seconds: float) -> float:
        """The longest of the ranks' times."""
        value = np.array([seconds])
        self._largest.run(value, value)
        return float(value[0])


def _small(transport: Transport, collective: str, algorithm: str, count: int, dtype: Any) -> Plan:
    kind = dtype_of(np.dtype(dtype))
    schedule = build(collective, algorithm, transport.size)
    return transport.compile(Call(schedule, transport.rank, count, kind, resolve_op("max", kind), True))


class Measurement(ABC):
    """Arrays and plans for one collective at one size. All ranks make the same calls.

    Args:
        transport: What carries the data.
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
        full: ``full(count)``: an array of so many zeros, written, so that every page is there. No sum of
            zeros overflows.

    Attributes:
        count: Elements of the message or block.
        root: The root of a rooted collective, else None.
        sendbuf: The INPUT array, or None where this rank has none.
        recvbuf: The OUTPUT array, or None.
        op: The operation, or None where nothing is reduced.
    """

    def __init__(
        self, transport: Transport, collective: str, nbytes: int, full: Callable[[int], Any]
    ) -> None:
        self._transport, self.collective = transport, collective
        self.rank, self.size = rank, size = transport.rank, transport.size
        self.count = count = max(nbytes // DTYPE.itemsize, 1)
        self.dtype = dtype_of(DTYPE)
        kind = COLLECTIVES[collective]
        self.root = root = 0 if kind.rooted else None
        self.op = resolve_op("sum", self.dtype) if kind.reduces else None
        inputs = kind.input_blocks(size) if kind.has_input(rank, root) else 0
        outputs = kind.output_blocks(size) if kind.has_output(rank, root) else 0
        self.sendbuf = full(inputs * count) if inputs else None
        over = collective in ("allreduce", "reduce", "broadcast") and self.sendbuf is not None and outputs
        self.recvbuf = self.sendbuf if over else full(outputs * count) if outputs else None

    @property
    def in_place(self) -> bool:
        """Whether INPUT and OUTPUT are one array."""
        return self.sendbuf is not None and self.sendbuf is self.recvbuf

    def plan(self, choice: Candidate) -> Plan:
        """Compiles a choice for this size."""
        return self._compile(choice.build(self.collective, self.size, self.root), choice.protocol)

    def _compile(self, schedule: Schedule, protocol: str = "") -> Plan:
        call = Call(schedule, self.rank, self.count, self.dtype, self.op, self.in_place, protocol)
        return self._transport.compile(call)

    @abstractmethod
    def seconds(self, plan: Plan, calls: int, warm_up: int) -> float:
        """The time of a call in seconds, over a batch, of the slowest rank; the same on every rank."""

    def time_all(
        self, choices: Sequence[Candidate], pace: TimeBudget, seed: int = 0, always: Collection[int] = ()
    ) -> list[list[float]]:
        """Times of a call in seconds, one a round, for each choice; fewer for those far behind.

        Args:
            choices: What is measured.
            pace: How much.
            seed: Of the order in which they take turns; the same on all ranks.
            always: Positions of choices that are measured in every round, however slow.

        The rounds end with ``pace.total_s``; each choice is timed once at least.
        """
        plans: dict[int, Plan] = {}
        times: list[list[float]] = []
        spent_s = 0.0  # by the times that all ranks know, so that all stop after the same round

        def drop(factor: float) -> None:
            fastest = min(min(t) for t in times)
            for i in [i for i in plans if i not in always and min(times[i]) > factor * fastest]:
                del plans[i]

        for i, choice in enumerate(choices):
            plans[i] = self.plan(choice)
            seconds = self.seconds(plans[i], 1, 1)
            # One call says little where calls are short: these are timed in a batch before any is dropped.
            calls = _calls(pace, seconds)
            spent_s += seconds * (calls + 2)
            times.append([self.seconds(plans[i], calls, min(calls // 4, 20)) if calls > 1 else seconds])
            drop(_SURELY * pace.near)
        order = random.Random(seed)
        for turn in range(pace.rounds - 1):
            if spent_s > pace.total_s:
                break
            for i in order.sample(sorted(plans), len(plans)):
                calls = _calls(pace, min(times[i]))
                times[i].append(self.seconds(plans[i], calls, min(calls // 8, 8)))
                spent_s += times[i][-1] * calls
            if turn == 0:
                # Not before each had two turns: what else runs on the machine spoils one easily.
                drop(pace.near)
        return times


def _calls(pace: TimeBudget, seconds: float) -> int:
    """How many calls a batch has."""
    return min(max(math.ceil(pace.batch_s / seconds), 1), 1000)


class HostMeasurement(Measurement):
    """Measures NumPy arrays between processes of one host, or of several, which have ``groups`` of ranks."""

    def __init__(self, transport: Transport, collective: str, nbytes: int, groups: Groups = ()) -> None:
        super().__init__(transport, collective, nbytes, lambda count: np.full(count, 0, DTYPE))
        self._clock, self._groups = Clock(transport), groups

    def plan(self, choice: Candidate) -> Plan:
        """Compiles a choice for this size, along the hosts where there are several."""
        if self._groups:
            choice = choice.along(tuple(rank for group in self._groups for rank in group), self._groups)
        return super().plan(choice)

    def seconds(self, plan: Plan, calls: int, warm_up: int) -> float:
        """The time of a call in seconds, over a batch, of the slowest rank."""
        run, sendbuf, recvbuf = plan.run, self.sendbuf, self.recvbuf
        for _ in range(warm_up):
            run(sendbuf, recvbuf)
        self._clock.barrier()
        start = perf_counter()
        for _ in range(calls):
            run(sendbuf, recvbuf)
        return self._clock.slowest((perf_counter() - start) / calls)


class HostBench:
    """NumPy arrays between processes, as the tuner measures them; see ``Bench``.

    Args:
        transport: What carries them.
        groups: The ranks of each host, where there are several.
    """

    def __init__(self, transport: Transport, groups: Groups = ()) -> None:
        self._transport, self.size, self._clock = transport, transport.size, Clock(transport)
        self._groups = groups

    def candidates(self, collective: str, nbytes: int) -> list[Candidate]:
        """The schedules that come with flagcx, with every protocol, and those of the user's own."""
        own = [known for known in entries(collective) if not known.trusted and known.allows(self.size)]
        request = Request(collective, nbytes, self.size)
        found = serving_over_hosts(request) if self._groups else schedules(request, PIECE_NBYTES)
        return [
            replace(one, protocol=protocol)
            for one in found
            for protocol in self._transport.protocols(collective, one.algorithm, nbytes) or ("",)
        ] + [Candidate(known.algorithm) for known in own]

    def measurement(self, collective: str, nbytes: int) -> HostMeasurement:
        """Arrays and plans for one collective at one size."""
        return HostMeasurement(self._transport, collective, nbytes, self._groups)

    def slowest(self, seconds: float) -> float:
        """The longest of the ranks' times."""
        return self._clock.slowest(seconds)


class Bench(Protocol):
    """One kind of array between the ranks of a job: what can be measured, and how.

    Attributes:
        size: Number of ranks.
    """

    size: int

    def candidates(self, collective: str, nbytes: int) -> Sequence[Candidate]:
        """All candidates that differ from each other at this size."""

    def measurement(self, collective: str, nbytes: int) -> Measurement:
        """Arrays and plans for one collective at one size."""

    def slowest(self, seconds: float) -> float:
        """The longest of the ranks' times, on every rank."""


def measure_point(
    bench: Bench, collective: str, nbytes: int, pace: TimeBudget, skip: Collection[Candidate] = ()
) -> Point:
    """Measures all candidates at one size, less those to skip. All ranks must call it."""
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
    """A warning where many times of a table scattered, since other work ran too; empty where few did."""
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


def unaffordable(point: Point, nbytes: int, limit_s: float) -> list[Candidate]:
    """The candidates, the slowest at a size, that there is no time to try at a larger one of ``nbytes``."""
    spent_s, found, per_us = 0.0, [], _spent_s(point, nbytes)
    in_order = sorted(point.times_us.items(), key=lambda item: (item[1], item[0]))
    for number, (candidate, time_us) in enumerate(in_order):
        spent_s += per_us * time_us
        if number >= _LEAST_TRIED and spent_s > limit_s:
            found.append(candidate)
    return found


def _spent_s(point: Point, nbytes: int) -> float:
    """Seconds that it takes to try a candidate at a larger size, for each us that it takes at a point."""
    return 2e-6 * nbytes / point.nbytes  # a call that warms up, and one that is timed


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
        sizes: Bytes of whole messages: all blocks together, where a collective has blocks. Left out are those
            at which the fastest candidate takes longer than there is time.
        pace: How much is measured.
        report: ``report(done, total, what)`` is called before each point, and at the end.

    Returns:
        The table; the same on every rank.
    """
    total, start = len(collectives) * len(sizes), perf_counter()
    measured: dict[str, tuple[Point, ...]] = {}
    for i, collective in enumerate(collectives):
        points: list[Point] = []
        skip: set[Candidate] = set()
        for j, nbytes in enumerate(counted(collective, sizes, bench.size)):
            done = i * len(sizes) + j
            report(done, total, f"{collective} of {sizes[j]:,} bytes")
            limit_s = (pace.total_s - bench.slowest(perf_counter() - start)) / (total - done)
            if points:
                if _spent_s(points[-1], nbytes) * min(points[-1].times_us.values()) > limit_s:
                    break  # on a slow link nothing can be measured in time, nor at the sizes that follow
                skip |= {*unaffordable(points[-1], nbytes, limit_s)}
            point = measure_point(bench, collective, nbytes, replace(pace, total_s=limit_s), skip)
            # At the next size alone, if there is time: what is slow here may win further on.
            skip = {*hopeless(point)} | (skip if pace.total_s < math.inf else set())
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
