"""The calls of a job of the fault suite: drawn alike on all ranks, each result compared with NumPy's."""

from __future__ import annotations

import random

import numpy as np

import flagcx as fc
from tests.communicator.test_random_programs import one_call


def make(comm: fc.Communicator, seed: int, number: int) -> None:
    """Makes one call; raises AssertionError if its result is wrong.

    Args:
        comm: The communicator.
        seed: Of the job.
        number: Of the call in the job.
    """
    chance = random.Random(f"{seed} {number}")
    how = chance.choice((one_call, one_call, one_call, *_OTHERS))
    how(comm, chance, number)


def _large(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    count = chance.choice((200_000, 1_000_000))
    algorithm = chance.choice((None, None, "ring", "tree"))
    x = np.full(count, comm.rank + number, np.float32)
    comm.allreduce(x, algorithm=algorithm)
    assert (x == sum(rank + number for rank in range(comm.size))).all()


def _barrier(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    comm.barrier()


def _objects(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    padding = "x" * chance.choice((0, 5000))
    assert comm.allgather_object((comm.rank, padding)) == [(rank, padding) for rank in range(comm.size)]


def _pair(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    source, count = chance.randrange(comm.size), chance.choice((1, 1000, 200_000))
    target = (source + 1) % comm.size
    if comm.rank == source:
        comm.send(np.arange(count) + number, target)
    elif comm.rank == target:
        got = np.zeros(count, np.int64)
        comm.recv(got, source)
        assert (got == np.arange(count) + number).all()


def _messages(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    count, peers = chance.choice((1, 5000, 70_000)), [q for q in range(comm.size) if q != comm.rank]
    got = {peer: np.zeros(count, np.int64) for peer in peers}
    begun = [comm.recv(got[peer], peer, async_op=True) for peer in peers]
    begun += [comm.send(np.full(count, comm.rank + number), peer, async_op=True) for peer in peers]
    for work in begun:
        work.wait()
    assert all((got[peer] == peer + number).all() for peer in peers)


def _part(comm: fc.Communicator, chance: random.Random, number: int) -> None:
    part = comm.split(0)
    assert part is not None
    x = part.allreduce(np.full(chance.choice((10, 30_000)), comm.rank + 1))
    part.close()
    assert (x == comm.size * (comm.size + 1) // 2).all()


_OTHERS = (_large, _barrier, _objects, _pair, _messages, _part)
