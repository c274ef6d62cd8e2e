"""verify: right schedules pass, each kind of fault is rejected with rank, step and chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagcx.errors import ScheduleError
from flagcx.schedule.model import (
    Buffer,
    Copy,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
)
from flagcx.schedule.verify import verify
from tests.oracle import outcome
from tests.schedule.samples import (
    IN,
    OUT,
    TMP,
    all_samples,
    one_shot,
    pairwise_alltoall,
    relayed_broadcast,
    ring_allgather,
    ring_allreduce,
    ring_reduce_scatter,
    staged_alltoall,
    star_gather,
    two_shot,
)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17])
def test_right_schedules_pass_in_both_forms(n):
    for schedule in all_samples(n):
        verify(schedule)
        verify(schedule, in_place=False)
        verify(schedule, in_place=True, uneven=True)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_right_schedules_run_right(n):
    for schedule in all_samples(n):
        assert outcome(schedule) is None, schedule
        assert outcome(schedule, uneven=True) is None, schedule


def test_samples_that_need_even_blocks():
    verify(staged_alltoall(4))
    assert outcome(staged_alltoall(4)) is None
    rejects(staged_alltoall(4), "differ in size when blocks are uneven", rank=0, step=1, chunk=1, uneven=True)
    verify(relayed_broadcast(4, 3), uneven=True)
    assert outcome(relayed_broadcast(4, 3)) is None


def made(
    *programs: list[Step], collective: str = "allreduce", chunks: int = 1, root: int | None = None
) -> Schedule:
    """A schedule of these programs."""
    listed = tuple(Program(r, tuple(steps)) for r, steps in enumerate(programs))
    return Schedule(collective, "made", len(listed), chunks, listed.__getitem__, root)


def exchange(mine: Step, theirs: Step, chunks: int = 1) -> Schedule:
    """Two ranks that copy INPUT to OUTPUT and do a step each."""
    copy = Step(local=(Copy(IN(0, chunks), OUT(0, chunks)),))
    return made([copy, mine], [copy, theirs], chunks=chunks)


def rejects(schedule: Schedule, *words: str, rank=None, step=None, chunk=None, **options) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, **options)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
    assert (caught.value.rank, caught.value.step, caught.value.chunk) == (rank, step, chunk), caught.value


def test_exchange_is_right():
    verify(
        exchange(
            Step((Send(OUT(0), 1), RecvReduce(OUT(0), 1))), Step((Send(OUT(0), 0), RecvReduce(OUT(0), 0)))
        )
    )


def test_ranks_that_combine_in_another_order_end_with_other_bits():
    """An exchange, f(mine, theirs) on both sides; then with the lower rank's first, and with three ranks."""
    mine = Step((Send(OUT(0), 1), RecvReduce(OUT(0), 1)))
    words = ("combined as 1 . 0, there as 0 . 1", "other bits than on rank 0")
    rejects(exchange(mine, ADD), *words, rank=1, step=1, chunk=0, same_bits=True)
    theirs = Step((Send(OUT(0), 0), Recv(TMP(0), 0)), (Reduce(OUT(0), TMP(0)), Copy(TMP(0), OUT(0))))
    verify(exchange(mine, theirs), same_bits=True)
    verify(one_shot(5), same_bits=True)
    regrouped = [
        Step((Send(IN(0), 1), Send(IN(0), 2), Recv(TMP(0), 1), Recv(TMP(1), 2)), tuple(work))
        for work in (
            [Copy(IN(0), OUT(0)), Reduce(TMP(0), OUT(0)), Reduce(TMP(1), OUT(0))],
            [Reduce(TMP(1), TMP(0)), Copy(IN(0), OUT(0)), Reduce(TMP(0), OUT(0))],
        )
    ]
    others = list(one_shot(3).programs())
    for step, fails in zip(regrouped, (False, True), strict=True):
        schedule = made([step], list(others[1].steps), list(others[2].steps))
        words = ("combined as (0 . 1) . 2, there as 0 . (1 . 2)",)
        if fails:
            rejects(schedule, *words, rank=1, step=0, chunk=0, same_bits=True)
        else:
            verify(schedule, same_bits=True)


ADD = Step((Send(OUT(0), 0), RecvReduce(OUT(0), 0)))
"""What rank 1 does in the exchange."""


