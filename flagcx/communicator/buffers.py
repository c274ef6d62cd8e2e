"""Which arrays a rank gives to a collective, and which it gets: the shapes of all of them in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flagcx.arguments import blocks_of
from flagcx.errors import ArgumentError, ArrayError
from flagcx.executor.host import Executor
from flagcx.foreign_arrays import in_kind
from flagcx.schedule.collectives import Counts

ONE_ARRAY = ("allreduce", "reduce", "broadcast")
"""The collectives whose result has the place of the array that was given, unless ``out`` is."""


class Buffers(NamedTuple):
    """The arrays of a call, checked.

    Attributes:
        sendbuf: What this rank contributes; None where it contributes nothing.
        recvbuf: Where its result goes; None where it gets none.
        counts: Elements of the message, of each block, or of each rank's block.
        value: What the caller gets.
    """

    sendbuf: Any
    recvbuf: Any
    counts: Counts
    value: Any


def buffers_of(
    executor: Executor,
    collective: str,
    root: int | None,
    x: Any,
    out: Any,
    names: tuple[str, str] = ("x", "out"),
) -> Buffers:
    """Takes the arrays of a collective with blocks of one size.

    Args:
        executor: Takes arrays of this kind, and makes them.
        collective: Its name.
        root: The root, of a rooted collective.
        x: The caller's array; None at the ranks of a scatter that have none.
        out: The caller's array for the result, or None.
        names: What the two are called in messages.

    Raises:
        ArrayError: An array cannot be sent or written as it is, or has the wrong size or dtype.
        ArgumentError: A rank of a scatter has neither ``x`` nor ``out``.
    """
    rank, size = executor.rank, executor.size
    receives = rank == root or collective not in ("reduce", "gather")
    if collective == "broadcast":
        array = executor.take(x, "x", rank != root)
        return Buffers(array if rank == root else None, array, array.size, x)
    if collective == "scatter" and rank != root:
        if out is None:
            raise ArgumentError(f"scatter needs out= on rank {rank}: only the root knows the shape")
        array = executor.take(out, "out", True)
        return Buffers(None, array, array.size, out)
    in_place = collective in ONE_ARRAY and receives and out is None
    sendbuf = executor.take(x, names[0], in_place)
    count, shape = sendbuf.size, sendbuf.shape
    if collective in ("allgather", "gather"):
        shape = (size, *shape)
    elif collective == "alltoall":
        count, _ = blocks_of(sendbuf, size)
    elif collective in ("reduce_scatter", "scatter"):
        count, shape = blocks_of(sendbuf, size)
    if not receives:
        return Buffers(sendbuf, None, count, None)
    if in_place:
        return Buffers(sendbuf, sendbuf, count, x)
    recvbuf = executor.result(out, names[1], shape, sendbuf.dtype)
    return Buffers(sendbuf, recvbuf, count, in_kind(x, recvbuf) if out is None else out)


def v_buffers_of(
    executor: Executor, collective: str, root: int | None, x: Any, out: Any, counts: tuple, dtype: Any
) -> Buffers:
    """Takes the arrays of a collective whose blocks differ in size.

    Args:
        executor: Takes arrays of this kind, and makes them.
        collective: Its name, without the v.
        root: The root, of a rooted collective.
        x: The caller's array, of one dimension; None where a rank has none.
        out: The caller's array for the result, or None.
        counts: Elements of each rank's block; for an alltoall those it sends, and those it receives.
        dtype: The element type of a scatter, where neither ``x`` nor ``out`` tells it.

    Raises:
        ArrayError: An array has another number of elements than ``counts`` says, or cannot be sent.
        ArgumentError: A rank of a scatter knows no dtype.
    """
    rank = executor.rank
    sends, receives = counts if collective == "alltoall" else (counts, counts)
    own, all_of_it = (f"counts[{rank}]", "sum(counts)")
    sendbuf = None
    if collective != "scatter" or rank == root:
        sendbuf = executor.take(x, "x", False)
        dtype = sendbuf.dtype
        if collective in ("allgather", "gather"):
            _check_size(sendbuf, sends[rank], own)
        else:
            _check_size(sendbuf, sum(sends), "sum(send_counts)" if collective == "alltoall" else all_of_it)
    elif out is not None:
        dtype = executor.take(out, "out", True).dtype
    elif dtype is None:
        raise ArgumentError(f"scatterv needs out= or dtype= on rank {rank}: only the root has x")
    if collective == "gather" and rank != root:
        return Buffers(sendbuf, None, counts, None)
    count = receives[rank] if collective in ("reduce_scatter", "scatter") else sum(receives)
    recvbuf = executor.result(out, "out", (count,), np.dtype(dtype))
    return Buffers(sendbuf, recvbuf, counts, in_kind(x, recvbuf) if out is None else out)


def _check_size(array: Any, count: int, what: str) -> None:
    if array.size != count:
        raise ArrayError(f"x has {array.size} elements, but {what} is {count}")


def check_many(xs: Sequence[Any], outs: Any) -> None:
    """Checks that a list of results has an array for each of a list of arrays.

    Raises:
        ArgumentError: It is no list, or has another length.
    """
    if outs is not None and (not isinstance(outs, (list, tuple)) or len(outs) != len(xs)):
        got = f"{len(outs)} arrays" if isinstance(outs, (list, tuple)) else type(outs).__name__
        raise ArgumentError(f"out must be a list of {len(xs)} arrays, one for each of x; got {got}")
