"""Where the chunks of a pattern come to lie, and patterns run backwards."""

from __future__ import annotations

import pytest

from flagcx.errors import ArgumentError, RankError
from flagcx.schedule.compose import (
    ChunkTransfer,
    arc,
    doublings,
    recv,
    recv_reduce,
    reverse,
    schedule_of,
    send,
)
from flagcx.schedule.model import Buffer, Copy, Program, Recv, RecvReduce, Schedule, Send, Span, Step
from flagcx.schedule.pattern import backwards

INPUT, OUTPUT, SCRATCH = Buffer


def steps(
    collective: str,
    size: int,
    chunks: int,
    rank: int,
    transfers: list[ChunkTransfer],
    root: int | None = None,
):
    rounds = 1 + max((t.round for t in transfers), default=-1)
    return (
        schedule_of(collective, "mine", size, chunks, rounds, lambda r: transfers, root).program(rank).steps
    )


def test_what_was_given_is_sent_from_input_and_copied_once_something_is_added():
    first, second, third = steps("allreduce", 2, 2, 0, [send(0, 1, 0, 1), recv_reduce(1, 1, 0, 2)])
    assert first == Step()
    assert second == Step((Send(Span(INPUT, 0, 1), 1),), (Copy(Span(INPUT, 0, 2), Span(OUTPUT, 0, 2)),))
    assert third == Step((RecvReduce(Span(OUTPUT, 0, 2), 1),))


def test_a_rank_without_output_keeps_sums_in_scratch():
    _, step, _ = steps("reduce", 3, 2, 1, [recv_reduce(0, 2, 1, 2), send(1, 0, 1, 2)], root=0)
    assert step.transfers == (RecvReduce(Span(SCRATCH, 1, 2), 2),)


def test_own_block_lies_at_the_start_of_output_and_those_of_others_in_scratch():
    _, step = steps("scatter", 4, 8, 2, [recv(0, 0, 4, 6)], root=0)
    assert step == Step((Recv(Span(OUTPUT, 0, 2), 0),))
    _, step = steps("scatter", 4, 8, 2, [recv(0, 0, 4, 8)], root=0)
    assert step.transfers == (Recv(Span(SCRATCH, 4, 8), 0),)
    assert step.local == (Copy(Span(SCRATCH, 4, 6), Span(OUTPUT, 0, 2)),)


def test_chunks_in_different_places_are_gathered_before_they_are_sent_as_one():
    _, first, second = steps("gather", 3, 3, 1, [recv(0, 2, 2, 3), send(1, 0, 1, 3)], root=0)
    assert first.local == (Copy(Span(INPUT, 0, 1), Span(SCRATCH, 1, 2)),)
    assert second.transfers == (Send(Span(SCRATCH, 1, 3), 0),)


def test_what_is_added_to_one_chunk_in_one_round_all_goes_to_one_place():
    """Own block 0 lives in OUTPUT, but the second message needs it beside block 1, in SCRATCH."""
    transfers = [recv_reduce(0, 1, 0, 1), recv_reduce(0, 2, 0, 2), recv_reduce(0, 1, 1, 3)]
    first, second = steps("reduce_scatter", 3, 3, 0, transfers)
    assert first.local == (Copy(Span(INPUT, 0, 3), Span(SCRATCH, 0, 3)),)
    assert second.transfers == (
        RecvReduce(Span(SCRATCH, 0, 1), 1),
        RecvReduce(Span(SCRATCH, 0, 2), 2),
        RecvReduce(Span(SCRATCH, 1, 3), 1),
    )
    assert second.local == (Copy(Span(SCRATCH, 0, 1), Span(OUTPUT, 0, 1)),)


def test_the_root_of_a_broadcast_keeps_its_message():
    _, last = steps("broadcast", 2, 1, 0, [send(0, 1, 0, 1)], root=0)
    assert last.local == (Copy(Span(INPUT, 0, 1), Span(OUTPUT, 0, 1)),)


def test_a_lone_rank_copies():
    (only,) = steps("allgather", 1, 3, 0, [])
    assert only == Step((), (Copy(Span(INPUT, 0, 3), Span(OUTPUT, 0, 3)),))


def test_arc():
    assert list(arc(2, 2, 5)) == [(2, 4)]
    assert list(arc(3, 4, 5)) == [(3, 5), (0, 2)]
    assert list(arc(7, 3, 5)) == [(2, 5)]
    assert list(arc(1, 0, 5)) == []


def test_backwards():
    transfers = [send(0, 3, 0, 1), recv(2, 4, 1, 2)]
    assert list(backwards(transfers, 3, RecvReduce)) == [recv_reduce(2, 3, 0, 1), send(0, 4, 1, 2)]


def test_doublings():
    assert [doublings(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_impossible_numbers_are_refused():
    with pytest.raises(ArgumentError, match="allreduce: size=0 ranks; expected at least 1"):
        schedule_of("allreduce", "mine", 0, 1, 0, lambda r: ())
    with pytest.raises(
        ArgumentError, match="allgather: the message would have 0 chunks; expected pieces >= 1"
    ):
        schedule_of("allgather", "mine", 4, 0, 0, lambda r: ())
    with pytest.raises(RankError, match="broadcast: root=4 is not a rank; expected 0 to 3"):
        schedule_of("broadcast", "mine", 4, 1, 0, lambda r: (), root=4)


def test_what_is_no_pattern_has_no_reverse():
    idle = Schedule("broadcast", "idle", 2, 1, lambda rank: Program(rank, ()), root=0)
    with pytest.raises(ArgumentError, match="cannot run idle broadcast backwards; expected a schedule made"):
        reverse(idle)
    with pytest.raises(ArgumentError, match="of a collective from or to a root"):
        reverse(schedule_of("allreduce", "mine", 2, 1, 0, lambda rank: ()))
