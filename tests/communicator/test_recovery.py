"""Communicators that end at once, and ranks that go on without those they lost."""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import pytest

import flagcx as fc
from tests.bootstrap.processes import mpirun_environment, rest, spawned
from tests.communicator.jobs import PRELUDE, job, outcome_of
from tests.ranges import exhaustive

SOON_S = 10.0
"""Long before any time-out ends a wait, also on a busy machine."""

_START = """
import faulthandler, gc, threading
from dataclasses import replace
faulthandler.dump_traceback_later(40, exit=True)
comm = fc.init()
me = comm.rank

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def lose(call):
    "Makes calls until one says that a rank was lost."
    try:
        while True:
            call()
    except (fc.PeerDiedError, fc.AbortedError):
        pass

def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

def works(comm):
    "Whether sums, small, large and in shared memory, a split and messages come out right."
    n, all_of_it = comm.size, comm.size * (comm.size + 1) // 2
    right = [comm.allreduce(np.full(k, comm.rank + 1))[-1] == all_of_it for k in (3, 5000, 300_000)]
    shared = comm.empty(200_000)
    shared[...] = comm.rank + 1
    right.append(comm.allreduce(shared)[7] == all_of_it)
    half = comm.split(color=comm.rank % 2)
    right.append(half.allreduce(np.ones(2))[0] == half.size)
    half.close()
    got = np.zeros(1)
    comm.sendrecv(np.full(1, float(comm.rank)), (comm.rank + 1) % n, got, (comm.rank - 1) % n)
    return all(right) and got[0] == (comm.rank - 1) % n
"""


def _told(body: str, size: int, **variables: str) -> list[list[str]]:
    """What each rank of a job tells until its end."""
    with job(size, _START + body, **variables) as processes:
        return [rest(process, 60).splitlines() for process in processes]


# -- abort --------------------------------------------------------------------------------------------


def test_an_abort_from_another_thread_ends_the_calls_of_all_ranks():
    body = """
work = comm.allreduce(np.ones(9), async_op=True) if me else None
later = comm.allreduce(np.ones(9), async_op=True) if me else None
if me == 0:
    threading.Timer(0.3, comm.abort, ["enough"]).start()
    outcome(lambda: comm.recv(np.ones(3), 1))
else:
    outcome(work.wait)
    outcome(later.wait)
outcome(comm.barrier)
comm = fc.init()
tell(works(comm))
"""
    first, *others = _told(body, 3)
    name, culprit, seconds, text = outcome_of(first[0])
    assert (name, culprit) == ("AbortedError", 0) and seconds < SOON_S and "enough" in text, first
    for told in others:
        for one in told[:2]:
            name, culprit, seconds, text = outcome_of(one)
            assert name == "AbortedError" and seconds < SOON_S and "enough" in text, told
    for told in (first, *others):
        assert outcome_of(told[-2])[0] == "CommunicatorError"
        assert told[-1] == "True"


def test_an_abort_ends_splits_and_gives_everything_back():
    body = """
for i in range(3):
    half = comm.split(color=0)
    before = before if i else descriptors()
    comm.allreduce(np.ones(10)); half.allreduce([np.ones(5), np.ones(7)]); comm.empty(1 << 16)
    if me == 1:
        comm.abort()
        comm.abort()
        half.close()
    else:
        outcome(lambda: half.recv(np.ones(3), 1))
        outcome(comm.barrier)
    comm.close()
    comm = fc.init()
    half = comm.split(color=0)
tell(descriptors() - before)
"""
    told = _told(body, 3)
    for rank in (0, 2):
        name, culprit, seconds, text = outcome_of(told[rank][0])
        assert name == "AbortedError" and culprit == 1 and seconds < SOON_S, told[rank]
        assert "comm.abort() was called" in text
        assert outcome_of(told[rank][1])[0] in ("AbortedError", "CommunicatorError")
    assert [one[-1] for one in told] == ["0", "0", "0"]


def test_the_last_error_of_a_lost_communicator_does_not_end_the_call_that_joins_anew():
    body = """
left = comm.recv(np.ones(3), 1 - me, async_op=True)
if me:
    comm.abort("enough")
while not comm.closed:  # a call would tell of the error
    time.sleep(0.01)
comm = fc.init()
tell(comm.allreduce(np.ones(3))[0])
"""
    (logged, total), own = _told(body, 2)
    assert logged.startswith(
        "the communicator before ended with an error that no call had told of: rank 1 gave"
    )
    assert (total, own) == ("2.0", ["2.0"])


def test_an_abort_in_a_signal_handler_ends_the_call_that_it_came_in():
    body = """
if me == 0:
    signal.signal(signal.SIGALRM, lambda *_: comm.abort("a signal came"))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
outcome(lambda: comm.recv(np.ones(3), 1 - me) if me else comm.recv(np.ones(3), 1, async_op=True).wait())
comm = comm.shrink()
tell(works(comm), comm.lost)
"""
    for told in _told(body, 2):
        name, culprit, seconds, text = outcome_of(told[0])
        assert name == "AbortedError" and culprit == 0 and seconds < SOON_S, told
        assert "a signal came" in text
        assert told[1] == "True ()"


