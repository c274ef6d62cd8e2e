"""Broken schedules made of right ones, to see that ``verify`` rejects each of them.

    mutations(schedule, seed, limit)   small changes at random places: (description, schedule)
    mutants(schedule, seed, limit)     those that do break the schedule, by the oracle of tests/execute.py
    survey(schedule, seed, limit)      verify's word and the oracle's on each, counted

In an algorithm's test::

    found = survey(ring.allreduce(5), seed=1, limit=60)
    assert not found.survivors, found.survivors
    assert found.broken >= 30

A change may well be harmless: two reductions of a sum in another order, a message nobody needs. The oracle
runs a changed schedule on integers in several random orders, in place and not, and tells.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Program, Schedule, Step
from flagcx.schedule.verify import verify
from tests.execute import outcome
from tests.mutation_operators import OPERATORS


@dataclass
class Survey:
    """What became of the mutations of one schedule.

    Attributes:
        survivors: Descriptions of broken schedules that ``verify`` took for right. Must stay empty.
        broken: How many mutations break the schedule; all but the survivors were rejected.
        harmless: How many change nothing that can be observed, and pass.
        forbidden: How many break a rule, but no result in the runs tried (a race that did not show).
        messages: What ``verify`` said to each that it rejected, by description.
    """

    survivors: list[str] = field(default_factory=list)
    broken: int = 0
    harmless: int = 0
    forbidden: int = 0
    messages: dict[str, str] = field(default_factory=dict)


def survey(
    schedule: Schedule, seed: int = 0, limit: int = 60, trials: int = 6, uneven: bool = False
) -> Survey:
    """Asks ``verify`` and the oracle about ``limit`` mutations of ``schedule``."""
    found = Survey()
    for description, mutant in mutations(schedule, seed, limit):
        try:
            verify(mutant, uneven=uneven)
            rejected = False
        except ScheduleError as error:
            rejected = True
            found.messages[description] = str(error)
        breaks = outcome(mutant, seed, trials, uneven) is not None
        found.broken += breaks
        found.harmless += not breaks and not rejected
        found.forbidden += not breaks and rejected
        if breaks and not rejected:
            found.survivors.append(description)
    return found


def mutants(
    schedule: Schedule, seed: int = 0, limit: int = 60, trials: int = 6
) -> Iterator[tuple[str, Schedule]]:
    """Those of ``limit`` mutations of ``schedule`` that break it.

    Yields:
        What was changed, and the broken schedule.
    """
    for description, mutant in mutations(schedule, seed, limit):
        if outcome(mutant, seed, trials) is not None:
            yield description, mutant


def mutations(schedule: Schedule, seed: int = 0, limit: int = 60) -> Iterator[tuple[str, Schedule]]:
    """Up to ``limit`` different small changes to ``schedule``, harmless ones among them.

    The changed schedules do not claim to be aligned, so that it is not that claim alone that fails.

    Args:
        schedule: A right schedule.
        seed: Where the changes are made follows from it.
        limit: How many to make at most; fewer if the schedule has not enough places.

    Yields:
        What was changed, and the changed schedule.
    """
    rng = random.Random(f"{seed} {schedule.collective} {schedule.algorithm} {schedule.size}")
    original = [list(p.steps) for p in schedule.programs()]
    seen = {_frozen(original)}
    plain = replace(schedule, aligned=False)
    roots = range(schedule.size) if COLLECTIVES[schedule.collective].rooted else ()
    made = 0
    for root in [r for r in roots if r != schedule.root][:2]:
        made += 1
        yield f"root {root} instead of {schedule.root}", replace(plain, root=root)
    operators = list(OPERATORS)
    for attempt in range(limit * 6):
        if made >= limit:
            return
        if attempt % len(operators) == 0:
            rng.shuffle(operators)
        steps = [list(s) for s in original]
        description = operators[attempt % len(operators)](schedule, steps, rng)
        key = _frozen(steps)
        if description is None or key in seen:
            continue
        seen.add(key)
        made += 1
        programs = tuple(Program(r, tuple(s)) for r, s in enumerate(steps))
        yield description, replace(plain, make=programs.__getitem__)


def _frozen(steps: list[list[Step]]) -> tuple:
    return tuple(tuple(s) for s in steps)
