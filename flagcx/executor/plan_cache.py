"""The plans that an executor keeps for calls that come again, bounded by number and by bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flagcx.schedule.collectives import Counts
from flagcx.schedule.model import Schedule
from flagcx.transport.base import Call, Plan

_MOST_PLANS = 4096
_MOST_NBYTES = 64 << 20
_PLAN_NBYTES, _TRANSFER_NBYTES, _COUNT_NBYTES = 4 << 10, 900, 48


class PlanCache:
    """The plans of one executor. When they are too many, or too large together, all of them go.

    Attributes:
        plans: The plan of each call, by all that matters of the call.
        straight: What is left to do of calls like earlier ones, by what is seen of their arrays.
        nbytes: About how many bytes the plans keep that were compiled since the last ``clear``.
    """

    def __init__(self) -> None:
        self.plans: dict[tuple, Plan] = {}
        self.straight: dict[tuple, Any] = {}
        self.nbytes = 0

    def make_room(self) -> None:
        """Makes room for another plan."""
        if len(self.plans) >= _MOST_PLANS or self.nbytes > _MOST_NBYTES:
            self.clear()

    def remember(self, key: tuple, run: Any) -> None:
        """Lets calls with this key go straight to their plan from now on."""
        if len(self.straight) >= _MOST_PLANS:
            self.straight.clear()
        self.straight[key] = run

    def clear(self) -> None:
        """Forgets all plans."""
        self.plans.clear()
        self.straight.clear()
        self.nbytes = 0


def plan_nbytes(call: Call) -> int:
    """About how many bytes the plan of a call keeps, whatever the transport; its key counts too."""
    words = _COUNT_NBYTES * _length(call.counts) + 2 * len(call.part_of)
    return _PLAN_NBYTES + words + _TRANSFER_NBYTES * _transfers(call.schedule, call.rank)


@lru_cache(maxsize=1024)
def _transfers(schedule: Schedule, rank: int) -> int:
    return sum(len(step.transfers) + len(step.local) for step in schedule.program(rank).steps)


def _length(counts: Counts) -> int:
    return 1 if isinstance(counts, int) else sum(map(_length, counts))
