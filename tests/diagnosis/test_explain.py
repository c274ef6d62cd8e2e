"""What is said of ranks, from states that are made up: GPUs, other hosts, numbers that wrap."""

from __future__ import annotations

from dataclasses import replace

from flagcx.diagnosis.explain import explain, name_ranks
from flagcx.diagnosis.state import Progress, RankState, noted_state, state_of


def _rank(rank: int, *progress: Progress, doing: str = "sleeps") -> RankState:
    return RankState(rank, "here", 1000 + rank, doing, False, "", progress)


def _gpu(calls: int, waits: bool, waited_s: float = 20.0) -> Progress:
    last = f"allreduce of {calls} float32"
    wait = (last, None, waited_s) if waits else ()
    return Progress("world", (0, 1, 2), True, calls, last, *wait)


def test_a_rank_that_is_behind_on_gpus():
    found = explain(3, [_rank(0, _gpu(8, True)), _rank(1, _gpu(7, False)), _rank(2, _gpu(8, True))])
    assert found.culprits == [1] and not found.circles
    assert found.sentences[0] == (
        "ranks 0 and 2 wait for rank 1 in allreduce of 8 float32 of communicator world (arrays on GPUs), "
        "for 20 s."
    )
    assert "its last call of communicator world was allreduce of 7 float32" in found.sentences[1]


def test_all_ranks_in_one_operation_on_gpus():
    found = explain(3, [_rank(rank, _gpu(8, True)) for rank in range(3)])
    assert not found.culprits and not found.circles
    assert found.sentences == [
        "ranks 0 to 2 wait in allreduce of 8 float32 of communicator world (arrays on GPUs), for 20 s."
    ]


def test_numbers_of_calls_wrap():
    far = Progress("world", (0, 1), False, 1, "barrier", "barrier", 1, 3.0)
    near = Progress("world", (0, 1), False, 65535, "allgather")
    found = explain(2, [_rank(0, far), _rank(1, near)])
    assert found.culprits == [1]
    swapped = explain(2, [_rank(0, near), _rank(1, far)])
    assert swapped.culprits == [0], "the rank with the larger number is the one that is behind"


def test_a_chain_that_ends_at_a_rank_that_does_not_wait():
    ranks = (0, 1, 2)
    states = [
        _rank(0, Progress("world", ranks, False, 4, "barrier", "a receive", 1, 9.0)),
        _rank(1, Progress("world", ranks, False, 4, "barrier", "a receive", 2, 8.0)),
        _rank(2, Progress("world", ranks, False, 4, "barrier"), doing="computes"),
    ]
    found = explain(3, states)
    assert found.culprits == [2] and not found.circles
    assert "rank 2 (process 1002 on here) itself waits for no rank; it computes" in found.sentences[-1]


def test_a_rank_that_waits_for_itself():
    waits = Progress("world", (0, 1), False, 4, "barrier", "a receive of 8 bytes", 0, 9.0)
    found = explain(2, [_rank(0, waits), _rank(1, Progress("world", (0, 1), False, 4, "barrier"))])
    assert found.circles == [[0]]
    call = "a receive of 8 bytes of communicator world"
    assert f"rank 0 waits for itself in {call}. It must send before it receives." in found.sentences


def test_ranks_that_are_gone_and_ranks_that_cannot_be_seen():
    waits = Progress("world", (0, 1, 2), False, 4, "barrier", "barrier", 1, 9.0)
    found = explain(3, [_rank(0, waits)], elsewhere=[2])
    assert found.culprits == [1] and "rank 1 is gone." in found.sentences
    far = replace(waits, waits_for=2)
    found = explain(3, [_rank(0, far), _rank(1, far)], elsewhere=[2])
    assert found.sentences[-1] == "rank 2 is on another host, which cannot be seen from here."
    assert explain(2, [_rank(0), _rank(1)]).sentences == [
        "No rank waits for another: the job goes on, or is in no call of flagcx."
    ]


def test_a_rank_whose_page_says_that_its_gpu_is_late():
    gpu = {"calls": 65539, "issued": 9, "what": "x", "since": 1.0}
    page = {
        "rank": 1,
        "host": "here/boot",
        "communicators": [{"name": "world", "ranks": [0, 1], "gpu": gpu}],
    }
    state = state_of(page, 5, "sleeps")
    (progress,) = state.progress
    assert (progress.calls, progress.waits_in, progress.on_gpu) == (3, "x", True)
    assert progress.waited_s > 0
    assert RankState.from_dict(state.to_dict()) == state


def test_a_rank_on_another_host_is_known_by_its_note():
    note = (
        '{"communicator": "world", "ranks": [0, 1], "since": 1.0, "call": "barrier", "for": 0, '
        '"counts": {"NumPy arrays": 65540}}'
    )
    found = {"connected": {"1": 77}, "lost": {}, "notes": {"waits/1/NumPy arrays": note}}
    state = noted_state(1, "there/boot", found)
    assert (state.host, state.process, state.wait.waits_for, state.wait.calls) == ("there", 77, 0, 4)
    found = {"connected": {}, "lost": {"1": "it was killed"}, "notes": {}}
    assert noted_state(1, "there/boot", found).doing == "is gone"


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 0]) == "ranks 0 and 1"
    assert name_ranks([0, 1, 2, 5, 7]) == "ranks 0 to 2, 5 and 7"
