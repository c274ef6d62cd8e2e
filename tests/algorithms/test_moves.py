"""Where the chunks of a pattern of moves come to lie."""

from __future__ import annotations

import pytest

from flagcx.algorithms.moves import Move, arc, backwards, rounds_to_double, schedule_of
from flagcx.errors import ArgumentError, RankError
from flagcx.schedule.model import Buffer, Copy, Recv, RecvReduce, Send, Span, Step

INPUT, OUTPUT, SCRATCH = Buffer


def steps(collective: str, size: int, chunks: int, rank: int, moves: list[Move], root: int | None = None):
    rounds = 1 + max((move.round for move in moves), default=-1)
    return schedule_of(collective, "mine", size, chunks, rounds, lambda r: moves, root).program(rank).steps


def test_what_was_given_is_sent_from_input_and_copied_once_something_is_added():
    first, second, third = steps("allreduce", 2, 2, 0, [Move(0, Send, 0, 1, 1), Move(1, RecvReduce, 0, 2, 1)])
    assert first == Step()
    assert second == Step((Send(Span(INPUT, 0, 1), 1),), (Copy(Span(INPUT, 0, 2), Span(OUTPUT, 0, 2)),))
    assert third == Step((RecvReduce(Span(OUTPUT, 0, 2), 1),))


def test_a_rank_without_output_keeps_sums_in_scratch():
    _, step, _ = steps("reduce", 3, 2, 1, [Move(0, RecvReduce, 1, 2, 2), Move(1, Send, 1, 2, 0)], root=0)
    assert step.transfers == (RecvReduce(Span(SCRATCH, 1, 2), 2),)


def test_own_block_lies_at_the_start_of_output_and_those_of_others_in_scratch():
    _, step = steps("scatter", 4, 8, 2, [Move(0, Recv, 4, 6, 0)], root=0)
    assert step == Step((Recv(Span(OUTPUT, 0, 2), 0),))
    _, step = steps("scatter", 4, 8, 2, [Move(0, Recv, 4, 8, 0)], root=0)
    assert step.transfers == (Recv(Span(SCRATCH, 4, 8), 0),)
    assert step.local == (Copy(Span(SCRATCH, 4, 6), Span(OUTPUT, 0, 2)),)


def test_chunks_in_different_places_are_gathered_before_they_are_sent_as_one():
    _, first, second = steps("gather", 3, 3, 1, [Move(0, Recv, 2, 3, 2), Move(1, Send, 1, 3, 0)], root=0)
    assert first.local == (Copy(Span(INPUT, 0, 1), Span(SCRATCH, 1, 2)),)
    assert second.transfers == (Send(Span(SCRATCH, 1, 3), 0),)


def test_what_is_added_to_one_chunk_in_one_round_all_goes_to_one_place():
    """Own block 0 lives in OUTPUT, but the second message needs it beside block 1, in SCRATCH."""
    moves = [Move(0, RecvReduce, 0, 1, 1), Move(0, RecvReduce, 0, 2, 2), Move(0, RecvReduce, 1, 3, 1)]
    first, second = steps("reduce_scatter", 3, 3, 0, moves)
    assert first.local == (Copy(Span(INPUT, 0, 3), Span(SCRATCH, 0, 3)),)
    assert second.transfers == (
        RecvReduce(Span(SCRATCH, 0, 1), 1),
        RecvReduce(Span(SCRATCH, 0, 2), 2),
        RecvReduce(Span(SCRATCH, 1, 3), 1),
    )
    assert second.local == (Copy(Span(SCRATCH, 0, 1), Span(OUTPUT, 0, 1)),)


def test_the_root_of_a_broadcast_keeps_its_message():
    _, last = steps("broadcast", 2, 1, 0, [Move(0, Send, 0, 1, 1)], root=0)
    assert last.local == (Copy(Span(INPUT, 0, 1), Span(OUTPUT, 0, 1)),)


def test_a_lone_rank_copies():
    (only,) = steps("allgather", 1, 3, 0, [])
    assert only == Step((), (Copy(Span(INPUT, 0, 3), Span(OUTPUT, 0, 3)),))


def test_arc():
    assert list(arc(2, 2, 5)) == [(2, 4)]
    assert list(arc(3, 4, 5, pieces=2)) == [(6, 10), (0, 4)]
    assert list(arc(7, 3, 5)) == [(2, 5)]
    assert list(arc(1, 0, 5)) == []


def test_backwards():
    moves = [Move(0, Send, 0, 1, 3), Move(2, Recv, 1, 2, 4)]
    assert list(backwards(moves, 3, RecvReduce)) == [Move(2, RecvReduce, 0, 1, 3), Move(0, Send, 1, 2, 4)]


def test_rounds_to_double():
    assert [rounds_to_double(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_impossible_numbers_are_refused():
    with pytest.raises(ArgumentError, match="allreduce: size=0 ranks; expected at least 1"):
        schedule_of("allreduce", "mine", 0, 1, 0, lambda r: ())
    with pytest.raises(
        ArgumentError, match="allgather: the message would have 0 chunks; expected pieces >= 1"
    ):
        schedule_of("allgather", "mine", 4, 0, 0, lambda r: ())
    with pytest.raises(RankError, match="broadcast: root=4 is not a rank; expected 0 to 3"):
        schedule_of("broadcast", "mine", 4, 1, 0, lambda r: (), root=4)
