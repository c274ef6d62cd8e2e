"""A job that calls with ever new counts keeps little for each, and what it keeps is bounded."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms import entries
from flagcx.executor import plan_cache
from tests.ranks import run_ranks

RANKS = 3
COUNTS = 6
BASE = 90_000
MOST_NBYTES = 48 << 10
"""What a count may leave behind, far below the bytes of its message."""
MAPPED, EVERY = "mapped", ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall")


def calls_of(comm: fc.Communicator) -> dict[str, Callable[[int], Any]]:
    """Calls by name, each of a count that the caller chooses."""
    x = np.zeros(RANKS * 2 * BASE, np.float32)
    out, halves = np.zeros_like(x), np.zeros(2 * BASE, np.float16)
    mapped = comm.empty(2 * BASE, np.float32)
    mapped[...] = 0

    def whole(name: str, algorithm: str, n: int) -> None:
        getattr(comm, name)(x[: RANKS * n], algorithm=algorithm)

    def uneven(n: int) -> None:
        counts = [n + q for q in range(RANKS)]
        comm.allgatherv(x[: n + comm.rank], counts, out=out[: sum(counts)])

    def neighbours(n: int) -> None:
        comm.sendrecv(x[:n], (comm.rank + 1) % RANKS, out[:n], (comm.rank - 1) % RANKS)

    def group(n: int) -> None:
        with comm.group():
            comm.allreduce(x[: n % 977])
            comm.allreduce(out[:n])

    found = {
        f"{name} {entry.algorithm}": partial(whole, name, str(entry.algorithm))
        for name in EVERY
        for entry in entries(name)
        if str(entry.algorithm) not in ("native", "hierarchical")
    }
    return found | {
        "small": lambda n: comm.allreduce(halves[: n % 9973]),
        "mean of halves": lambda n: comm.allreduce(halves[:n], "avg"),
        "mean of halves, ring": lambda n: comm.allreduce(halves[:n], "avg", algorithm="ring"),
        "scaled": lambda n: comm.allreduce(x[:n], fc.scaled_sum(0.5), algorithm="tree"),
        MAPPED: lambda n: comm.allreduce(mapped[:n]),
        "strided": lambda n: comm.allreduce(x[: 2 * n : 2]),
        "started": lambda n: comm.allreduce(x[:n], async_op=True).wait(),
        "uneven": uneven,
        "object": lambda n: comm.broadcast_object(bytes(n)),
        "neighbours": neighbours,
        "list": lambda n: comm.allreduce([x[: n % 977], out[: n % 7], out[:n]]),
        "group": group,
        "int8": lambda n: comm.allreduce(x[:n], compression="int8"),
        "topk": lambda n: comm.allreduce(x[:n], compression="topk"),
    }


def left_by_each() -> dict[str, tuple[float, float]]:
    """For each call the bytes that a new count leaves, as counted and as the executor takes them to be."""
    comm = fc.init(live_tuning=False)
    found = {}
    for name, call in calls_of(comm).items():
        call(BASE + COUNTS)  # grows what is shared
        gc.collect()
        tracemalloc.start()
        taken = comm._host._cache.nbytes
        for n in range(BASE, BASE + COUNTS):
            call(n)
        gc.collect()
        found[name] = tracemalloc.get_traced_memory()[0] / COUNTS, (comm._host._cache.nbytes - taken) / COUNTS
        tracemalloc.stop()
    return found


def test_a_new_count_leaves_little_whatever_the_call():
    for left in run_ranks(left_by_each, RANKS):
        assert len(left) > 30
        for name, (counted, taken) in left.items():
            assert counted < MOST_NBYTES, f"{name}: {counted:,.0f} bytes a count"
            assert counted < max(2 * taken, 8192), f"{name}: {counted:,.0f} bytes, taken to be {taken:,.0f}"


def keep_little(calls: int) -> tuple[int, int, float]:
    """Calls with ever new counts where little is kept; a call that comes again stays right."""
    comm, wrong = fc.init(), 0
    for n in range(1, calls + 1):
        x = np.arange(n, dtype=np.float64) * (comm.rank + 1)
        wrong += not np.array_equal(comm.allreduce(x), np.arange(n) * sum(range(1, comm.size + 1)))
        wrong += comm.allreduce(np.ones(7, np.int64)).sum() != 7 * comm.size
    cache = comm._host._cache
    return wrong, max(len(cache.plans), len(cache.straight)), cache.nbytes


@pytest.mark.parametrize("most", ["_MOST_PLANS", "_MOST_NBYTES"])
def test_plans_are_bounded_by_number_and_by_bytes(most):
    def bounded(limit: int) -> tuple[int, int, float]:
        before = getattr(plan_cache, most)
        setattr(plan_cache, most, limit)
        try:
            return keep_little(100)
        finally:
            setattr(plan_cache, most, before)

    limit = 20 if most == "_MOST_PLANS" else 20 * plan_cache._PLAN_NBYTES
    for wrong, plans, nbytes in run_ranks(bounded, 2, limit):
        assert not wrong
        assert 2 < plans <= 20
        assert nbytes <= 21 * (plan_cache._PLAN_NBYTES + 4 * plan_cache._TRANSFER_NBYTES)


def prepare_often(most: int) -> tuple[int, list[int]]:
    """Reduces arrays that peers map, in turns, where few preparations are kept."""
    comm, wrong = fc.init(), 0
    arrays = [comm.empty(100_000 + k, np.float32) for k in range(3)]
    comm._host.transport._arena.prepared._most = most
    for turn in range(12):
        x = arrays[turn % 3]
        x[...] = comm.rank + turn
        comm.allreduce(x)
        wrong += not (x == sum(q + turn for q in range(comm.size))).all()
    latest = comm._host.transport._arena.prepared._latest
    return wrong, [len(one.pieces) for one, _ in latest]


@pytest.mark.parametrize("most", [0, 2, 100])
def test_what_is_prepared_for_arrays_is_bounded_and_made_anew(most):
    for wrong, pieces in run_ranks(prepare_often, 2, most):
        assert not wrong
        assert sum(pieces) <= max(most, pieces[-1])
        assert len(pieces) == {0: 1, 2: 2, 100: 3}[most]


def drop_splits(splits: int) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Makes splits and drops them without a close; what is held before and after, and what a peer sees."""
    comm = fc.init(timeout_s=20)

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def use(split: fc.Communicator) -> None:
        assert split.allreduce(np.ones(40_000))[0] == comm.size
        split.empty(10)[...] = 1

    use(comm.split(0))
    before = held()
    for _ in range(splits):
        use(comm.split(0))
    after = held()
    last, seen = comm.split(0), ""
    comm.barrier()
    if comm.rank:
        del last
        gc.collect()
    else:
        try:
            last.barrier()
        except fc.PeerDiedError as error:
            seen = str(error)
    return before, after, seen


def test_a_split_that_is_dropped_gives_everything_back_and_its_peers_learn_of_it():
    found = run_ranks(drop_splits, 2, 20)
    assert [after for _, after, _ in found] == [before for before, _, _ in found]
    assert "rank 1 has ended or closed its communicator" in found[0][2]