def test_an_abort_ends_the_calls_of_ranks_that_are_threads():
    def run() -> tuple[str, float]:
        comm, x = fc.init(), np.ones(5)
        calls = [
            lambda: comm.recv(x, 1),
            lambda: comm.allreduce(x),
            lambda: comm.allreduce(x, async_op=True).wait(),
        ]
        if comm.rank == 0:
            threading.Timer(0.2, comm.abort, ["enough"]).start()
        with pytest.raises(fc.AbortedError) as told:
            calls[comm.rank]()
        comm = comm.shrink()
        assert fc.init() is comm and comm.lost == ()
        return str(told.value), float(comm.allreduce(np.ones(3))[0])

    for text, total in fc.launch(run, ranks=3, threads=True):
        assert "enough" in text and total == 3


# -- shrink -------------------------------------------------------------------------------------------


def test_ranks_go_on_after_one_loss_after_another():
    body = """
everyone, still_open = comm, [1000]
half = comm.split(color=me < 4)
def gone(rank, call=lambda: comm.allreduce(np.ones(10)), die=die):
    global comm
    if me == rank:
        die()
    lose(call)
    comm = comm.shrink()
    still_open.append(descriptors())
    assert works(comm)
    tell(comm.rank, comm.size, comm.lost)
gone(5)
assert me > 3 or half.allreduce(np.ones(3))[0] == 4
# Rank 0 in the middle of large messages in the peers' memory, beside started work, and in fused messages.
from flagcx.transport.shared_memory.direct import Direct
if me == 0:
    Direct._work = lambda *_: die()
def started():
    work = comm.allreduce(np.ones(4_000_000, np.float32), async_op=True)
    later = comm.allreduce(np.ones(7), async_op=True)
    later.wait()
gone(-1, started)
def leave():
    comm.close()
    sys.exit()
gone(4, lambda: comm.allreduce(np.ones(9), compression="int8"), leave)
def fail():
    raise ValueError("no such file")
gone(2, lambda: comm.allreduce([np.ones(5), np.ones(7), np.ones(100_000)]), fail)
gone(3)
assert still_open == sorted(set(still_open), reverse=True), still_open
assert comm.size == 1 and fc.init() is comm
outcome(lambda: everyone.barrier())
outcome(lambda: everyone.shrink())
"""
    told = _told(body, 6)
    assert [one.split() for one in told[1][:5]] == [
        ["1", "5", "(5,)"],
        ["0", "4", "(0,)"],
        ["0", "3", "(3,)"],
        ["0", "2", "(1,)"],
        ["0", "1", "(1,)"],
    ], told
    assert told[3][-1].split()[:2] == ["1", "2"], told[3]
    assert "CommunicatorError" in told[1][5] and "CommunicatorError" in told[1][6], told[1]


def test_the_store_goes_on_in_another_rank_when_the_one_that_served_it_is_lost(tmp_path):
    body = """
def leave():
    comm.close()
    sys.exit()
for victim, end in ((0, leave), (1, die), (2, die)):
    if me == victim:
        end()
    lose(lambda: comm.allreduce(np.ones(10)))
    if me == 4:
        time.sleep(0.5)  # it lives, and comes later
    comm = comm.shrink()
    assert works(comm)
    tell(comm.rank, comm.size, comm.lost)
"""
    environs = [mpirun_environment(rank, 5, "moving", tmp_path) for rank in range(5)]
    with spawned(PRELUDE + _START + body, *environs) as processes:
        told = [rest(process, 60).splitlines() for process in processes]
    assert told[3] == ["2 4 (0,)", "1 3 (0,)", "0 2 (0,)"], told
    assert told[4] == ["3 4 (0,)", "2 3 (0,)", "1 2 (0,)"], told


def test_a_rank_that_does_not_come_to_shrink_is_named_and_may_come_later(tmp_path):
    body = f"""
others = [{str(tmp_path)!r} + f"/{{rank}}" for rank in (0, 1)]
if me == 2:
    lose(lambda: comm.allreduce(np.ones(10)))
    while not all(map(os.path.exists, others)):
        time.sleep(0.01)
else:
    patient, comm.config = comm.config, replace(comm.config, init_timeout_s=1.0)
    outcome(comm.shrink)
    comm.config = patient
    open(others[me], "w").close()
comm = comm.shrink()
tell(works(comm), comm.lost)
"""
    told = _told(body, 3)
    for rank in (0, 1):
        name, culprit, seconds, text = outcome_of(told[rank][0])
        assert (name, culprit) == ("PeerTimeoutError", 2), told
        assert 0.9 < seconds < 20, "the limit of 1 s has ended the wait, not the usual one of 120 s"
        assert "rank 2 did not come" in text
    assert [one[-1] for one in told] == ["True ()"] * 3, told


