"""Lowering keeps the effect: every lowered schedule is verified and executed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagcx.errors import ScheduleError
from flagcx.schedule.compose import beside, relabel, then
from flagcx.schedule.lower import drop_empty_steps, levels, merge_spans, merge_steps
from flagcx.schedule.model import Copy, Program, Recv, RecvReduce, Reduce, Schedule, Send, Step
from flagcx.schedule.statistics import messages_sent, sent_chunks, steps
from flagcx.schedule.verify import verify
from tests.execute import outcome
from tests.schedule.samples import (
    IN,
    OUT,
    TMP,
    all_samples,
    binomial_broadcast,
    binomial_reduce,
    one_shot,
    pairwise_alltoall,
    ring_allgather,
    ring_allreduce,
    two_shot,
)


def right(schedule: Schedule) -> Schedule:
    verify(schedule)
    assert outcome(schedule, trials=3) is None, schedule
    return schedule


@pytest.mark.parametrize("lower", [levels, drop_empty_steps, merge_spans, merge_steps])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_effect_is_kept(lower, n):
    for schedule in all_samples(n):
        for form in (schedule, replace(schedule, aligned=False), relabel(schedule, range(n)[::-1])):
            lowered = right(lower(form))
            assert [sent_chunks(lowered, r) for r in range(n)] == [sent_chunks(form, r) for r in range(n)]


def test_levels_of_what_is_aligned_is_itself():
    schedule = ring_allreduce(4)
    assert levels(schedule) is schedule


@pytest.mark.parametrize("n", [2, 3, 6, 8, 13])
def test_levels_of_a_tree_are_as_many_as_it_is_deep(n):
    tree = then(binomial_reduce(n), binomial_broadcast(n))
    lowered = levels(tree)
    assert not tree.aligned
    assert lowered.aligned
    assert steps(lowered) == steps(tree) == 2 * (n - 1).bit_length()


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
    """The first of the two in the list comes last: the other waits for it rather than overtake."""
    copy = Step(local=(Copy(IN(0), OUT(0)),))
    reduce = made(
        [copy, Step((RecvReduce(OUT(0), 1), RecvReduce(OUT(0), 2)))],
        [Step(local=(Copy(IN(0), TMP(0)),)), Step((RecvReduce(TMP(0), 3),)), Step((Send(TMP(0), 0),))],
        [Step((Send(IN(0), 0),))],
        [Step(), Step((Send(IN(0), 1),))],
    )
    schedule = right(replace(reduce, collective="reduce", root=0))
    lowered = right(levels(schedule))
    order = [t.peer for step in lowered.program(0).steps for t in step.transfers]
    assert order == [1, 2]


def test_levels_refuse_a_deadlock():
    first = [Step((Send(IN(0), 1),)), Step((Recv(OUT(0), 1),))]
    second = [Step((Send(IN(0), 0),)), Step((Recv(OUT(0), 0),))]
    with pytest.raises(ScheduleError, match="deadlock"):
        levels(made(first, second))


def test_empty_steps_are_dropped_everywhere_or_nowhere():
    schedule = ring_allgather(3)

    def make(r: int) -> Program:
        steps_ = schedule.make(r).steps
        return Program(r, (Step(), *steps_[:1], Step(), *steps_[1:], Step()))

    padded = replace(schedule, make=make)
    assert [p.steps for p in drop_empty_steps(padded).programs()] == [p.steps for p in schedule.programs()]
    lowered = levels(binomial_broadcast(5))
    assert [len(p.steps) for p in drop_empty_steps(lowered).programs()] == [4] * 5
    loose = drop_empty_steps(replace(lowered, aligned=False))
    assert [len(p.steps) for p in loose.programs()] == [4, 1, 2, 1, 1]


def test_spans_that_lie_side_by_side_become_one_message():
    order = [0, 2, 1, 3]
    cut = relabel(relabel(two_shot(4), order), [order.index(r) for r in range(4)])
    whole = ring_allgather(4, 3)
    lowered = right(merge_spans(relabel(beside(whole, whole), [0, 1, 2, 3])))
    assert messages_sent(beside(whole, whole), 0) == 6
    assert messages_sent(lowered, 0) == 3
    right(merge_spans(cut))


def test_reductions_are_not_merged_across_another_of_the_same_chunk():
    def transfers(r: int) -> tuple:
        if r == 0:
            return (RecvReduce(OUT(0), 1), RecvReduce(OUT(0, 2), 2), RecvReduce(OUT(1), 1))
        return (Send(IN(0), 0), Send(IN(1), 0)) if r == 1 else (Send(IN(0, 2), 0),)

    def make(r: int) -> Program:
        local = (Copy(IN(0, 2), OUT(0, 2)),) if r == 0 else ()
        return Program(r, (Step(local=local), Step(transfers(r))))

    schedule = right(Schedule("reduce", "made", 3, 2, make, 0, aligned=True))
    assert list(merge_spans(schedule).programs()) == list(schedule.programs())


def test_independent_steps_become_one():
    assert steps(pairwise_alltoall(6)) == 5
    assert steps(right(merge_steps(pairwise_alltoall(6)))) == 1
    ring = ring_allreduce(5)
    assert len(merge_steps(ring).program(0).steps) == len(ring.program(0).steps)
    assert list(merge_steps(one_shot(3)).programs()) == list(one_shot(3).programs())
