"""The store's rules, called without a socket: who waits for what, and who is told what."""

import math

import pytest

from flagcx.bootstrap import store_state as module
from flagcx.bootstrap.store_state import StoreAnswer, StoreRequest, StoreState


@pytest.fixture
def state():
    made = StoreState(3)
    for rank in range(3):
        made.present.add(rank)
    return made


def exchange(name="g", value=b"", timeout_s=5.0, group=None):
    return StoreRequest("exchange", name, value, timeout_s=timeout_s, group=group)


def test_a_key_is_set_got_and_deleted(state):
    assert state.submit(0, StoreRequest("set", "k", b"v"), "a", 0) == [("a", StoreAnswer())]
    assert state.submit(1, StoreRequest("get", "k"), "b", 0) == [("b", StoreAnswer(values=(b"v",)))]
    assert state.submit(1, StoreRequest("delete", "k"), "c", 0) == [("c", StoreAnswer(number=1))]
    assert state.submit(1, StoreRequest("delete", "k"), "d", 0) == [("d", StoreAnswer(number=0))]


def test_whoever_waits_for_a_key_gets_it_when_it_is_set(state):
    assert state.submit(1, StoreRequest("get", "k", timeout_s=5), "b", 0) == []
    assert state.submit(2, StoreRequest("get", "other", timeout_s=5), "c", 0) == []
    assert state.submit(0, StoreRequest("set", "k", b"v"), "a", 1) == [
        ("a", StoreAnswer()),
        ("b", StoreAnswer(values=(b"v",))),
    ]
    assert state.submit(0, StoreRequest("set", "k", b"w"), "a", 1) == [
        ("a", StoreAnswer())
    ]  # b is not told twice


