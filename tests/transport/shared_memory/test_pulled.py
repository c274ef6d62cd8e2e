"""Long blocks that ranks read where they lie, in private arrays, in arrays of ``comm.empty``, and in both."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.transport.shared_memory.pulled import Pulled
from tests.ranks import run_ranks

COUNT = 40_001  # of float32: longer than what goes through slots, in pieces of which the last is shorter


def blocks_of(rank: int, size: int, count: int) -> np.ndarray:
    """What a rank has for each: small whole numbers, so that sums are exact."""
    return ((np.arange(size * count) * (rank + 3)) % 101).astype(np.float32).reshape(size, count)


def pulled_wrong() -> list[str]:
    """What came out wrong of all collectives, where no, every or one rank's arrays are shared."""
    comm, wrong, runs = fc.init(), [], []
    rank, size = comm.rank, comm.size
    run = Pulled.run
    Pulled.run = lambda self, *arrays: (runs.append(1), run(self, *arrays))[1]
    have = [blocks_of(q, size, COUNT) for q in range(size)]
    mine = np.stack([blocks[rank] for blocks in have])
    for kind, shared in (("private", False), ("shared", True), ("mixed", rank == 0)):

        def made(values: np.ndarray, shared: bool = shared) -> np.ndarray:
            array = comm.empty(values.shape, values.dtype) if shared else np.empty_like(values)
            array[...] = values
            return array

        own, all_own = made(have[rank][rank]), np.stack([blocks[q] for q, blocks in enumerate(have)])
        for root in range(size):
            found = comm.broadcast(made(have[rank][0]), root)
            wrong += [f"{kind} broadcast"] * (not (found == have[root][0]).all())
            found = comm.gather(own, root)
            wrong += [f"{kind} gather"] * (rank == root and not (found == all_own).all())
            found = comm.scatter(made(have[root]) if rank == root else None, root, out=np.empty_like(own))
            wrong += [f"{kind} scatter"] * (not (found == have[root][rank]).all())
        room = made(np.zeros_like(all_own))
        room[rank] = own
        for name, found, expected in (
            ("allgather", comm.allgather(own), all_own),
            ("allgather in place", comm.allgather(room[rank], out=room), all_own),
            ("alltoall", comm.alltoall(made(have[rank])), mine),
            ("reduce_scatter", comm.reduce_scatter(made(have[rank])), mine.sum(0)),
            ("average", comm.reduce_scatter(made(have[rank]), "avg"), mine.sum(0) / np.float32(size)),
        ):
            wrong += [f"{kind} {name}"] * (not (found.reshape(expected.shape) == expected).all())
        whole = made(have[rank])
        comm.reduce_scatter(whole, out=whole[rank])
        wrong += [f"{kind} reduce_scatter in place"] * (not (whole[rank] == mine.sum(0)).all())
    return wrong + ([] if runs else ["nothing was pulled"]) * comm._host.transport.cross_memory


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_collectives_are_right_in_arrays_of_any_kind(ranks):
    assert run_ranks(pulled_wrong, ranks, fresh=True) == [[]] * ranks


def differing() -> str:
    """What a rank is told whose peer gathers one element more."""
    comm = fc.init()
    x = np.ones(COUNT + comm.rank, np.float32)
    with pytest.raises(fc.MismatchError) as raised:
        comm.allgather(x)
    assert (x == 1).all()
    return str(raised.value)


def test_a_difference_is_told_before_anything_is_read():
    for text in run_ranks(differing, 2):
        assert f"allgather of {COUNT} a rank" in text
        assert f"allgather of {COUNT + 1} a rank" in text
