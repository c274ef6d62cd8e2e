"""Broken schedules made of right ones, to see that ``verify`` rejects each of them.

    mutations(schedule, seed, limit)   small changes at random places: (description, schedule)
    survey(schedule, seed, limit)      what verify and the oracle say of each, counted

In an algorithm's test::

    found = survey(ring.allreduce(5), seed=1, limit=60)
    assert not found.survivors, found.survivors
    assert found.broken >= 30

A change may well be harmless: two reductions of a sum in another order, a message that no rank needs. The
oracle of ``tests/oracle.py`` runs a changed schedule on integers in several random orders, in place and not,
and tells.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.messages import match_messages
from flagcx.schedule.model import Buffer, Copy, Program, Recv, RecvReduce, Reduce, Schedule, Send, Span, Step
from flagcx.schedule.verify import verify
from tests.oracle import outcome

Steps = list[list[Step]]
"""``steps[rank][step]``, to change."""


@dataclass
class Survey:
    """What became of the mutations of one schedule.

    Attributes:
        survivors: Descriptions of broken schedules that ``verify`` took for right. Must stay empty.
        broken: The mutations that break the schedule; all but the survivors were rejected.
        messages: What ``verify`` said to each that it rejected, by description.
        outcomes: What the oracle said to each that is broken.
    """

    survivors: list[str] = field(default_factory=list)
    broken: list[Schedule] = field(default_factory=list)
    messages: dict[str, str] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)


def survey(
    schedule: Schedule, seed: int = 0, limit: int = 60, trials: int = 6, uneven: bool = False
) -> Survey:
    """Asks ``verify`` and the oracle about ``limit`` mutations of ``schedule``."""
    found = Survey()
    for description, mutant in mutations(schedule, seed, limit):
        try:
            verify(mutant, uneven=uneven)
        except ScheduleError as error:
            found.messages[description] = str(error)
        wrong = outcome(mutant, seed, trials, uneven)
        if wrong is not None:
            found.broken.append(mutant)
            found.outcomes.append(wrong)
            if description not in found.messages:
                found.survivors.append(description)
    return found


def mutations(schedule: Schedule, seed: int = 0, limit: int = 60) -> Iterator[tuple[str, Schedule]]:
    """Up to ``limit`` different small changes to ``schedule``, harmless ones among them.

    The changed schedules do not claim to be aligned, so that it is not that claim alone that fails.
    """
    rng = random.Random(f"{seed} {schedule.collective} {schedule.algorithm} {schedule.size}")
    original = [list(p.steps) for p in schedule.programs()]
    seen = [original]
    plain = replace(schedule, aligned=False)
    if COLLECTIVES[schedule.collective].rooted and schedule.size > 1:
        yield "another root", replace(plain, root=(schedule.root + 1) % schedule.size)
    for attempt in range(limit * 6):
        if len(seen) > limit:
            return
        steps = [list(program) for program in original]
        change = CHANGES[attempt % len(CHANGES)]
        what = change(schedule, steps, rng)
        if what is None or steps in seen:
            continue
        seen.append(steps)
        programs = [Program(rank, tuple(program)) for rank, program in enumerate(steps)]
        yield f"{len(seen)}: {change.__name__} {what}", replace(plain, make=programs.__getitem__)


def _edit(
    steps: Steps, rng: random.Random, change: Callable[[list, int], None], least: int = 1
) -> str | None:
    """Changes the transfers, or the local work, of a step that has at least ``least`` of them."""
    places = [
        (r, s, part)
        for r, program in enumerate(steps)
        for s, step in enumerate(program)
        for part in ("transfers", "local")
        if len(getattr(step, part)) >= least
    ]
    if not places:
        return None
    r, s, part = rng.choice(places)
    items = list(getattr(steps[r][s], part))
    at = rng.randrange(len(items))
    what = f"rank {r} step {s}: {items[at]}"
    change(items, at)
    steps[r][s] = replace(steps[r][s], **{part: tuple(items)})
    return what


def drop(schedule, steps, rng):
    return _edit(steps, rng, lambda items, at: items.pop(at))


def double(schedule, steps, rng):
    return _edit(steps, rng, lambda items, at: items.insert(rng.randrange(len(items) + 1), items[at]))


def swap(schedule, steps, rng):
    def change(items, at):
        items[at], items[at - 1] = items[at - 1], items[at]

    return _edit(steps, rng, change, least=2)


def alter(schedule, steps, rng):
    """Another peer, another span, or a reduction where there was none."""

    def change(items, at):
        item = items[at]
        kind = {Recv: RecvReduce, RecvReduce: Recv, Copy: Reduce, Reduce: Copy, Send: Send}[type(item)]
        names = [name for name in ("src", "dst", "peer") if hasattr(item, name)]
        name = rng.choice([*names, "kind"])
        if name == "kind":
            items[at] = kind(*(getattr(item, name) for name in names))
        elif name == "peer":
            items[at] = replace(item, peer=rng.randrange(-1, schedule.size + 1))
        else:
            items[at] = replace(item, **{name: _other_span(getattr(item, name), rng)})

    return _edit(steps, rng, change)


def _other_span(span: Span, rng: random.Random) -> Span:
    by = rng.choice((-1, 1))
    buffers = [buffer for buffer in Buffer if buffer != span.buffer]
    return rng.choice(
        (
            Span(span.buffer, span.start + by, span.stop + by),
            Span(span.buffer, span.start, span.stop + by),
            Span(span.buffer, span.start + by, span.stop),
            Span(rng.choice(buffers), span.start, span.stop),
        )
    )


def _programs(steps: Steps, rng: random.Random, least: int) -> list[list[Step]]:
    """The program of one rank, or those of all, that have at least ``least`` steps."""
    long = [program for program in steps if len(program) >= least]
    return long if not long or (len(long) == len(steps) and rng.random() < 0.5) else [rng.choice(long)]


def _of(steps: Steps, programs: list[list[Step]]) -> str:
    return f"every rank of {len(programs)}" if len(programs) > 1 else f"rank {steps.index(programs[0])}"


def reorder(schedule, steps, rng):
    """Two steps exchanged, or the first one put last."""
    programs = _programs(steps, rng, least=2)
    if not programs:
        return None
    what = _of(steps, programs)
    i, j = sorted(rng.sample(range(min(map(len, programs))), 2))
    for program in programs:
        if rng.random() < 0.8 or len(programs) > 1:
            program[i], program[j] = program[j], program[i]
        else:
            program.append(program.pop(0))
    return f"{what}: {i}, {j}"


def merge(schedule, steps, rng):
    """One step made of two that follow each other."""
    programs = _programs(steps, rng, least=2)
    if not programs:
        return None
    what = _of(steps, programs)
    at = rng.randrange(min(map(len, programs)) - 1)
    for program in programs:
        a, b = program[at : at + 2]
        program[at : at + 2] = [Step(a.transfers + b.transfers, a.local + b.local)]
    return f"{what}: {at}"


def split(schedule, steps, rng):
    """Sends before receives: a ring in which no rank takes what it is sent."""
    programs = _programs(steps, rng, least=1)
    if not programs:
        return None
    what = _of(steps, programs)
    at = rng.randrange(min(map(len, programs)))
    for program in programs:
        sends = tuple(t for t in program[at].transfers if isinstance(t, Send))
        others = tuple(t for t in program[at].transfers if not isinstance(t, Send))
        program[at : at + 1] = [Step(sends), Step(others, program[at].local)]
    return f"{what}: {at}"


def message(schedule, steps, rng):
    """Both sides of one message dropped, doubled, or moved to other chunks."""
    messages = match_messages(schedule).messages
    if not messages:
        return None
    m = rng.choice(messages)
    how = rng.choice(("drop", "double", "move", "move one"))
    for r, s, i in ((m.source, m.send_step, m.send_index), (m.target, m.recv_step, m.recv_index)):
        transfers = list(steps[r][s].transfers)
        t = transfers[i]
        if how == "drop":
            del transfers[i]
        elif how == "double":
            transfers.insert(i, t)
        elif how == "move" or r == m.source:
            name = "src" if isinstance(t, Send) else "dst"
            span = getattr(t, name)
            start = (span.start + 1) % max(schedule.chunks - len(span) + 1, 1)
            transfers[i] = replace(t, **{name: Span(span.buffer, start, start + len(span))})
        steps[r][s] = Step(tuple(transfers), steps[r][s].local)
    return f"{how} {m.src} of rank {m.source} step {m.send_step} to rank {m.target}"


def scratch(schedule, steps, rng):
    """All of a rank's SCRATCH one chunk on, which is right but for sizes; or all layers of it in one."""
    fold = rng.random() < 0.5

    def at(span: Span) -> Span:
        if span.buffer is not Buffer.SCRATCH:
            return span
        start = span.start % schedule.chunks if fold else span.start + 1
        return Span(span.buffer, start, start + len(span))

    def moved(item):
        return replace(
            item, **{name: at(getattr(item, name)) for name in ("src", "dst") if hasattr(item, name)}
        )

    programs = steps if fold else [rng.choice(steps)]
    for program in programs:
        program[:] = [Step(tuple(map(moved, s.transfers)), tuple(map(moved, s.local))) for s in program]
    return "folded" if fold else "shifted"


CHANGES = (drop, alter, message, double, split, alter, reorder, merge, swap, scratch, alter, message)
