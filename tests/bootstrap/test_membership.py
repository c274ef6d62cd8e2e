"""Which ranks are connected, have left or are lost, called without a socket."""

import pytest

from flagcx.bootstrap.membership import Membership
from flagcx.bootstrap.store_state import StoreAnswer, StoreRequest


@pytest.fixture
def members():
    made = Membership(2)
    for rank in range(2):
        assert made.refusal(rank, 2) == ""
        made.join(rank, 100 + rank)
    return made


def exchange(members, rank, value=b""):
    return members.submit(rank, StoreRequest("exchange", "x", value, timeout_s=5), rank, 0)


@pytest.mark.parametrize(
    ("rank", "size", "reason"),
    [
        (1, 3, "it calls itself rank 1 of 3, but this job has 2 ranks"),
        (2, 2, "it calls itself rank 2 of 2"),
        (1, 2, "rank 1 is already connected, from process 101"),
    ],
)
def test_a_rank_that_does_not_belong_is_refused(members, rank, size, reason):
    assert members.refusal(rank, size).startswith(reason)


def test_a_rank_in_its_second_stay_does_not_meet_one_in_its_first(members):
    assert members.leave(0) == []
    members.join(0, 100)
    assert exchange(members, 0) == []
    assert exchange(members, 1) == [(1, StoreAnswer(fault="left", ranks=(0,)))]
    assert members.leave(1) == []
    members.join(1, 101)
    assert dict(exchange(members, 1)) == dict.fromkeys((0, 1), StoreAnswer(values=(b"", b"")))


def test_a_loss_is_told_to_every_stay_and_is_final(members):
    members.leave(0)
    members.join(0, 100)
    exchange(members, 0)
    members.end_stay(1)
    died = StoreAnswer(fault="died", ranks=(1,), detail="why")
    assert members.lose(1, "why") == [(0, died)]
    assert members.refusal(1, 2) == "rank 1 was lost before (why) and cannot come back"
    members.leave(0)
    members.join(0, 100)
    assert exchange(members, 0) == [(0, died)], "a later stay knows of it too"


def test_who_comes_after_a_rank_has_left_for_a_peer_is_told_why(members):
    members.leave(1, "rank 2 did not come")
    left = StoreAnswer(fault="left", ranks=(1,), detail="rank 2 did not come")
    assert exchange(members, 0) == [(0, left)]


def test_a_process_that_ended_well_is_not_waited_for_once_its_connection_has_ended(members):
    exchange(members, 0)
    assert members.finish(1) == [], "it is still connected"
    assert members.leave(1) == [(0, StoreAnswer(fault="left", ranks=(1,)))]
    members.leave(0)
    members.join(0, 100)
    assert exchange(members, 0) == [(0, StoreAnswer(fault="left", ranks=(1,)))]


def test_a_rank_that_could_not_join_ends_that_stay_for_all_and_meets_them_in_the_next(members):
    assert exchange(members, 1) == []
    gave_up = StoreAnswer(fault="failed", ranks=(0,), detail="why")
    assert members.fail(0, "why") == [(1, gave_up)]
    assert exchange(members, 1) == [(1, gave_up)], "of which it may not have heard"
    members.join(0, 100)
    assert exchange(members, 0) == []
    members.fail(1, "rank 0 gave up")
    members.join(1, 101)
    assert dict(exchange(members, 1)) == dict.fromkeys((0, 1), StoreAnswer(values=(b"", b"")))
    assert members.complete


def test_a_late_rank_comes_into_the_stay_in_which_the_others_are_by_then():
    members = Membership(2)
    for _ in range(3):
        members.join(0, 100)
        exchange(members, 0)
        members.fail(0, "rank 1 did not come")
    members.join(0, 100)
    members.join(1, 101)
    exchange(members, 0)
    assert dict(exchange(members, 1)) == dict.fromkeys((0, 1), StoreAnswer(values=(b"", b"")))
    assert len(members._states) == 1, "no stay is kept that none can be in"


def test_who_comes_after_the_others_gave_up_is_told_of_the_rank_that_was_the_reason():
    members = Membership(3)
    members.join(0, 100)
    exchange(members, 0)
    members.finish(1)  # without having joined, so that rank 0 gives up
    members.fail(0, "rank 1 has left")
    members.lose(0, "exit code 1")
    members.join(2, 102)
    assert exchange(members, 2) == [(2, StoreAnswer(fault="left", ranks=(1,)))]
