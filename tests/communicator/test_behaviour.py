"""Beyond one collective: groups, work that was started, transfers, objects, splits, own operations."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks


def _groups():
    comm = fc.init()
    arrays = [np.full(n, comm.rank + n, np.float32) for n in (1, 3, 0, 1000)]
    whole, biggest = np.arange(4) + comm.rank, np.full(2, comm.rank)
    with comm.group():
        for array in arrays:
            assert comm.allreduce(array) is array
        comm.allreduce(whole)
        comm.allreduce(biggest, "max")
        gathered = comm.allgather(np.array([comm.rank]))
        assert arrays[0][0] == comm.rank + 1, "a group runs at its end"
    total = comm.size * (comm.size - 1) // 2
    for n, array in zip((1, 3, 0, 1000), arrays, strict=True):
        assert (array == total + n * comm.size).all()
    assert (whole == np.arange(4) * comm.size + total).all()
    assert (biggest == comm.size - 1).all()
    assert gathered.reshape(-1).tolist() == list(range(comm.size))

    kept = np.ones(3)
    with pytest.raises(ZeroDivisionError), comm.group():
        comm.allreduce(kept)
        _ = 1 // 0
    assert (kept == 1).all(), "a group that raises makes no call"
    with pytest.raises(fc.ArgumentError, match="cannot be nested"), comm.group(), comm.group():
        pass
    with pytest.raises(fc.ArgumentError, match="no meaning inside"), comm.group():
        comm.allreduce(kept, async_op=True)
    return float(comm.allreduce(np.ones(1))[0])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_groups(size):
    assert run_ranks(_groups, size) == [size] * size


def _transfers(count: int):
    comm = fc.init()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, theirs = np.arange(count) + comm.rank, np.zeros(count, np.int64)
    assert comm.sendrecv(mine, right, theirs, left) is theirs
    assert (theirs == np.arange(count) + left).all()
    theirs[...] = 0
    with comm.group():  # each sends before it receives; only together can that end
        comm.send(mine, right)
        comm.recv(theirs, left)
    assert (theirs == np.arange(count) + left).all()
    work = comm.send(mine, right, async_op=True) if comm.rank == 0 else None
    if comm.rank == right or comm.size == 1:
        pass
    if comm.rank == 1:
        theirs[...] = 0
        comm.recv(theirs, 0)
        assert (theirs == np.arange(count)).all()
    if work is not None:
        work.wait()
    numbers = []
    for i in range(20):  # several in flight, in order
        if comm.rank == 0:
            comm.send(np.array([i]), 1)
        elif comm.rank == 1:
            numbers.append(int(comm.recv(np.zeros(1, np.int64), 0)[0]))
    assert numbers in ([], list(range(20)))
    comm.barrier()
    return True


@pytest.mark.parametrize("count", [0, 1, 1000, 100_000, 3_000_000])
@pytest.mark.parametrize("size", [2, 3])
def test_transfers(size, count):
    assert all(run_ranks(_transfers, size, count))


def _started():
    comm = fc.init()
    arrays = [np.full(50_000, float(i)) for i in range(8)]
    works = [comm.allreduce(a, async_op=True) for a in arrays]
    after = comm.allreduce(np.ones(3))  # behind all of them
    assert all(work.done() for work in works)
    for i, (work, array) in enumerate(zip(works, arrays, strict=True)):
        assert work.wait() is array
        assert (array == i * comm.size).all()
    assert "done" in repr(works[0])
    assert after[0] == comm.size
    gathered = comm.allgather(np.array([comm.rank]), async_op=True).wait(timeout_s=10)
    return gathered.reshape(-1).tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_started_work(size):
    assert run_ranks(_started, size) == [list(range(size))] * size


def _barriers():
    comm = fc.init()
    for _ in range(3):  # from the second on a barrier goes straight to its plan
        comm.barrier()
    array = np.ones(3)
    with comm.group():
        comm.allreduce(array)
        comm.barrier()
    assert (array == comm.size).all()
    work = comm.allreduce(np.ones(50_000), async_op=True)
    comm.barrier()
    assert work.done(), "a barrier comes after what was started before it"
    assert (work.wait() == comm.size).all()
    child = comm.split(0)
    for _ in range(3):
        child.barrier()
    with pytest.raises(fc.CommunicationError, match=r"barrier.*allreduce|allreduce.*barrier"):
        child.barrier() if comm.rank else child.allreduce(array)
    with pytest.raises(fc.CommunicatorError, match="cannot be used after"):
        child.barrier()
    comm.barrier()
    comm.close()
    with pytest.raises(fc.CommunicatorError, match="this communicator is closed"):
        comm.barrier()
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_barriers_that_come_again(size):
    assert all(run_ranks(_barriers, size))


def _objects():
    comm = fc.init()
    value = {"rank": comm.rank, "text": "x" * 10_000 * comm.rank}
    assert comm.broadcast_object(value, root=comm.size - 1)["rank"] == comm.size - 1
    assert [v["rank"] for v in comm.allgather_object(value)] == list(range(comm.size))
    gathered = comm.gather_object(comm.rank**2, root=0)
    assert gathered == ([q**2 for q in range(comm.size)] if comm.rank == 0 else None)
    parts = [f"for {q}" for q in range(comm.size)] if comm.rank == 0 else None
    assert comm.scatter_object(parts) == f"for {comm.rank}"
    with pytest.raises(fc.ArgumentError, match="one value a rank"):
        comm.scatter_object([1] if comm.rank == 0 else None)
    comm.barrier()
    return True


def test_objects():
    assert all(run_ranks(_objects, 3))


def _splits():
    comm = fc.init()
    half = comm.split(comm.rank % 2, key=-comm.rank)
    ranks = [q for q in range(comm.size) if q % 2 == comm.rank % 2][::-1]
    assert half.size == len(ranks)
    assert ranks[half.rank] == comm.rank
    assert half.allreduce(np.array([comm.rank]))[0] == sum(ranks)
    quarter = half.split(0 if half.rank == 0 else None)
    assert (quarter is None) == (half.rank != 0)
    both = comm.allreduce(np.array([1.0]))[0], half.allreduce(np.array([1.0]))[0]
    half.close()
    comm.barrier()
    return both


def test_splits():
    assert run_ranks(_splits, 5) == [(5.0, 3.0), (5.0, 2.0)] * 2 + [(5.0, 3.0)]


def _operations():
    comm = fc.init()
    x = np.array([0.0, 1.0]) + comm.rank
    assert np.allclose(comm.allreduce(x.copy(), np.logaddexp), _folded(np.logaddexp, comm.size))
    assert np.allclose(comm.allreduce(x.copy(), np.hypot), _folded(np.hypot, comm.size))
    scaled = comm.allreduce(x.copy(), fc.scaled_sum(0.5))
    assert (scaled == _folded(np.add, comm.size) * 0.5).all()
    kept = x.copy()
    out = comm.allreduce(kept, fc.scaled_sum(0.5), out=np.zeros(2))
    assert (out == scaled).all()
    assert (kept == x).all()
    scattered = comm.reduce_scatter(np.arange(2.0 * comm.size), fc.scaled_sum(2.0))
    assert (scattered == np.arange(2.0 * comm.size)[2 * comm.rank : 2 * comm.rank + 2] * 2 * comm.size).all()
    block = np.arange(2.0 * comm.size)
    own = block[2 * comm.rank : 2 * comm.rank + 2]
    assert (comm.reduce_scatter(block, fc.scaled_sum(2.0), out=own) == scattered).all()
    root = comm.reduce(x.copy(), fc.scaled_sum(0.5), root=comm.size - 1)
    assert root is None or (root == scaled).all()
    signed = np.array([-3, 5], np.int32)
    assert comm.allreduce(signed if comm.rank == 0 else np.zeros(2, np.int32), "avg").tolist() == [
        int(-3 / comm.size),
        5 // comm.size,
    ]
    return True


def _folded(ufunc, size):
    total = np.array([0.0, 1.0])
    for q in range(1, size):
        total = ufunc(total, np.array([0.0, 1.0]) + q)
    return total


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations(size):
    assert all(run_ranks(_operations, size))


def _half(dtype):
    """How far sums of half precision lie from those of float64, in units in the last place."""
    comm = fc.init()
    worst = 0.0
    for count in (500, 300_000):
        parts = [np.random.default_rng(q).random(count).astype(dtype) for q in range(comm.size)]
        exact = np.sum([p.astype(np.float64) for p in parts], axis=0)
        got = comm.allreduce(parts[comm.rank].copy())
        worst = max(
            worst, float(np.max(np.abs(got.astype(np.float64) - exact) / np.spacing(got).astype(float)))
        )
    return worst


def test_half_precision_is_rounded_once():
    for worst in run_ranks(_half, 6, np.float16):
        assert 0.4 < worst <= 0.501


def _own_algorithm():
    from flagcx.algorithms import build
    from flagcx.schedule.compose import then

    def gather_and_spread(size):
        return then(build("reduce", "binomial", size, root=0), build("broadcast", "binomial", size, root=0))

    fc.register("up_and_down", "allreduce", gather_and_spread)
    comm = fc.init()
    x = comm.allreduce(np.arange(1000.0), algorithm="up_and_down")
    fc.unregister("up_and_down", "allreduce")
    return bool((x == np.arange(1000.0) * comm.size).all())


def test_an_algorithm_of_the_users_own():
    assert all(run_ranks(_own_algorithm, 3))


def test_a_wrong_algorithm_is_refused():
    from flagcx.algorithms import build

    def wrong(size):
        return build("reduce", "binomial", size, root=0)

    with pytest.raises(fc.FlagcxError, match="reduce"):
        fc.register("wrong", "allreduce", wrong)


def _large():
    comm = fc.init()
    count = (1 << 31) + 5
    x = comm.empty(count, np.int8)
    x[...] = 1
    x[-1] = comm.rank
    comm.allreduce(x)
    return int(x[0]), int(x[count // 2]), int(x[-1])


@pytest.mark.exhaustive
def test_more_than_2_to_the_31_elements():
    assert run_ranks(_large, 2) == [(2, 2, 1)] * 2


def _in_a_group_too_early() -> list[str]:
    """Calls whose answer is needed before the group ends."""
    comm = fc.init()
    calls = (
        lambda: comm.broadcast_object({"rank": comm.rank}),
        lambda: comm.allgather_object(comm.rank),
        lambda: comm.gather_object(comm.rank),
        lambda: comm.scatter_object([1, 2]),
        lambda: comm.allgatherv(np.ones(1 + comm.rank)),
        lambda: comm.gatherv(np.ones(1 + comm.rank)),
        lambda: comm.alltoallv(np.ones(2), [1, 1]),
    )
    told = []
    for call in calls:
        with pytest.raises(fc.ArgumentError, match=r"inside comm.group\(\)") as caught, comm.group():
            call()
        told.append(str(caught.value))
    assert comm.allgather_object(comm.rank) == [0, 1], "nothing was sent, and the communicator goes on"
    return told


def test_a_group_refuses_what_must_be_answered_at_once():
    told = run_ranks(_in_a_group_too_early, 2)[0]
    assert all("cannot" in text or "needs counts=" in text or "receive_counts=" in text for text in told)


def _repeats() -> None:
    """Calls that come again, with other arrays of the kind and other results."""
    comm = fc.init()
    size, rank, n = comm.size, comm.rank, 6
    for turn in range(4):
        x = np.arange(n, dtype=np.float32) + 10 * rank + turn
        ranks = [np.arange(n, dtype=np.float32) + 10 * q + turn for q in range(size)]
        total = np.sum(ranks, axis=0)
        blocks = np.stack([x + 100 * q for q in range(size)])
        mine = np.stack([ranks[q] + 100 * rank for q in range(size)])
        out = np.full(n, -1, np.float32)
        assert comm.allreduce(x, out=out) is out and (out == total).all()
        assert (comm.allreduce(x.copy(), algorithm="ring") == total).all()
        assert (comm.allreduce(x.copy(), algorithm=fc.Algorithm.RING) == total).all()
        gathered = comm.allgather(x)
        assert gathered.shape == (size, n) and (gathered == ranks).all()
        whole = np.empty((size, n), np.float32)
        assert comm.allgather(x, out=whole) is whole and (whole == ranks).all()
        whole[...], whole[rank] = -1, x
        assert comm.allgather(whole[rank], out=whole) is whole and (whole == ranks).all(), "in place"
        assert (comm.reduce_scatter(blocks) == mine.sum(axis=0)).all()
        assert comm.reduce_scatter(blocks, out=out) is out and (out == mine.sum(axis=0)).all()
        assert (comm.alltoall(blocks) == mine).all()
        for root in range(size):
            sent = x.copy()
            assert comm.broadcast(sent, root) is sent and (sent == ranks[root]).all()
            reduced = comm.reduce(x.copy(), root=root)
            assert (reduced == total).all() if rank == root else reduced is None
            reduced = comm.reduce(x, "max", root, out=out if rank == root else None)
            assert (reduced == ranks[-1]).all() if rank == root else reduced is None
            assert (x == ranks[rank]).all(), "left as it is"
            gathered = comm.gather(x, root)
            assert (gathered == ranks).all() if rank == root else gathered is None
            part = comm.scatter(blocks if rank == root else None, root, out=out)
            assert part is out and (out == ranks[root] + 100 * rank).all()
        fixed = x.copy()
        fixed.flags.writeable = False
        assert (comm.allgather(fixed) == ranks).all(), "what is only read may be read-only"
        with pytest.raises(fc.ArrayError, match="read-only"):
            comm.allreduce(fixed)
        with pytest.raises(fc.ArrayError, match="expected"):
            comm.allgather(x, out=np.empty(n * size + 1, np.float32))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_that_come_again(size):
    run_ranks(_repeats, size)


def _short_ways() -> dict[str, int]:
    """How many functions of the communicator and executor a repeated call runs."""
    rooms = re.compile("flagcx/(communicator|executor|selection)/")
    comm = fc.init()
    x, y, blocks = np.ones(8), np.ones(8), np.ones((comm.size, 8))
    calls = {
        "allreduce": lambda: comm.allreduce(x),
        "allreduce out": lambda: comm.allreduce(x, out=y),
        "allreduce ring": lambda: comm.allreduce(x, algorithm=fc.Algorithm.RING),
        "allgather": lambda: comm.allgather(x),
        "allgather out": lambda: comm.allgather(x, out=blocks),
        "reduce_scatter": lambda: comm.reduce_scatter(blocks),
        "alltoall": lambda: comm.alltoall(blocks),
        "broadcast": lambda: comm.broadcast(x),
        "reduce": lambda: comm.reduce(x),
        "gather": lambda: comm.gather(x),
        "scatter": lambda: comm.scatter(blocks if comm.rank == 0 else None, out=y),
    }
    found = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        above: list[str] = []

        def note(frame, event, _, above=above):
            if event == "call" and rooms.search(frame.f_code.co_filename):
                above.append(frame.f_code.co_name)

        sys.setprofile(note)
        call()
        sys.setprofile(None)
        found[name] = len(above)
    return found


def test_a_repeated_call_goes_straight_to_its_plan():
    assert max(run_ranks(_short_ways, 2)[0].values()) <= 3  # the call, the look-up, and that out= lies apart
