"""Measures the candidates on the machine at hand.

Candidates take turns, round by round, so that a machine that speeds up or slows down does so for all of
them. A round is a batch of calls after a barrier and counts with its slowest rank. After the first round
only those go on that are near the fastest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from flagcx.algorithms import build, entries
from flagcx.collectives import COLLECTIVES
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.selection.selector import Choice
from flagcx.selection.table import Candidate, Fit, Point, Table
from flagcx.transport.base import Call, Plan, Transport

TUNED = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "reduce", "gather", "scatter")
"""The collectives that are measured."""
PIECE_NBYTES = (64 << 10, 256 << 10, 1 << 20)
"""The lengths of piece that pipelined algorithms are measured with, besides none at all."""
_HOPELESS = 4.0
"""A candidate so many times slower than the fastest is not measured at the next, larger size."""
_HOPELESS_FROM_NBYTES = 1 << 20
_LARGE_NBYTES = 8 << 20
_DTYPE = np.dtype(np.float32)


class HostTransport(Transport, Protocol):
    """A transport with protocols to choose from."""

    rank: int
    size: int

    def protocols(self, collective: str, algorithm: str, nbytes: int) -> Sequence[str]:
        """The ways in which a call's data may move."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is measured.

    Attributes:
        batch_s: How long a batch should take, in seconds.
        rounds: Rounds for each size; half as many for large messages.
        near: Candidates slower than the fastest by this factor leave after the first round.
    """

    batch_s: float = 0.015
    rounds: int = 11
    near: float = 1.6


QUICK = Pace(batch_s=0.003, rounds=4, near=1.4)


def candidates(transport: HostTransport, collective: str, nbytes: int) -> list[Candidate]:
    """Every way to carry out a collective that differs from the others at this size.

    Algorithms that need groups of ranks (hosts) and those that the user registered are left out.

    Args:
        transport: What carries the data.
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
    """
    found = []
    for known in entries(collective):
        if known.grouped or not known.trusted or not known.allows(transport.size):
            continue
        name = str(known.algorithm)
        cuts = {Candidate(name, cut).pieces(nbytes): cut for cut in PIECE_NBYTES} if known.pipelined else {}
        lengths = sorted({1: 0} | {pieces: cut for pieces, cut in cuts.items() if pieces > 1})
        for pieces in lengths:
            length = 0 if pieces == 1 else cuts[pieces]
            found += [
                Candidate(name, length, protocol)
                for protocol in transport.protocols(collective, name, nbytes)
            ]
    return found


class Measurement:
    """Arrays and plans for one collective at one size. All ranks make the same calls.

    Args:
        transport: What carries the data.
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
    """

    def __init__(self, transport: HostTransport, collective: str, nbytes: int) -> None:
        self._transport, self._collective, self.nbytes = transport, collective, nbytes
        self._count = max(nbytes // _DTYPE.itemsize, 1)
        self._dtype = dtype_of(_DTYPE)
        self._kind = kind = COLLECTIVES[collective]
        self._root = 0 if kind.rooted else None
        self._in_place = collective in ("allreduce", "reduce")
        rank, size = transport.rank, transport.size
        inputs = kind.input_blocks(size) if kind.has_input(rank, self._root) else 0
        outputs = kind.output_blocks(size) if kind.has_output(rank, self._root) else 0
        # Zeros that are written, so that every page is there; no sum of them overflows.
        self._given = np.full(inputs * self._count, 0, _DTYPE) if inputs else None
        self._result = np.full(outputs * self._count, 0, _DTYPE) if outputs else None
        if self._in_place and self._result is not None:
            self._result = self._given
        if collective == "broadcast" and self._given is not None:
            self._result = self._given
        self._barrier = self._compile_small("barrier", 0, np.uint8)
        self._largest = self._compile_small("allreduce", 1, np.float64)

    def _compile_small(self, collective: str, count: int, dtype: Any) -> Plan:
        algorithm = "dissemination" if collective == "barrier" else "one_shot"
        kind = dtype_of(np.dtype(dtype))
        schedule = build(collective, algorithm, self._transport.size)
        op = resolve_op("max", kind)
        return self._transport.compile(Call(schedule, self._transport.rank, count, kind, op, True))

    def plan(self, choice: Choice) -> Plan:
        """Compiles a choice for this size."""
        size, rank = self._transport.size, self._transport.rank
        schedule = build(self._collective, choice.algorithm, size, self._root, choice.pieces)
        op = resolve_op("sum", self._dtype) if self._kind.reduces else None
        in_place = self._given is not None and self._given is self._result
        call = Call(schedule, rank, self._count, self._dtype, op, in_place, choice.protocol)
        return self._transport.compile(call)

    def seconds(self, plan: Plan, calls: int, warm_up: int) -> float:
        """The time of a call in seconds, over a batch, of the slowest rank; the same on every rank."""
        run, given, result = plan.run, self._given, self._result
        for _ in range(warm_up):
            run(given, result)
        self._barrier.run(None, None)
        start = perf_counter()
        for _ in range(calls):
            run(given, result)
        slowest = np.array([(perf_counter() - start) / calls])
        self._largest.run(slowest, slowest)
        return float(slowest[0])

    def time_all(
        self, choices: Sequence[Choice], pace: Pace, seed: int = 0, always: Collection[int] = ()
    ) -> list[list[float]]:
        """Times of a call in seconds, one a round, for each choice; fewer for those far behind.

        Args:
            choices: What is measured.
            pace: How much.
            seed: Of the order in which they take turns; the same on all ranks.
            always: Positions of choices that are measured in every round, however slow.
        """
        plans: dict[int, Plan] = {}
        times: list[list[float]] = []
        for i, choice in enumerate(choices):
            plans[i] = self.plan(choice)
            seconds = self.seconds(plans[i], 1, 1)
            # One call says little where calls are short: these are timed in a batch before any is dropped.
            calls = _calls(pace, seconds)
            times.append([self.seconds(plans[i], calls, min(calls // 4, 20)) if calls > 1 else seconds])
            fastest = min(t[0] for t in times)
            plans = {
                j: plan for j, plan in plans.items() if j in always or times[j][0] <= pace.near * fastest
            }
        order = random.Random(seed)
        for _ in range(pace.rounds - 1):
            for i in order.sample(sorted(plans), len(plans)):
                calls = _calls(pace, min(times[i]))
                times[i].append(self.seconds(plans[i], calls, min(calls // 8, 8)))
        return times


def _calls(pace: Pace, seconds: float) -> int:
    """How many calls a batch has."""
    return min(max(math.ceil(pace.batch_s / seconds), 1), 1000)


def as_choice(candidate: Candidate, nbytes: int) -> Choice:
    """The choice that a candidate is at a size."""
    return Choice(candidate.algorithm, candidate.pieces(nbytes), "measured", candidate.protocol)


def measure_point(
    transport: HostTransport,
    collective: str,
    nbytes: int,
    pace: Pace,
    skip: Sequence[Candidate] = (),
) -> Point:
    """Measures all candidates at one size. All ranks must call it.

    Args:
        transport: What carries the data.
        collective: Name of the collective.
        nbytes: Bytes of the message or block.
        pace: How much is measured.
        skip: Candidates that are not worth it.
    """
    tried = [c for c in candidates(transport, collective, nbytes) if c not in skip]
    measurement = Measurement(transport, collective, nbytes)
    if nbytes >= _LARGE_NBYTES:
        pace = replace(pace, rounds=(pace.rounds + 1) // 2)
    times = measurement.time_all([as_choice(c, nbytes) for c in tried], pace)
    return Point(nbytes, {c: median(t) * 1e6 for c, t in zip(tried, times, strict=True)})


def hopeless(point: Point) -> list[Candidate]:
    """The candidates too far behind at a size to be worth measuring at the next."""
    if point.nbytes < _HOPELESS_FROM_NBYTES:
        return []
    fastest = min(point.times_us.values())
    return [c for c, time_us in point.times_us.items() if time_us > _HOPELESS * fastest]


def tune(
    transport: HostTransport,
    fit: Fit,
    collectives: Sequence[str],
    sizes: Sequence[int],
    pace: Pace,
    report: Callable[[int, int, str], object] = lambda done, total, what: None,
) -> Table:
    """Measures the candidates of collectives over sizes. All ranks must call it.

    Args:
        transport: What carries the data.
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
        for j, nbytes in enumerate(counted(collective, sizes, transport.size)):
            report(i * len(sizes) + j, total, f"{collective} of {sizes[j]:,} bytes")
            point = measure_point(transport, collective, nbytes, pace, tuple(skip))
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
        yield max(per_rank // _DTYPE.itemsize, 1) * _DTYPE.itemsize
