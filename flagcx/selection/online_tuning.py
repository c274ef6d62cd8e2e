"""Corrects choices while a job runs: now and then another candidate is tried, and the fastest stays.

All ranks try the same candidate in the same call, since they count the same calls; and they decide on the
same figures, since those are combined over all ranks first. A trial takes from when the last rank began to
when the last one ended, so that ranks that come late do not count. Trials are rare (one call in 32), few (20
at most, then rarer each time), and only of candidates that were measured to be nearly as fast.

At the end what a job found is written back to the table that it began with. Trials run beside the job's other
work, so their times are not the tuner's: only how the candidates compare is kept, the ratio of a trial's time
to the table's over the mean of these ratios. A job moves a time by a factor of ``MOST_CHANGE`` at most, and
only at the size nearest to the call's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns as now
from typing import Any

import numpy as np

from flagcx.algorithms.candidate import Candidate
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import ArgumentError
from flagcx.profiler.records import OperationInfo, Progress, RecordBuffer, RecordedPlan
from flagcx.selection.table import Point, Table, read_table, save_table
from flagcx.transport.base import Plan

INTERVAL = 32
"""One call in so many is a trial."""
TRIALS = 5
"""Trials of each candidate; the first of them warms up and does not count."""
PAUSE = 1 << 14
"""Calls until all is tried again; after that twice as many, and so on."""
GAIN = 0.9
"""Another candidate is taken if it needs at most this share of the time."""
MOST_CHANGE = 2.0
"""The factor by which one job changes a time at most."""
SAME_SIZE = 2.0
"""A size of the table speaks for sizes within this factor."""

logger = logging.getLogger("flagcx")

Agree = Callable[[Sequence[int]], list[int]]
"""Takes one list of numbers a rank, and returns the largest of each place."""


@dataclass(slots=True)
class Exploration:
    """The choice for one kind of call, and the trials of its alternatives. The same on all ranks.

    Attributes:
        choices: The candidates.
        agree: See ``Agree``.
        current: The one in use.
        calls: Calls so far.
        due: The call that is the next trial.
        times: For each trial since the last decision: which candidate, begin and end, in ns.
        rounds: Decisions so far.
        typical_us: What each candidate took when all decided last.
    """

    choices: Sequence[Candidate]
    agree: Agree
    current: Candidate = field(init=False)
    calls: int = 0
    due: int = INTERVAL
    times: list[tuple[int, int, int]] = field(default_factory=list)
    rounds: int = 0
    typical_us: dict[Candidate, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.current = self.choices[0]

    def candidate(self) -> Candidate:
        """The one to try in this call: all in turn."""
        return self.choices[len(self.times) % len(self.choices)]

    def note(self, start_ns: int, end_ns: int) -> None:
        """Takes down a trial; with the last one, all ranks decide."""
        self.times.append((len(self.times) % len(self.choices), start_ns, end_ns))
        self.due = self.calls + INTERVAL
        if len(self.times) == TRIALS * len(self.choices):
            self._decide()

    def _decide(self) -> None:
        latest = self.agree([value for _, start, end in self.times for value in (start, end)])
        elapsed: dict[int, list[int]] = {i: [] for i in range(len(self.choices))}
        for (i, _, _), start, end in zip(self.times, latest[::2], latest[1::2], strict=True):
            elapsed[i].append(end - start)
        from statistics import median  # late: a rank that starts has no use for it

        typical = {i: median(times[1:]) for i, times in elapsed.items()}
        self.typical_us = {self.choices[i]: time_ns / 1e3 for i, time_ns in typical.items()}
        best = min(typical, key=lambda i: (typical[i], i))
        if typical[best] < GAIN * typical[self.choices.index(self.current)]:
            self.current = self.choices[best]
        self.times = []
        self.due = self.calls + (PAUSE << min(self.rounds, 20))
        self.rounds += 1


class Explored(RecordedPlan):
    """A recorded plan that tries alternatives.

    Args:
        exploration: The trials; shared by the plans in place and not.
        compile: Makes the plan of a choice.
        describe: Says what such a plan does, for its records.
        ring: Where the records go.
        progress: What the transport counts.
    """

    __slots__ = ("_at", "_compile", "_describe", "_exploration", "_plans", "_progress", "_ring", "_run")

    def __init__(
        self,
        exploration: Exploration,
        compile: Callable[[Candidate], Plan],
        describe: Callable[[Candidate], OperationInfo],
        ring: RecordBuffer,
        progress: Progress,
    ) -> None:
        self._exploration, self._compile, self._describe = exploration, compile, describe
        self._plans: dict[Candidate, RecordedPlan] = {}
        self._ring, self._progress = ring, progress
        # What is in use may change until this plan runs, and all ranks settle that when it does.
        self._use(exploration.choices[0])

    def _use(self, choice: Candidate) -> None:
        plan = self._plan(choice)
        self._at, self.plan, self.operation, self._run = choice, plan.plan, plan.operation, plan.run

    def _plan(self, choice: Candidate) -> RecordedPlan:
        plan = self._plans.get(choice)
        if plan is None:
            made = RecordedPlan(self._compile(choice), self._describe(choice), self._ring, self._progress)
            plan = self._plans[choice] = made
        return plan

    def run(self, sendbuf: Any, recvbuf: Any, queued_ns: int = 0) -> None:  # type: ignore[override]
        """Runs the call once, with the candidate in use or on trial."""
        exploration = self._exploration
        exploration.calls += 1
        if exploration.calls >= exploration.due:
            self._try(sendbuf, recvbuf, queued_ns)
            return
        if exploration.current is not self._at:
            self._use(exploration.current)
        self._run(sendbuf, recvbuf, queued_ns)

    def _try(self, sendbuf: Any, recvbuf: Any, queued_ns: int) -> None:
        exploration = self._exploration
        plan = self._plan(exploration.candidate())
        start = now()
        plan.run(sendbuf, recvbuf, queued_ns)
        exploration.note(start, now())


# -- what a job found, written back ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """What the trials of one kind of call found.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
        typical_us: The time of each choice that was tried.
    """

    collective: str
    nbytes: int
    typical_us: Mapping[Candidate, float]


def findings_of(explorations: Mapping[tuple, Exploration]) -> list[Finding]:
    """What trials found about calls like those that ``flagcx tune`` measures: float32, and sums of it.

    Args:
        explorations: The trials, by collective, elements, code of the dtype, operation and root.
    """
    found, float32 = [], dtype_of(np.float32)
    for (collective, counts, code, op, _), exploration in explorations.items():
        if code == float32.code and (op is None or op == OPS["sum"]) and exploration.typical_us:
            found.append(Finding(collective, counts * float32.numpy.itemsize, exploration.typical_us))
    return found


def corrected(table: Table, findings: Iterable[Finding]) -> Table:
    """The table with what trials found at sizes near its own; itself where nothing new is in it."""
    measured = dict(table.measured)
    for finding in findings:
        points = measured.get(finding.collective, ())
        nearest = min(points, key=lambda point: _distance(point.nbytes, finding.nbytes), default=None)
        if nearest is None or _distance(nearest.nbytes, finding.nbytes) > math.log(SAME_SIZE):
            continue
        better = _corrected_point(nearest, finding)
        measured[finding.collective] = tuple(better if point is nearest else point for point in points)
    return table if measured == dict(table.measured) else replace(table, measured=measured)


def _distance(nbytes: int, other: int) -> float:
    return abs(math.log(max(nbytes, 1) / max(other, 1)))


def _corrected_point(point: Point, finding: Finding) -> Point:
    found: dict[Candidate, float] = {}
    for candidate, time_us in point.times_us.items():
        for choice, typical_us in finding.typical_us.items():
            if candidate.at(finding.nbytes) == choice and typical_us > 0:
                found[candidate] = math.log(typical_us / time_us)
    if len(found) < 2:
        return point
    mean = sum(found.values()) / len(found)
    most = math.log(MOST_CHANGE)
    changed = {
        candidate: point.times_us[candidate] * math.exp(max(-most, min(most, ratio - mean)))
        for candidate, ratio in found.items()
    }
    return replace(point, times_us={**point.times_us, **changed})


def write_back(path: Path, table: Table, findings: Iterable[Finding]) -> bool:
    """Corrects the file of a table, with what another job has put there meanwhile.

    Returns:
        Whether anything was written. A file that is gone, or no longer fits as ``table`` does, is left alone.
    """
    findings = list(findings)
    if not findings:
        return False
    try:
        now = read_table(path)
        if now.fit.difference(table.fit):
            return False
        better = corrected(now, findings)
        if better is not now:
            save_table(better, path)
        return better is not now
    except (FileNotFoundError, ArgumentError) as error:
        logger.debug("what this job learned is not kept: %s", error)
        return False