def test_unknown_collective():
    rejects(replace(one_shot(2), collective="allsum"), "unknown collective 'allsum'", "allreduce")


def test_chunks_must_be_a_multiple_of_the_ranks_where_there_are_blocks():
    rejects(replace(ring_allgather(3), chunks=4), "must be a multiple of 3", "got 4")


def test_root_must_be_a_rank():
    rejects(replace(star_gather(3), root=3), "gather needs a root from 0 to 2", "got 3")
    rejects(replace(star_gather(3), root=None), "got None")


def test_collective_without_root_must_have_none():
    rejects(replace(one_shot(3), root=1), "allreduce has no root, got root=1")


def test_program_of_another_rank():
    schedule = replace(one_shot(3), make=lambda r: Program(0, ()))
    rejects(schedule, "make(1) returned the program of rank 0", rank=1)


@pytest.mark.parametrize(
    "span",
    [
        Span(Buffer.OUTPUT, 0, 0),
        Span(Buffer.OUTPUT, 1, 2),
        Span(Buffer.SCRATCH, -1, 0),
        Span(Buffer.INPUT, 0, 2),
    ],
)
def test_span_outside_its_buffer(span):
    schedule = exchange(Step((Send(span, 1), RecvReduce(OUT(0), 1))), ADD)
    rejects(schedule, "rank 0, step 1", str(span), "leaves its buffer", rank=0, step=1, chunk=span.start)


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_peer_that_is_no_other_rank(peer):
    schedule = exchange(Step((Send(OUT(0), peer), RecvReduce(OUT(0), 1))), ADD)
    rejects(schedule, f"peer {peer} must be another rank from 0 to 1", rank=0, step=1, chunk=0)


def test_no_transfer_and_no_local_work():
    rejects(exchange(Step((Copy(IN(0), OUT(0)),)), ADD), "is no transfer", rank=0, step=1)
    rejects(exchange(Step((), (Send(IN(0), 1),)), ADD), "is no local work", rank=0, step=1)


def test_written_input():
    mine = Step((Send(OUT(0), 1), RecvReduce(IN(0), 1)), (Copy(IN(0), OUT(0)),))
    rejects(exchange(mine, ADD), "INPUT must not be written", "OUTPUT or SCRATCH", rank=0, step=1, chunk=0)
    rejects(exchange(mine, ADD), "INPUT must not be written", rank=0, step=1, chunk=0, in_place=False)
    verify(exchange(mine, ADD), in_place=True)


def test_input_that_is_no_output_is_not_written_even_in_place():
    original = ring_reduce_scatter(2)

    def make(r: int) -> Program:
        return Program(r, (*original.make(r).steps, Step(local=(Copy(OUT(0), IN(1 - r)),))))

    rejects(replace(original, make=make), "INPUT must not be written", rank=0, step=2, chunk=1, in_place=True)


def test_send_without_receive():
    schedule = exchange(Step((Send(OUT(0), 1), RecvReduce(OUT(0), 1))), Step((Send(OUT(0), 0),)))
    rejects(
        schedule, "a send to rank 1 without its match", "has 0 matching receives", rank=0, step=1, chunk=0
    )


def test_receive_without_send():
    schedule = exchange(Step((RecvReduce(OUT(0), 1),)), ADD)
    rejects(schedule, "a receive from rank 0 without its match", "0 matching sends", rank=1, step=1, chunk=0)


def test_lengths_that_differ():
    mine = Step((Send(OUT(0, 2), 1), RecvReduce(OUT(0), 1)))
    rejects(
        exchange(mine, ADD, chunks=2), "sends 2 chunks to rank 1", "takes 1 chunks", rank=0, step=1, chunk=0
    )


def test_chunks_that_may_differ_in_size():
    mine = Step((Send(OUT(1), 1), RecvReduce(OUT(0), 1)))
    rejects(exchange(mine, ADD, chunks=2), "may differ by an element in size", rank=0, step=1, chunk=1)
    work = Step((Send(OUT(0), 1), RecvReduce(OUT(0), 1)), (Copy(OUT(0), TMP(1)),))
    rejects(exchange(work, ADD, chunks=2), "Copy from OUTPUT[0:1]", rank=0, step=1, chunk=1)


