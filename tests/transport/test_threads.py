"""Ranks that are threads of this process: the same results, the same errors, and nothing left behind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import flagcx as fc
from flagcx.transport.thread_room import rooms
from tests.communicator import checks, test_behaviour, test_disagreement
from tests.communicator.messages import PROGRAMS, run_programs
from tests.communicator.random_messages import run_random
from tests.ranges import exhaustive
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    assert not rooms()
    assert not [t for t in threading.enumerate() if t.name.startswith("flagcx-rank")]


def in_threads(function, ranks: int, *args, timeout_s: float = 60):
    """Calls a function on ranks that are threads; raises what the first rank raised."""
    try:
        return fc.launch(function, ranks, args, timeout_s=timeout_s, threads=True)
    except fc.LaunchError as error:
        raise error.__cause__ or error from None


def check_dtypes() -> int:
    """Every dtype with every operation; other checks have every count."""
    return checks.check_allreduce_dtypes((0, 17, 1009))


@pytest.mark.parametrize("size", [3, *exhaustive([2, 5])])
@pytest.mark.parametrize(
    "check",
    [
        check_dtypes,
        checks.check_allreduce_algorithms,
        checks.check_others,
        checks.check_uneven,
    ],
    ids=lambda check: check.__name__,
)
def test_collectives(check, size):
    done = in_threads(check, size, timeout_s=120)
    assert min(done) > 0 and len(set(done)) == 1


def test_calls_back_to_back_with_ranks_out_of_step():
    in_threads(checks.check_back_to_back, 3, 300)


def test_sums_have_the_same_bits_on_every_rank_and_as_in_shared_memory():
    def digest() -> list[bytes]:
        comm, random = fc.init(), np.random.default_rng(fc.init().rank)
        return [
            comm.allreduce(random.standard_normal(n).astype(np.float32)).tobytes()
            for n in (100, 5_000, 50_000)
        ]

    found = in_threads(digest, 3) + run_ranks(digest, 3)
    assert all(digest == found[0] for digest in found)


@pytest.mark.parametrize(
    ("function", "size", "args"),
    [
        (test_behaviour._groups, 3, ()),
        (test_behaviour._transfers, 3, (1000,)),
        (test_behaviour._transfers, 2, (100_000,)),
        (test_behaviour._started, 4, ()),
        (test_behaviour._objects, 3, ()),
        (test_behaviour._splits, 5, ()),
        (test_behaviour._operations, 3, ()),
    ],
)
def test_behaviour_beyond_one_collective(function, size, args):
    in_threads(function, size, *args)


@pytest.fixture(scope="module")
def ends():
    return fc.launch(test_disagreement._disagree, 2, threads=True)


@pytest.mark.parametrize("name", test_disagreement.CALLS)
def test_ranks_that_make_different_calls_are_told(ends, name):
    test_disagreement.test_somebody_is_told_and_nobody_takes_it_for_right(ends, name)


def end_of(call) -> tuple[str, int | None, str]:
    try:
        call()
    except fc.CommunicationError as error:
        return type(error).__name__, error.peer, str(error)
    return "nothing", None, ""


def test_a_rank_that_stays_away_is_named():
    away = threading.Event()

    def job():
        comm = fc.init(timeout_s=0.3)
        if comm.rank == 2:
            away.wait(30)
            return None
        end = end_of(lambda: comm.allreduce(np.ones(5)))
        comm.rank or away.set()
        return end

    first, second, _ = in_threads(job, 3)
    for name, peer, text in (first, second):
        assert (name, peer) in (("PeerTimeoutError", 2), ("AbortedError", 2))
        assert "rank 2 did not take part within 0.3 s" in text


def test_a_rank_that_raises_is_named_to_its_peers_and_blamed():
    ends = {}

    def job():
        comm = fc.init(timeout_s=30)
        half = comm.split(0)
        if comm.rank == 1:
            raise KeyError("the cause")
        ends[comm.rank] = end_of(lambda: half.allreduce(np.ones(3)))

    start = time.monotonic()
    with pytest.raises(fc.LaunchError, match=r"rank 1 raised KeyError: 'the cause'") as caught:
        fc.launch(job, 3, threads=True)
    assert time.monotonic() - start < 10
    assert isinstance(caught.value.__cause__, KeyError) and 'raise KeyError("the cause")' in str(caught.value)
    for rank in (0, 2):
        name, peer, text = ends[rank]
        assert (name, peer) in (("PeerDiedError", 1), ("AbortedError", 1)), text
        assert "rank 1" in text and "KeyError" in text


def test_a_rank_that_ends_early_is_named():
    closed = threading.Event()

    def job():
        comm = fc.init(timeout_s=30)
        if comm.rank == 1:
            comm.close()
            closed.set()
            return None
        closed.wait(30)
        return end_of(lambda: comm.allreduce(np.ones(3)))

    name, peer, text = in_threads(job, 2)[0]
    assert (name, peer) == ("PeerDiedError", 1)
    assert "rank 1 has ended or closed its communicator while rank 0 waited in allreduce of 3 float64" in text


def test_a_rank_that_ends_before_its_peers_call_is_told_so():
    sent = threading.Event()

    def job():
        comm = fc.init(timeout_s=30)
        if comm.rank == 0:
            comm.broadcast(np.ones(3), root=0)  # small, so it waits for no peer
            sent.set()
        sent.wait(30)

    with pytest.raises(fc.MismatchError, match=r"rank 0 called broadcast of 3 .*, and rank 1 never did the"):
        in_threads(job, 2)


def test_a_rank_that_is_late_is_named():
    stop = threading.Event()

    def job():
        if fc.init().rank == 1:
            stop.wait(30)

    with pytest.raises(fc.LaunchError, match=r"rank 1 was given up: not done within 0\.5 s") as caught:
        fc.launch(job, 2, threads=True, timeout_s=0.5)
    assert caught.value.rank == 1
    stop.set()
    for thread in threading.enumerate():
        if thread.name.startswith("flagcx-rank"):
            thread.join(10)


def test_each_thread_has_a_world_of_its_own():
    def job():
        comm = fc.init()
        assert fc.init() is comm, "the same rank gets the same communicator"
        comm.close()
        again = fc.init()
        assert again is not comm and again.rank == comm.rank
        return id(again), again.rank, again.size, again.allreduce(np.ones(1))[0]

    found = in_threads(job, 4)
    assert len({key for key, *_ in found}) == 4
    assert [rest for _, *rest in found] == [[rank, 4, 4.0] for rank in range(4)]
    assert fc.init().size == 1, "this thread is the process's own rank"


def test_arguments_and_results_are_shared_not_copied():
    lock, seen = threading.Lock(), []

    def job(factor):
        rank = fc.init().rank
        with lock:  # no lock can be pickled
            seen.append(rank)
        return lambda: factor

    results = fc.launch(job, 3, (7,), threads=True)
    assert sorted(seen) == [0, 1, 2] and [result() for result in results] == [7] * 3
    with pytest.raises(fc.ArgumentError, match="share_gpu=True is for ranks that are processes"):
        fc.launch(job, 3, (7,), threads=True, share_gpu=True)


def _in_processes() -> str:
    with pytest.raises(fc.ArgumentError) as caught:
        fc.init(transport="threads")
    return str(caught.value)


def test_processes_are_no_threads():
    for text in run_ranks(_in_processes, 2, fresh=True):
        assert "needs ranks that are threads of one process; rank 0 is in process" in text
        assert "fc.launch(function, threads=True)" in text


def test_messages_move_together_and_beside_collectives():
    assert in_threads(run_programs, 3) == [len(PROGRAMS)] * 3
    assert in_threads(run_programs, 1) == [len(PROGRAMS)]


@pytest.mark.parametrize("size", [2, 4])
def test_random_programs_of_messages(size):
    assert min(in_threads(run_random, size, size, 60)) > 500
