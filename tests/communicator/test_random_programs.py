"""Random programs of right calls against an oracle: all collectives, dtypes, operations and layouts.

All ranks draw the same calls. The arrays of a rank follow from the call's number and its rank, so that every
rank knows what all have given and works out by itself, one rank after the other, what it must get.
"""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks

DTYPES = (
    "float32", "float64", "int32", "int64", "uint8", "int8", "bool", "complex64", "float16",
    np.dtype(ml_dtypes.bfloat16),
)  # fmt: skip
OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply, "bor": np.bitwise_or}
REAL = ("sum", "max", "min", "prod")
COUNTS = (0, 1, 2, 5, 17, 64, 1000, 4097, 16_384, 16_385, 50_000)
CALLS = (
    "allreduce", "allreduce", "reduce", "broadcast", "allgather", "gather", "reduce_scatter", "scatter",
    "alltoall", "allgatherv", "sendrecv", "list", "group",
)  # fmt: skip
ALGORITHMS = (
    None,
    None,
    None,
    "ring",
    "tree",
    "two_shot",
    "recursive_doubling",
    "double_binary_tree",
    "ring|ring",
)
LAYOUTS = ("plain", "plain", "plain", "offset", "strided", "fortran", "reversed", "2-D", "shared")


def values(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Small whole numbers: sums and products of a few are exact in every dtype."""
    kind = np.dtype(dtype)
    drawn = np.random.default_rng(seed).integers(0, 2 if kind.kind == "b" else 3, shape)
    return drawn.astype(kind)


def laid_out(comm: fc.Communicator, array: np.ndarray, layout: str) -> np.ndarray:
    """The same values in memory of some layout."""
    if layout == "offset":
        room = np.zeros(array.size + 3, array.dtype)
        view = room[3:].reshape(array.shape)
    elif layout == "strided":
        view = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    elif layout == "fortran":
        view = np.zeros(array.shape, array.dtype, order="F")
    elif layout == "reversed":
        view = np.zeros(array.shape, array.dtype)[..., ::-1]
    elif layout == "shared":
        view = comm.empty(array.shape, array.dtype)
    else:
        return array.copy()
    view[...] = array
    return view


def combined(op: str, parts: list[np.ndarray]) -> np.ndarray:
    result = parts[0]
    for part in parts[1:]:
        result = OPS[op](result, part)
    return result.astype(parts[0].dtype)


def same(got: Any, want: Any, what: tuple) -> None:
    assert (got is None) == (want is None), what
    if want is not None:
        assert got.dtype == want.dtype and got.size == want.size, (what, got.dtype, got.shape)
        assert (np.asarray(got).reshape(-1) == want.reshape(-1)).all(), what


def one_call(comm: fc.Communicator, draw: random.Random, number: int) -> None:
    """Draws a call, makes it, and compares what this rank gets."""
    size, rank = comm.size, comm.rank
    name, count, dtype, layout = (draw.choice(few) for few in (CALLS, COUNTS, DTYPES, LAYOUTS))
    root, op = draw.randrange(size), draw.choice(REAL)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        op = "bor"
    elif kind.kind == "c":
        op = draw.choice(("sum", "prod"))
    shape: tuple[int, ...] = (count // 5, 5) if layout == "2-D" and count % 5 == 0 else (count,)
    more: dict[str, Any] = {"async_op": True} if draw.random() < 0.15 else {}
    fresh = draw.random() < 0.5  # results in an array that is given, or a new one
    algorithm = draw.choice(ALGORITHMS) if size > 1 else None
    what = (number, name, count, str(kind), layout, op, root, more, fresh, algorithm)
    blocks = name in ("reduce_scatter", "scatter", "alltoall")
    whole = (size, *shape) if blocks else shape
    given = [values(whole, kind, 1000 * number + q) for q in range(size)]
    x = laid_out(comm, given[rank], layout)

    def out(like: tuple[int, ...]) -> dict[str, Any]:
        return (
            {} if fresh else {"out": laid_out(comm, np.zeros(like, kind), draw.choice(("plain", "offset")))}
        )

    def wait(done: Any) -> Any:
        return done.wait() if more else done

    if name == "allreduce":
        if algorithm is not None:
            more = {**more, "algorithm": algorithm}
        done = comm.allreduce(x, op, **more, **out(shape))
        same(done.wait() if "async_op" in more else done, combined(op, given), what)
    elif name == "reduce":
        done = wait(comm.reduce(x, op, root, **more, **out(shape)))
        same(done, combined(op, given) if rank == root else None, what)
    elif name == "broadcast":
        same(wait(comm.broadcast(x, root, **more)), given[root], what)
    elif name == "allgather":
        same(wait(comm.allgather(x, **more, **out((size, *shape)))), np.stack(given), what)
    elif name == "gather":
        done = wait(comm.gather(x, root, **more, **out((size, *shape))))
        same(done, np.stack(given) if rank == root else None, what)
    elif name == "reduce_scatter":
        done = wait(comm.reduce_scatter(x, op, **more, **out(shape)))
        same(done, combined(op, [part[rank] for part in given]), what)
    elif name == "scatter":
        target = laid_out(comm, np.zeros(shape, kind), "plain")
        done = wait(comm.scatter(x if rank == root else None, root, out=target, **more))
        same(done, given[root][rank], what)
    elif name == "alltoall":
        done = wait(comm.alltoall(x, **more, **out(whole)))
        same(done, np.stack([part[rank] for part in given]), what)
    elif name == "allgatherv":
        mine = laid_out(comm, given[rank].reshape(-1)[: count // (rank + 1)], "plain")
        parts = [part.reshape(-1)[: count // (q + 1)] for q, part in enumerate(given)]
        same(wait(comm.allgatherv(mine, **more)), np.concatenate(parts), what)
    elif name == "sendrecv":
        target = np.zeros(shape, kind)
        left = (rank - 1) % size
        same(wait(comm.sendrecv(x, (rank + 1) % size, target, left, **more)), given[left], what)
    else:
        together(comm, draw, number, kind, op, name, what)


def together(comm, draw, number: int, kind: np.dtype, op: str, how: str, what: tuple) -> None:
    """All-reduces of several arrays, as a list or in a group."""
    shapes = [(draw.choice(COUNTS[:8]),) for _ in range(draw.randrange(1, 6))]
    given = [
        [values(shape, kind, 1000 * number + 10 * q + i) for q in range(comm.size)]
        for i, shape in enumerate(shapes)
    ]
    mine = [laid_out(comm, parts[comm.rank], draw.choice(LAYOUTS[:7])) for parts in given]
    if how == "list":
        comm.allreduce(mine, op)
    else:
        with comm.group():
            for array in mine:
                comm.allreduce(array, op)
    for got, parts in zip(mine, given, strict=True):
        same(got, combined(op, parts), what)


def run(seed: int, calls: int) -> None:
    """Every few calls with arrays of the same kinds again, and at times in a part of the communicator."""
    comm = fc.init(timeout_s=60)
    draw = random.Random(seed)
    half = comm.split(comm.rank % 2)
    for number in range(calls):
        state = draw.getstate()
        one_call(comm, draw, number)
        if draw.random() < 0.3:  # the same call again, with other arrays
            again = random.Random()
            again.setstate(state)
            one_call(comm, again, calls + number)
        if draw.random() < 0.05:
            part = random.Random(number)
            one_call(half, part, 2 * calls + number)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_are_right(size):
    run_ranks(run, size, size, 150)


@pytest.mark.exhaustive
def test_many_random_programs_are_right():
    run_ranks(run, 5, 50, 500, timeout_s=600)
