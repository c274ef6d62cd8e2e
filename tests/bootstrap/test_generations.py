"""Ranks that die and come back: which generation they meet in, and for whom it waits."""

from __future__ import annotations

import pytest

from flagcx.bootstrap.generations import Generations
from flagcx.bootstrap.membership import Membership
from flagcx.bootstrap.store_state import StoreAnswer, StoreRequest, StoreState

AGREE = StoreRequest("agree", "generation", b"", timeout_s=60)


def agree(members: Generations, *ranks: int) -> list:
    """These ranks connect and agree; the answers to all of them."""
    answers = []
    for rank in ranks:
        members.join(rank, pid=100 + rank)
        answers += members.submit(rank, AGREE, f"ticket {rank}", 0.0)
    return answers


def gone(answers: list) -> dict[str, tuple[int, ...]]:
    """The ranks that each answer says are gone."""
    assert all(not answer.fault for _, answer in answers)
    return {ticket: answer.ranks for ticket, answer in answers}


@pytest.fixture
def members():
    """Three ranks in their first generation."""
    made = Generations(3)
    assert gone(agree(made, 0, 1, 2)) == {f"ticket {rank}": () for rank in range(3)}
    return made


def lose(members: Generations, rank: int, returns: bool = True) -> list:
    if rank in members.connected:
        members.end_stay(rank)
    return members.lose(rank, "why", returns)


def test_a_rank_that_was_started_again_is_waited_for(members):
    assert lose(members, 2) == [] and members.misses(0, 2)
    for rank in (0, 1):
        members.leave(rank)
    assert agree(members, 0, 1) == []
    assert not members.misses(0, 2), "the generation that forms waits for it"
    assert gone(agree(members, 2)) == {f"ticket {rank}": () for rank in range(3)}
    later = StoreRequest("exchange", "later", b"x", timeout_s=60, group=(0, 1, 2))
    answers = [one for rank in range(3) for one in members.submit(rank, later, rank, 0.0)]
    assert [ticket for ticket, _ in answers] == [0, 1, 2] and not answers[0][1].fault


def test_a_rank_that_is_not_started_again_is_left_out(members):
    lose(members, 2)
    for rank in (0, 1):
        members.leave(rank)
    assert agree(members, 0, 1) == []
    assert gone(lose(members, 2, returns=False)) == {"ticket 0": (2,), "ticket 1": (2,)}
    assert "was lost before" in members.refusal(2, 3)


def test_a_rank_that_dies_while_a_generation_forms_comes_again(members):
    lose(members, 2)
    members.leave(0)
    assert agree(members, 0, 2) == []
    assert lose(members, 2) == []
    assert agree(members, 2) == []
    members.leave(1)
    assert gone(agree(members, 1)) == {f"ticket {rank}": () for rank in range(3)}


def test_a_rank_of_the_last_generation_is_told_of_a_death_in_it(members):
    asked = StoreRequest("exchange", "x", b"", timeout_s=60, group=(0, 1, 2))
    assert members.submit(0, asked, "asked", 0.0) == []
    assert lose(members, 1) == [("asked", StoreAnswer(fault="died", ranks=(1,), detail="why"))]
    members.leave(0)
    assert agree(members, 0, 1) == []
    refused = members.submit(2, asked, "late", 0.0)
    assert refused == [("late", StoreAnswer(fault="died", ranks=(1,), detail="why"))]


def test_a_rank_that_has_ended_is_not_waited_for(members):
    members.leave(2)
    members.finish(2)
    lose(members, 1)
    members.leave(0)
    assert gone(agree(members, 0, 1)) == {"ticket 0": (2,), "ticket 1": (2,)}


def test_a_rank_that_leaves_while_a_generation_forms_may_come_again(members):
    for rank in range(3):
        members.leave(rank)
    assert agree(members, 0, 1) == []
    assert members.leave(1) == []
    assert gone(agree(members, 1, 2)) == {f"ticket {rank}": () for rank in range(3)}


def test_an_agreement_is_of_the_ranks_that_come():
    state = StoreState(4)
    request = StoreRequest("agree", "left", b"x", timeout_s=5, group=(0, 1, 2, 3))
    for rank in (0, 1):
        assert state.submit(rank, request, rank, 0.0) == []
    assert state.submit(0, request, "again", 0.0) == [("again", StoreAnswer(fault="twice", ranks=(0,)))]
    assert state.lose(1, "it came, and died") == []
    assert state.next_deadline() == 5.0
    assert state.leave(3) == []
    told = StoreAnswer(values=(b"x", b"x"), ranks=(1, 3))
    assert state.submit(2, request, 2, 1.0) == [(0, told), (2, told)]
    assert state.agreed == 1


def test_an_agreement_ends_with_the_ranks_that_do_not_come():
    state = StoreState(3)
    state.lose(2, "why")
    assert state.submit(0, StoreRequest("agree", "left", b"", timeout_s=5), 0, 0.0) == []
    assert state.expire(4.0) == []
    assert state.expire(5.0) == [(0, StoreAnswer(fault="timeout", ranks=(1,)))]


def test_a_plain_job_takes_no_lost_rank_back():
    members = Membership(2)
    members.join(0, 1)
    members.join(1, 2)
    members.end_stay(1)
    members.lose(1, "why", returns=True)
    assert "cannot come back" in members.refusal(1, 2) and members.misses(0, 1)