@pytest.mark.parametrize(
    "case", [(True, (2,)), *exhaustive([(True, (0, 3)), (False, (3,)), (False, (0,)), (False, (0, 1))])]
)
def test_ranks_that_are_stopped_are_left_out(case, tmp_path):
    """Also ranks that run the store, or would be the next to."""
    launched, late = case
    body = f"""
if me in {late}:
    os.kill(os.getpid(), signal.SIGSTOP)
outcome(lambda: [comm.barrier() for _ in range(9)])
outcome(lambda: comm.shrink(patience_s=0))
comm.config = replace(comm.config, timeout_s=60.0)
comm = comm.shrink(patience_s=1.5)
tell(works(comm), comm.lost)
"""
    settings = {"FLAGCX_TIMEOUT_S": "1"}
    if launched:
        told = _told(body, 4, **settings)
    else:
        environs = [mpirun_environment(rank, 4, f"j{os.getpid()}", tmp_path, **settings) for rank in range(4)]
        with spawned(PRELUDE + _START + body, *environs) as processes:
            told = [rest(process, 60).splitlines() for process in processes]
    for rank, lines in enumerate(told):
        if rank in late:
            assert lines == []
        else:
            assert "patience_s must be a number of seconds above 0, or None" in lines[1], told
            assert lines[-1] == f"True {late}", told


def test_a_rank_that_is_a_thread_cannot_be_left_out():
    refused: list[str] = []
    over = threading.Barrier(2)

    def run() -> None:
        comm = fc.init()
        if comm.rank:
            with pytest.raises(fc.CommunicatorError, match=r"rank 0 did not come .* it is a thread"):
                comm.shrink(patience_s=0.1)
            refused.append("rank 0")
        over.wait(30)

    fc.launch(run, ranks=2, threads=True)
    assert refused == ["rank 0"]


def test_ranks_that_are_threads_go_on_without_one_that_raised():
    totals: dict[int, float] = {}

    def run() -> None:
        comm = fc.init()
        if (rank := comm.rank) == 1:
            raise ValueError("no such file")
        with contextlib.suppress(fc.PeerDiedError, fc.AbortedError):
            comm.allreduce(np.ones(5))
        comm = comm.shrink()
        assert comm.lost == (1,)
        totals[rank] = float(comm.allreduce(np.full(3, rank + 1.0))[0])

    with pytest.raises(fc.LaunchError, match="rank 1 raised ValueError: no such file"):
        fc.launch(run, ranks=3, threads=True)
    assert totals == {0: 4.0, 2: 4.0}


def test_a_loss_of_a_split_leaves_the_rest_of_the_job_alone():
    body = """
half = comm.split(color=me % 2)
if me == 3:
    die()
if me % 2:
    lose(lambda: half.allreduce(np.ones(10)))
    half = half.shrink()
    tell(half.size, half.lost, works(half))
else:
    tell(half.size, half.lost, works(half))
comm = comm.shrink()
tell(comm.size, comm.lost, works(comm), works(half), comm.split(color=0).size)
"""
    told = _told(body, 6)
    for rank in (0, 2, 4):
        assert told[rank] == ["3 () True", "5 (3,) True True 5"], told
    for rank in (1, 5):
        assert told[rank] == ["2 (1,) True", "5 (3,) True True 5"], told


def test_compression_keeps_its_state_over_a_loss():
    body = """
feedback = fc.compression.Feedback("topk")
gradient = np.random.default_rng(me).normal(size=50_000).astype(np.float32)
with comm.group():
    comm.allreduce(gradient.copy()); comm.allreduce(np.ones(7))
comm.allreduce(gradient.copy(), "avg", compression=feedback["layer"])
if me == 1:
    die()
lose(lambda: comm.allreduce(gradient.copy(), "avg", compression=feedback["layer"]))
comm = comm.shrink()
got = comm.allreduce(gradient.copy(), "avg", compression=feedback["layer"])
plain = comm.allreduce(gradient.copy(), "avg", compression="int8")
tell(len(set(comm.allgather_object(got.tobytes()))), len(set(comm.allgather_object(plain.tobytes()))))
with fc.GradientSynchronizer(comm, [gradient]) as sync:
    sync.ready(0)
    sync.wait()
tell(bool(np.isfinite(gradient).all()))
"""
    told = _told(body, 3)
    assert told[0] == told[2] == ["1 1", "True"], told


def test_an_abort_that_a_call_has_told_of_is_not_told_again_at_the_end():
    body = """
signal.signal(signal.SIGALRM, lambda *_: comm.abort("a signal came"))
signal.setitimer(signal.ITIMER_REAL, 0.3 if me == 0 else 0)
outcome(lambda: comm.allreduce(np.ones(3)) if me == 0 else comm.recv(np.ones(3), 0))
"""
    with job(2, _START + body) as processes:
        told = [rest(process, 60).splitlines() for process in processes]
        codes = [process.returncode for process in processes]
    assert codes == [0, 0] and [len(one) for one in told] == [1, 1], (codes, told)
    assert all(outcome_of(one[0])[0] == "AbortedError" for one in told), told