def test_blocks_that_may_differ_in_size():
    """Blocks of other ranks may pass through any block of SCRATCH, unless blocks are uneven."""

    def make(r: int) -> Program:
        steps = [Step(local=(Copy(IN(0), OUT(r)), Copy(IN(0), TMP(0))))]
        steps.append(
            Step((Send(TMP(0), (r + 1) % 3), Recv(TMP(1), (r + 2) % 3)), (Copy(TMP(1), OUT((r + 2) % 3)),))
        )
        steps.append(
            Step((Send(TMP(1), (r + 1) % 3), Recv(TMP(2), (r + 2) % 3)), (Copy(TMP(2), OUT((r + 1) % 3)),))
        )
        return Program(r, tuple(steps))

    schedule = Schedule("allgather", "through_scratch", 3, 3, make, aligned=True)
    verify(schedule)
    rejects(schedule, "differ in size when blocks are uneven", rank=0, step=1, chunk=0, uneven=True)
    assert outcome(schedule) is None
    assert outcome(schedule, uneven=True) is not None


def test_deadlock_names_the_ring_of_ranks():
    send, take = Step((Send(OUT(0), 1),)), Step((RecvReduce(OUT(0), 1),))
    back = [Step((Send(OUT(0), 0),)), Step((RecvReduce(OUT(0), 0),))]
    copy = Step(local=(Copy(IN(0), OUT(0)),))
    schedule = made([copy, send, take], [copy, *back])
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    message = str(caught.value)
    assert "deadlock" in message
    assert (
        "rank 0 in step 1 sends OUTPUT[0:1] to rank 1, which receives it in its step 2 and is in step 1"
        in message
    )
    assert "rank 1 in step 1 sends OUTPUT[0:1] to rank 0" in message
    assert caught.value.step == 1


def test_deadlock_of_receives_in_the_wrong_order():
    copy = Step(local=(Copy(IN(0), OUT(0)),))
    programs = [[copy] for _ in range(3)]
    for r, program in enumerate(programs):
        program.append(Step((RecvReduce(OUT(0), (r - 1) % 3),)))
        program.append(Step((Send(IN(0), (r + 1) % 3),)))
    with pytest.raises(ScheduleError, match=r"deadlock.*rank 2 in step 1 receives"):
        verify(made(*programs))


@pytest.mark.parametrize("other", [Send(OUT(0), 1), RecvReduce(OUT(0), 1), Recv(OUT(0), 1)])
def test_race_with_a_receive(other):
    theirs = [Send(OUT(0), 0), Recv(TMP(0), 0)] if isinstance(other, Send) else [Send(OUT(0), 0)] * 2
    schedule = exchange(Step((Recv(OUT(0), 1), other)), Step(tuple(theirs)))
    rejects(schedule, "a Recv from rank 1 lands in it at any time", "with rank 1", rank=0, step=1, chunk=0)


def test_send_and_reduction_of_one_span_are_no_race():
    verify(ring_allreduce(2))


def test_race_in_place_only():
    """Receiving into OUTPUT while INPUT is sent is a race only where both are one."""
    mine = Step((Send(IN(0), 1), Recv(OUT(0), 1)), (Reduce(IN(0), OUT(0)),))
    theirs = Step((Send(IN(0), 0), Recv(OUT(0), 0)), (Reduce(IN(0), OUT(0)),))
    verify(made([mine], [theirs]), in_place=False)
    rejects(made([mine], [theirs]), "in place, where INPUT and OUTPUT share memory", rank=0, step=0, chunk=0)


def test_copy_between_overlapping_spans():
    schedule = ring_allgather(2, 2)

    def make(r: int) -> Program:
        extra = Step(local=(Copy(Span(Buffer.SCRATCH, 0, 4), Span(Buffer.SCRATCH, 2, 6)),))
        return Program(r, (*schedule.make(r).steps, Step(local=(Copy(OUT(0, 4), TMP(0, 4)),)), extra))

    rejects(replace(schedule, make=make), "which overlap", rank=0, step=3, chunk=2)


