"""What a job found out about its calls, written back to the table that it began with.

Trials in a job run beside its other work, so their times are not the tuner's. Only how the candidates compare
is kept: the ratio of a trial's time to the table's, over the mean of these ratios for the candidates of the
call. A job moves a time by a factor of ``MOST`` at most, and only at the size nearest to the call's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flagcx.algorithms.candidate import Candidate
from flagcx.errors import ArgumentError
from flagcx.selection.table import Point, Table, read_table, save_table

logger = logging.getLogger("flagcx")

MOST = 2.0
"""The factor by which one job changes a time at most."""
NEAR = 2.0
"""A size of the table speaks for sizes within this factor."""


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


def corrected(table: Table, findings: Iterable[Finding]) -> Table:
    """The table with what was found; itself where nothing new is in it.

    Args:
        table: Measured times.
        findings: What trials found. Those about sizes far from all of the table's are left out.
    """
    measured = dict(table.measured)
    for finding in findings:
        points = measured.get(finding.collective, ())
        nearest = min(points, key=lambda point: _distance(point.nbytes, finding.nbytes), default=None)
        if nearest is None or _distance(nearest.nbytes, finding.nbytes) > math.log(NEAR):
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
    most = math.log(MOST)
    changed = {
        candidate: point.times_us[candidate] * math.exp(max(-most, min(most, ratio - mean)))
        for candidate, ratio in found.items()
    }
    return replace(point, times_us={**point.times_us, **changed})


def write_back(path: Path, table: Table, findings: Iterable[Finding]) -> bool:
    """Corrects the file of a table. What another job has put there meanwhile is kept and corrected too.

    Args:
        path: The file.
        table: The table as it was read, which says what the file must fit.
        findings: What trials found.

    Returns:
        Whether anything was written. A file that is gone or no longer fits is left alone.
    """
    findings = list(findings)
    if not findings:
        return False
    try:
        now = read_table(path)
        if now.fit.difference(table.fit):
            return False
        better = corrected(now, findings)
        if better is now:
            return False
        save_table(better, path)
    except (FileNotFoundError, ArgumentError) as error:
        logger.debug("what this job learned is not kept: %s", error)
        return False
    return True
