"""The calls of a job of the fault suite whose arrays are on a GPU; each result is compared with NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import flagcx as fc


def make(comm: fc.Communicator, seed: int, number: int) -> None:
    """Makes one call, waits for it, and raises AssertionError if its result is wrong.

    Args:
        comm: The communicator.
        seed: Of the job.
        number: Of the call in the job.
    """
    chance = random.Random(f"{seed} {number}")
    chance.choice(_CALLS)(comm, chance, number)


def _filled(count: int, value: int) -> Any:
    import cupy

    return cupy.full(count, value, cupy.float32)


def _compare(comm: fc.Communicator, got: Any, want: Any) -> None:
    """Compares what a call gave; where a rank is lost that may be anything, and the next call says so."""
    if not (got.get() == want).all():
        comm.allreduce(_filled(1, 0)).get()
        raise AssertionError(f"got {got.get()[:5]}, expected {np.asarray(want).reshape(-1)[:5]}")


def _allreduce(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    count = chance.choice((1, 1000, 100_000, 3_000_000))
    algorithm = chance.choice((None, None, None, "native", "ring", "tree"))
    x = _filled(count, comm.rank + number)
    if chance.random() < 0.3:
        comm.allreduce(x, algorithm=algorithm, async_op=True).wait()
    else:
        comm.allreduce(x, algorithm=algorithm)
    _compare(comm, x, sum(rank + number for rank in range(comm.size)))


def _several(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    arrays = [_filled(chance.choice((10, 5000)), comm.rank + i) for i in range(5)]
    with comm.group():
        for array in arrays:
            comm.allreduce(array)
    for i, array in enumerate(arrays):
        _compare(comm, array, sum(rank + i for rank in range(comm.size)))


def _broadcast(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    root = chance.randrange(comm.size)
    x = _filled(chance.choice((7, 200_000)), comm.rank + number)
    _compare(comm, comm.broadcast(x, root), root + number)


def _allgather(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    count = chance.choice((3, 60_000))
    got = comm.allgather(_filled(count, comm.rank + number)).reshape(comm.size, count)
    _compare(comm, got, np.arange(comm.size)[:, None] + number)


def _reduce_scatter(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    x = _filled(comm.size * chance.choice((3, 60_000)), comm.rank + number)
    _compare(comm, comm.reduce_scatter(x), sum(rank + number for rank in range(comm.size)))


def _alltoall(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    count = chance.choice((3, 60_000))
    got = comm.alltoall(_filled(comm.size * count, comm.rank + number)).reshape(comm.size, count)
    _compare(comm, got, np.arange(comm.size)[:, None] + number)


def _neighbours(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    count, before = chance.choice((5, 300_000)), (comm.rank - 1) % comm.size
    out = _filled(count, -1)
    comm.sendrecv(_filled(count, comm.rank + number), (comm.rank + 1) % comm.size, out, before)
    _compare(comm, out, before + number)


def _shared(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    x = comm.empty(20_000, device="gpu")
    x[...] = comm.rank + number
    _compare(comm, comm.allreduce(x), sum(rank + number for rank in range(comm.size)))


def _on_host(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    x = comm.allreduce(np.full(1000, comm.rank + number))
    assert (x == sum(rank + number for rank in range(comm.size))).all()


_CALLS = (
    *(_allreduce,) * 4,
    _several,
    _broadcast,
    _allgather,
    _reduce_scatter,
    _alltoall,
    _neighbours,
    _shared,
    _on_host,
)
