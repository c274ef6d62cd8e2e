"""Calls on GPU arrays like earlier ones go straight to their plan, with fakes of arrays and transport."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flagcx.communicator import Communicator
from flagcx.executor.device import DeviceExecutor
from tests.executor.test_device import FakeTransport

FLOAT = np.dtype(np.float32)


class Array:
    """As much of a CuPy array as calls look at."""

    __cuda_array_interface__: Any = None
    _c_contiguous, ndim = True, 1

    def __init__(self, count: int, at: int, plain: bool = True, dtype: np.dtype = FLOAT) -> None:
        self.shape, self.size, self.dtype, self._c_contiguous = (count,), count, dtype, plain
        self.nbytes, self.data, self.strides = 4 * count, SimpleNamespace(ptr=at), (4,)


class Transport(FakeTransport):
    """Takes arrays as they are, and carries its own messages."""

    array_class = Array  # type: ignore[assignment]
    peers = None

    def __init__(self) -> None:
        super().__init__()
        self.messages, self.described_so_far = self, 0

    def take(self, array: Any, what: str, writable: bool) -> Any:
        return array

    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return Array(int(np.prod(shape)), 1 << 30) if out is None else out

    def transfer(self, sends: list, receives: list) -> None:
        self.runs.append((sends, receives))

    def described(self, sends: list, receives: list) -> tuple[list, list]:
        self.described_so_far += 1
        return sends, receives

    def carry(self, transfer: tuple[list, list]) -> None:
        self.transfer(*transfer)

    def is_capturing(self) -> bool:
        return False


@pytest.fixture
def comm(monkeypatch) -> Any:
    """Rank 1 of 4, whose executor counts how often a plan was looked for."""
    made: Any = object.__new__(Communicator)
    made.rank, made.size, made._group = 1, 4, None
    made._host, made._device = SimpleNamespace(quick={}), DeviceExecutor(Transport())
    found, find = [], made._device.find

    def counted(*what: Any, **options: Any) -> Any:
        found.append(what[0])
        return find(*what, **options)

    made._device.find = counted
    made.found = found
    return made


COUNTS = [3, 5, 0, 2]
CALLS = {
    "allreduce": lambda comm, x, out: comm.allreduce(x),
    "allreduce out of place": lambda comm, x, out: comm.allreduce(x, out=out(40)),
    "broadcast": lambda comm, x, out: comm.broadcast(x, root=2),
    "reduce": lambda comm, x, out: comm.reduce(x, "max", root=1, out=out(40)),
    "reduce elsewhere": lambda comm, x, out: comm.reduce(x),
    "allgather": lambda comm, x, out: comm.allgather(x, out=out(160)),
    "allgather to a new array": lambda comm, x, out: comm.allgather(x),
    "reduce_scatter": lambda comm, x, out: comm.reduce_scatter(x, out=out(10)),
    "gather": lambda comm, x, out: comm.gather(x, root=1, out=out(160)),
    "scatter": lambda comm, x, out: comm.scatter(None, root=0, out=out(10)),
    "alltoall": lambda comm, x, out: comm.alltoall(x, out=out(40)),
    "allgatherv": lambda comm, x, out: comm.allgatherv(Array(5, 64), COUNTS, out=out(10)),
    "reduce_scatterv": lambda comm, x, out: comm.reduce_scatterv(Array(10, 64), COUNTS, out=out(5)),
    "gatherv": lambda comm, x, out: comm.gatherv(Array(5, 64), COUNTS, root=1, out=out(10)),
    "scatterv": lambda comm, x, out: comm.scatterv(None, COUNTS, out=out(5)),
    "alltoallv": lambda comm, x, out: comm.alltoallv(Array(10, 64), COUNTS, [1, 5, 2, 2], out=out(10)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_looks_for_no_plan_and_runs_the_same(comm, name):
    runs = comm._device.transport.runs
    for _ in range(3):
        CALLS[name](comm, Array(40, 4096), lambda count: Array(count, 1 << 20))
    assert len(comm.found) == 1
    (first, *others) = [(run[0], *(a and (a.size, a.data.ptr) for a in run[1:])) for run in runs]
    assert others == [first] * 2


def test_what_is_not_plain_or_overlaps_takes_the_checked_way(comm):
    for _ in range(2):
        comm.allreduce(Array(40, 4096), out=Array(40, 1 << 20))
    assert len(comm.found) == 1
    comm.allreduce(Array(40, 4096), out=Array(40, 4096 + 80))
    comm.allreduce(Array(40, 4096), out=Array(40, 4096 - 80))
    assert len(comm.found) == 3, "these overlap"
    comm.allreduce(Array(41, 4096), out=Array(41, 1 << 20))
    comm.allgatherv(Array(5, 64), COUNTS, out=Array(10, 1 << 20))
    comm.allgatherv(Array(5, 64), [2, 5, 1, 2], out=Array(10, 1 << 20))
    assert len(comm.found) == 6, "these are other calls"


def test_messages_like_earlier_ones_go_straight_to_the_transport(comm):
    x, out = Array(40, 4096), Array(30, 1 << 20)
    for _ in range(3):
        assert comm.sendrecv(x, 2, out, 3) is out
        comm.send(x, 2)
        assert comm.recv(out, 3) is out
    both, sent, taken = ([(x, 2)], [(out, 3)]), ([(x, 2)], []), ([], [(out, 3)])
    assert comm._device.transport.runs == [both, sent, taken] * 3
    assert comm._device.transport.described_so_far == 3, "those of the second round, for the third too"
    elsewhere = Array(40, 8192)
    comm.send(elsewhere, 2)
    assert comm._device.transport.runs[-1] == ([(elsewhere, 2)], [])
    keys = [key for key in comm._device.quick if key[0] == "sendrecv"]
    assert len(keys) == 3