def test_reading_what_was_never_written():
    schedule = exchange(Step((Send(TMP(0), 1), RecvReduce(OUT(0), 1))), ADD)
    rejects(schedule, "sends SCRATCH[0:1], of which SCRATCH[0:1] was never written", rank=0, step=1, chunk=0)
    work = exchange(Step((Send(OUT(0), 1), RecvReduce(OUT(0), 1)), (Copy(TMP(0), OUT(0)),)), ADD)
    rejects(work, "copies SCRATCH[0:1]", "never written", rank=0, step=1, chunk=0)
    into = exchange(Step((Send(OUT(0), 1), RecvReduce(TMP(0), 1)), (Reduce(TMP(0), OUT(0)),)), ADD)
    rejects(into, "reduces into SCRATCH[0:1]", "nothing was written to before", rank=0, step=1, chunk=0)


def test_output_that_nothing_was_written_to():
    schedule = made([Step((Send(IN(0), 1),))], [Step((Recv(OUT(0), 0),))], collective="broadcast", root=0)
    rejects(schedule, "nothing was ever written to it", rank=0, step=None, chunk=0, in_place=False)


def test_missing_contribution():
    schedule = exchange(
        Step((Send(OUT(0), 1), RecvReduce(OUT(0), 1))), Step((Send(OUT(0), 0), Recv(TMP(0), 0)))
    )
    rejects(schedule, "ends wrong: it lacks chunk 0 of rank 0", rank=1, step=0, chunk=0)


def test_repeated_contribution_says_where_it_was_added_twice():
    again = (Reduce(TMP(0), OUT(0)),) * 2
    mine = Step((Send(OUT(0), 1), Recv(TMP(0), 1)), again)
    rejects(
        exchange(mine, ADD),
        "counts chunk 0 of rank 1 2 times",
        "by rank 0 in its step 1",
        rank=0,
        step=1,
        chunk=0,
    )


def test_contributions_of_another_chunk():
    schedule = pairwise_alltoall(3)

    def make(r: int) -> Program:
        return Program(r, (Step(local=(Copy(IN((r + 1) % 3), OUT(r)),)), *schedule.make(r).steps[1:]))

    rejects(
        replace(schedule, make=make),
        "lacks chunk 0 of rank 0",
        "holds chunk 1 of rank 0",
        rank=0,
        step=0,
        chunk=0,
    )


def test_multiplicity_is_exact_however_often_a_sum_is_doubled():
    doubling = tuple(Copy(OUT(0), TMP(0)) if i % 2 == 0 else Reduce(TMP(0), OUT(0)) for i in range(140))
    copy = Step(local=(Copy(IN(0), OUT(0)), *doubling))
    rejects(made([copy]), f"counts chunk 0 of rank 0 {2**70} times", rank=0, step=0, chunk=0)


def test_barrier_may_count_a_rank_twice_but_must_not_miss_one():
    schedule = next(s for s in all_samples(5) if s.collective == "barrier")
    verify(schedule)

    def short(r: int) -> Program:
        return Program(r, schedule.make(r).steps[:-1])

    rejects(replace(schedule, make=short), "lacks chunk 0 of rank 1", rank=0, step=2, chunk=0)


def test_claim_of_alignment_is_checked():
    late = exchange(Step((Send(OUT(0), 1), RecvReduce(OUT(0), 1))), ADD)
    shifted = made(list(late.make(0).steps), [late.make(1).steps[0], Step(), late.make(1).steps[1]])
    verify(shifted)
    rejects(replace(shifted, aligned=True), "says it is aligned", "in its step 2", rank=0, step=1, chunk=0)
    longer = made(list(late.make(0).steps), [*late.make(1).steps, Step()])
    rejects(replace(longer, aligned=True), "has 3 steps and that of rank 0 has 2", rank=1)


def test_two_sends_of_a_pair_are_matched_in_order():
    """Crossed receives give each chunk the other's data."""
    original = two_shot(2)

    def make(r: int) -> Program:
        if r:
            step = Step((Send(IN(0), 0), Send(IN(1), 0), Recv(TMP(1), 0), Recv(TMP(0), 0)))
        else:
            step = Step((Send(IN(0), 1), Send(IN(1), 1), Recv(TMP(0), 1), Recv(TMP(1), 1)))
        return Program(r, (step, *original.make(r).steps))

    rejects(replace(original, make=make), "may differ by an element", rank=0, step=0, chunk=0)