def test_counters_add_up(state):
    assert state.submit(0, StoreRequest("add", "n", amount=5), "a", 0) == [("a", StoreAnswer(number=5))]
    assert state.submit(1, StoreRequest("add", "n", amount=-7), "b", 0) == [("b", StoreAnswer(number=-2))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_an_exchange_gives_all_values_in_rank_order_to_all(state, order):
    for rank in order[:-1]:
        assert state.submit(rank, exchange(value=bytes([rank])), rank, 0) == []
    answers = state.submit(order[-1], exchange(value=bytes([order[-1]])), order[-1], 0)
    assert sorted(ticket for ticket, _ in answers) == [0, 1, 2]
    assert {answer.values for _, answer in answers} == {(b"\0", b"\1", b"\2")}


def test_an_exchange_of_some_ranks_is_in_their_order_and_apart_from_others(state):
    group = (2, 0)
    assert state.submit(0, exchange(value=b"0", group=group), "a", 0) == []
    assert state.submit(0, exchange(value=b"x", group=(0, 1)), "other", 0) == []
    answers = dict(state.submit(2, exchange(value=b"2", group=group), "b", 0))
    assert answers == dict.fromkeys("ab", StoreAnswer(values=(b"2", b"0")))


def test_a_name_may_be_used_again(state):
    for round_ in range(3):
        for rank in range(2):
            assert state.submit(rank, exchange(value=b"%d" % round_), rank, 0) == []
        answers = state.submit(2, exchange(value=b"%d" % round_), 2, 0)
        assert answers[0][1].values == (b"%d" % round_,) * 3


def test_an_exchange_that_is_late_fails_for_all_in_it_and_names_the_absent(state):
    state.submit(0, exchange(timeout_s=9), "a", 0)
    state.submit(2, exchange(timeout_s=4), "c", 1)
    assert state.next_deadline() == 5
    assert state.expire(4.9) == []
    assert state.expire(5) == [(ticket, StoreAnswer(fault="timeout", ranks=(1,))) for ticket in "ac"]
    assert state.next_deadline() == math.inf


def test_a_get_that_is_late_names_the_ranks_that_are_not_there():
    state = StoreState(3)
    state.present.add(0)
    state.submit(0, StoreRequest("get", "k", timeout_s=2), "a", 0)
    assert state.expire(2) == [("a", StoreAnswer(fault="timeout", ranks=(1, 2)))]


def test_a_death_is_told_to_all_who_wait_and_to_all_who_ask_later(state):
    state.submit(0, exchange(timeout_s=9), "a", 0)
    state.submit(1, StoreRequest("get", "k", timeout_s=9), "b", 0)
    told = StoreAnswer(fault="died", ranks=(2,), detail="why")
    assert sorted(state.lose(2, "why")) == [("a", told), ("b", told)]
    assert state.submit(0, StoreRequest("set", "k", b""), "c", 1) == [("c", told)]
    assert state.lose(2, "again") == []


def test_a_death_does_not_concern_a_group_without_the_dead(state):
    group = (0, 1)
    state.submit(0, exchange(group=group), "a", 0)
    state.submit(1, StoreRequest("get", "k", timeout_s=9, group=group), "b", 0)
    assert state.lose(2, "why") == []
    assert state.submit(0, StoreRequest("set", "k", b"v", group=group), "c", 0)[1] == (
        "b",
        StoreAnswer(values=(b"v",)),
    )


def test_a_rank_that_comes_late_is_told_of_the_first_that_ended(state):
    """Rank 0 gave up, since rank 1 had left: rank 2 is told of rank 1; of rank 0, where that came first."""
    other = StoreState(3)
    for first, one in ((1, state), (0, other)):
        for rank in (first, 1 - first):
            _ = one.leave(1) if rank == 1 else one.lose(0, "init failed")
    left = StoreAnswer(fault="left", ranks=(1,))
    died = StoreAnswer(fault="died", ranks=(0,), detail="init failed")
    assert state.submit(2, exchange(), "c", 0) == [("c", left)]
    assert other.submit(2, exchange(), "c", 0) == [("c", died)]
    assert state.submit(2, StoreRequest("set", "k", b""), "c", 0) == [("c", died)]


def test_a_rank_that_left_is_not_waited_for(state):
    state.submit(0, exchange(timeout_s=9), "a", 0)
    told = StoreAnswer(fault="left", ranks=(1,))
    assert state.leave(1) == [("a", told)]
    assert state.submit(2, exchange(), "c", 0) == [("c", told)]
    assert state.submit(2, StoreRequest("set", "k", b""), "d", 0) == [("d", StoreAnswer())]  # it did not die


def test_a_rank_that_left_after_it_had_joined_an_exchange_counts(state):
    state.submit(1, exchange(value=b"1"), "b", 0)
    assert state.leave(1) == []
    state.submit(0, exchange(value=b"0"), "a", 0)
    assert dict(state.submit(2, exchange(value=b"2"), "c", 0))["a"].values == (b"0", b"1", b"2")


def test_joining_twice_is_refused(state):
    state.submit(0, exchange(), "a", 0)
    assert state.submit(0, exchange(), "b", 0) == [("b", StoreAnswer(fault="twice", ranks=(0,)))]


def test_a_full_store_refuses_and_has_room_again_after_a_delete(state, monkeypatch):
    monkeypatch.setattr(module, "MAX_STORED_NBYTES", 10)
    assert state.submit(0, StoreRequest("set", "k", b"x" * 8), "a", 0)[0][1].fault == ""
    full = state.submit(0, StoreRequest("set", "l", b"x" * 3), "b", 0)[0][1]
    assert (full.fault, full.detail) == ("full", "8 bytes of at most 10 are in use")
    assert state.submit(0, StoreRequest("set", "k", b"x" * 10), "c", 0)[0][1].fault == ""  # in place of the 8
    state.submit(0, StoreRequest("delete", "k"), "d", 0)
    assert state.submit(0, StoreRequest("set", "l", b"x" * 3), "e", 0)[0][1].fault == ""
