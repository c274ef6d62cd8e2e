"""Lowering keeps the effect: every lowered schedule is verified and executed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flagcx.algorithms import build
from flagcx.errors import ScheduleError
from flagcx.schedule.compose import relabel, then
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Copy, Program, Recv, RecvReduce, Reduce, Schedule, Send, Step
from flagcx.schedule.traffic import rounds_of
from flagcx.schedule.verify import verify
from tests.oracle import outcome
from tests.schedule.samples import (
    IN,
    OUT,
    TMP,
    all_samples,
    binomial_broadcast,
    binomial_reduce,
    ring_allreduce,
)


def right(schedule: Schedule) -> Schedule:
    verify(schedule)
    assert outcome(schedule, trials=3) is None, schedule
    return schedule


def sent(schedule: Schedule) -> list[int]:
    """Chunks that each rank sends."""
    return [
        sum(len(t.src) for step in program.steps for t in step.transfers if isinstance(t, Send))
        for program in schedule.programs()
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_effect_is_kept(n):
    for schedule in all_samples(n):
        for form in (schedule, replace(schedule, aligned=False), relabel(schedule, range(n)[::-1])):
            lowered = right(levels(form))
            assert sent(lowered) == sent(form)


def test_levels_of_what_is_aligned_is_itself():
    schedule = ring_allreduce(4)
    assert levels(schedule) is schedule


@pytest.mark.parametrize("n", [2, 3, 6, 8, 13])
def test_levels_of_a_tree_are_as_many_as_it_is_deep(n):
    tree = then(binomial_reduce(n), binomial_broadcast(n))
    lowered = levels(tree)
    assert not tree.aligned
    assert lowered.aligned
    assert rounds_of(lowered).steps == rounds_of(tree).steps == 2 * (n - 1).bit_length()


def made(*programs: list[Step]) -> Schedule:
    listed = tuple(Program(r, tuple(program)) for r, program in enumerate(programs))
    return Schedule("allreduce", "made", len(listed), 1, listed.__getitem__)


def test_levels_split_a_step_that_meets_different_steps_elsewhere():
    """Rank 0 hears in one step of rank 2, early, and of rank 1, which waits for rank 2 before."""
    reduce = made(
        [Step(local=(Copy(IN(0), OUT(0)),)), Step((RecvReduce(OUT(0), 2), RecvReduce(OUT(0), 1)))],
        [Step((Recv(TMP(0), 2),)), Step((Send(IN(0), 0),))],
        [Step((Send(IN(0), 0),)), Step((Send(IN(0), 1),))],
    )
    schedule = right(replace(reduce, collective="reduce", root=0))
    lowered = right(levels(schedule))
    assert [[t.peer for t in step.transfers] for step in lowered.program(0).steps] == [[], [2], [], [1]]


def knotted() -> Schedule:
    """Rank 0 sends and reduces a span in one step; what it reduces comes before the send can go."""
    both = (Copy(IN(0), OUT(0)), Copy(IN(0), TMP(0)))
    return made(
        [Step(local=both), Step((Send(OUT(0), 2), RecvReduce(OUT(0), 1))), Step((RecvReduce(OUT(0), 2),))],
        [Step((Send(IN(0), 0),)), Step((Send(IN(0), 2),)), Step((Recv(OUT(0), 2),))],
        [
            Step(local=both),
            Step((RecvReduce(OUT(0), 1),)),
            Step((RecvReduce(OUT(0), 0),)),
            Step((Send(TMP(0), 0),)),
            Step((Send(OUT(0), 1),)),
        ],
    )


def test_levels_put_aside_what_comes_too_early():
    schedule = right(knotted())
    lowered = right(levels(schedule))
    work = [w for step in lowered.program(0).steps for w in step.local if isinstance(w, Reduce)]
    assert len(work) == 1, "what rank 1 sent waits in SCRATCH until rank 0 has sent"
    assert lowered.program(0).scratch_chunks == 2


def test_levels_heed_the_order_of_reductions():
    """The first of the two in the list comes last: the other waits in SCRATCH rather than overtake."""
    copy = Step(local=(Copy(IN(0), OUT(0)),))
    reduce = made(
        [copy, Step((RecvReduce(OUT(0), 1), RecvReduce(OUT(0), 2)))],
        [Step(local=(Copy(IN(0), TMP(0)),)), Step((RecvReduce(TMP(0), 3),)), Step((Send(TMP(0), 0),))],
        [Step((Send(IN(0), 0),))],
        [Step(), Step((Send(IN(0), 1),))],
    )
    schedule = right(replace(reduce, collective="reduce", root=0))
    lowered = right(levels(schedule))
    received = {t.dst: t.peer for step in lowered.program(0).steps for t in step.transfers}
    assert list(received.values()) == [2, 1]
    work = [w for step in lowered.program(0).steps for w in step.local if isinstance(w, Reduce)]
    assert [received[w.src] for w in work] == [1, 2]


def test_levels_refuse_a_deadlock():
    first = [Step((Send(IN(0), 1),)), Step((Recv(OUT(0), 1),))]
    second = [Step((Send(IN(0), 0),)), Step((Recv(OUT(0), 0),))]
    with pytest.raises(ScheduleError, match="deadlock"):
        levels(made(first, second))


def unaligned(schedule: Schedule, rng: random.Random) -> Schedule:
    """The schedule with some steps of each rank split, or made one with the next."""
    programs = []
    for program in schedule.programs():
        steps = list(program.steps)
        for _ in range(rng.randrange(4) if len(steps) > 1 else 0):
            at = rng.randrange(len(steps) - 1)
            a, b = steps[at : at + 2]
            if rng.random() < 0.5:
                steps[at : at + 1] = [Step(a.transfers[:1]), Step(a.transfers[1:], a.local)]
            elif len(steps) > 2:
                steps[at : at + 2] = [Step(a.transfers + b.transfers, a.local + b.local)]
        programs.append(Program(program.rank, tuple(steps)))
    return replace(schedule, make=programs.__getitem__, aligned=False)


def test_levels_of_steps_split_and_merged_at_random():
    rng, leveled, aside = random.Random(4), 0, 0
    names = ("double_binary_tree", "tree", "recursive_doubling", "hierarchical", "binomial")
    for n in (3, 4, 5, 6):
        for schedule in [build("allreduce", name, n) for name in names] * 15:
            changed = unaligned(schedule, rng)
            try:
                verify(changed)
            except ScheduleError:
                continue
            lowered = levels(changed)
            verify(lowered)
            leveled += 1
            aside += any(a.scratch_chunks > b.scratch_chunks
                         for a, b in zip(lowered.programs(), changed.programs(), strict=True))  # fmt: skip
    assert leveled > 40
    assert aside > 0, "in none of them was anything put aside"
