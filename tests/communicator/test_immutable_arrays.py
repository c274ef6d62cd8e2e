"""JAX's arrays, which nothing may write to: every collective returns a new one, on every rank."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,  # ranks of their own import JAX, whose threads forbid that this process forks later
    pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed (pip install jax)"),
]
RANKS = 2


def _alone():
    import jax

    comm = fc.init()
    x = jax.numpy.arange(4, dtype=jax.numpy.bfloat16)
    for call in (
        comm.allreduce,
        comm.reduce,
        comm.broadcast,
        comm.alltoall,
        lambda x: comm.allreduce(x, "max", algorithm="ring"),
        lambda x: comm.allreduce(x, async_op=True).wait(),
        lambda x: comm.allreduce(x, compression="fp16"),
        lambda x: comm.allgather(x)[0],
        lambda x: comm.allreduce([x])[0],
        lambda x: comm.allgatherv(x, [4]),
    ):
        y = call(x)
        assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.devices() == x.devices()
        assert y.tolist() == x.tolist() == [0, 1, 2, 3]
    _in_lists(comm, jax)
    _refused(comm, jax)


def _in_lists(comm, jax):
    """A list may mix them with others, and a result may go to an array that can be written."""
    x, own, y = jax.numpy.ones(2), np.ones(3), np.zeros(2, np.float32)
    first, second = comm.allreduce([x, own], "avg")
    assert isinstance(first, jax.Array) and second is own
    work = comm.allreduce([x, own], async_op=True)
    assert work.wait()[1] is own and work.done() and "allreduce" in repr(work)
    assert comm.allreduce(x, out=y) is y and y.tolist() == [1, 1]


def _refused(comm, jax):
    x = jax.numpy.ones(3)
    with pytest.raises(fc.ArrayError, match="out is a JAX array, which nothing may write to; leave out= out"):
        comm.allreduce(np.ones(3, np.float32), out=x)
    with pytest.raises(fc.ArrayError, match="out is a JAX array"):
        comm.allreduce(x, out=x)
    with (
        pytest.raises(fc.ArgumentError, match=r"JAX arrays have no meaning inside comm.group\(\)"),
        comm.group(),
    ):
        comm.allreduce(x)
    with pytest.raises(fc.ArrayError, match=r"call flagcx outside of jax\.jit"):
        jax.jit(comm.allreduce)(x)


def test_a_new_array_is_returned_and_the_old_one_kept():
    run_ranks(_alone, 1, fresh=True)


def _between():
    import jax

    comm = fc.init()
    x = jax.numpy.arange(4.0) + comm.rank
    return [
        None if y is None else np.asarray(y).tolist()
        for y in (
            comm.allreduce(x),
            comm.broadcast(x, root=1),
            comm.reduce(x, root=1),
            comm.reduce_scatter(x),
            comm.scatter(x if comm.rank == 0 else None, out=np.empty(2, np.float32)),
            x,
        )
    ]


def test_between_ranks():
    results = run_ranks(_between, RANKS, fresh=True)
    total, second = [1.0, 3, 5, 7], [1.0, 2, 3, 4]
    assert results[0] == [total, second, None, total[:2], [0, 1], [0, 1, 2, 3]]
    assert results[1] == [total, second, total, total[2:], [2, 3], second]
