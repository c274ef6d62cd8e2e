"""Schedules step by step over messages between hosts: the bits are those of the simulator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import MismatchError
from flagcx.transport.base import Call
from flagcx.transport.network.message import SHORT_NBYTES
from flagcx.transport.network.steps import NetworkSteps
from flagcx.transport.network.wire import Wire
from tests.simulated import run
from tests.transport.thread_hosts import thread_hosts

ALGORITHMS = ("recursive_doubling", "ring", "one_shot", "halving_doubling", "tree")
COUNTS = (0, 1, 7, 193, SHORT_NBYTES // 4 + 1)


def single_hosts(size):
    return thread_hosts(tuple((rank,) for rank in range(size)))


def reduced_by(hosts, rank, algorithm, x, count, words="sum"):
    """An all-reduce in place of one rank of these hosts."""
    kind = dtype_of(x.dtype)
    call = Call(build("allreduce", algorithm, len(hosts)), rank, count, kind, resolve_op("sum", kind), True)
    host = hosts[rank]
    NetworkSteps(host.wire, host.watch, call, host.scratch, words).run(x, x)
    return x


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int8"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_steps_give_the_bits_of_the_schedule(size, dtype):
    hosts = single_hosts(size)
    random = np.random.default_rng(size)
    op = resolve_op("sum", dtype_of(np.dtype(dtype)))

    def every_call(rank):
        return [
            reduced_by(hosts, rank, algorithm, inputs[rank].copy(), inputs[rank].size)
            for algorithm, inputs in given
        ]

    given = [
        (algorithm, [(random.standard_normal(count) * 50).astype(dtype) for _ in range(size)])
        for algorithm in ALGORITHMS
        for count in COUNTS
    ]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(every_call, range(size)))
    for number, (algorithm, inputs) in enumerate(given):
        schedule = build("allreduce", algorithm, size)
        wanted = run(schedule, inputs, inputs[0].size, op, in_place=True)
        for rank in range(size):
            assert found[rank][number].tobytes() == wanted[rank].tobytes(), (algorithm, inputs[0].size)
    assert not any(host.wire.flights for host in hosts)


@pytest.mark.parametrize(("count", "swaps"), [(7, 1), (SHORT_NBYTES // 4 + 1, 0)])
def test_short_messages_to_and_fro_are_swapped(count, swaps, monkeypatch):
    swapped = []
    swap = Wire.swap
    monkeypatch.setattr(Wire, "swap", lambda wire, *args: (swapped.append(wire.rank), swap(wire, *args)))
    hosts = single_hosts(2)
    with ThreadPoolExecutor(2) as pool:
        x = [np.full(count, rank + 1, np.float32) for rank in range(2)]
        list(pool.map(lambda rank: reduced_by(hosts, rank, "recursive_doubling", x[rank], count), range(2)))
    assert sorted(swapped) == [0, 1] * swaps
    assert (x[0] == 3).all() and (x[1] == 3).all()


def test_a_message_of_another_call_meets_no_array():
    hosts = single_hosts(2)

    def call(rank):
        x = np.full(7, rank + 1, np.float32)
        with pytest.raises(
            MismatchError, match=f"rank {1 - rank} sent 28 bytes of {['sum', 'max'][1 - rank]}"
        ):
            reduced_by(hosts, rank, "recursive_doubling", x, 7, ("sum", "max")[rank])
        return x

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(call, range(2)))
    assert all((found[rank] == rank + 1).all() for rank in range(2))
