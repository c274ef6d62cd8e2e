"""The collectives with blocks of one size: what each does, and which arrays it takes and returns.

Each is a method of ``Communicator``: it asks for a call like an earlier one (``run_again``), and leaves any
other to ``call``; both stand in ``caller.py``. ``algorithm``, ``async_op`` and ``stream`` mean the same in
all of them, and are described by ``Communicator``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.communicator.caller import MISS, Caller
from flagcx.dtypes import Op, dtype_of, resolve_op
from flagcx.errors import ArgumentError
from flagcx.fusion.group import Pending


def reduce(
    comm: Caller,
    x: Any,
    op: Op = "sum",
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Combines the arrays of all ranks; the root gets the result.

    Args:
        x: Array; at the root it is replaced by the result, unless ``out`` is given. Elsewhere it is
            left as it is.
        op: See ``allreduce``.
        root: The rank that gets the result.
        out: Array for the result, at the root.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        At the root ``x``, or ``out`` where it is given; elsewhere None.
    """
    if not async_op and stream is None:
        done = comm.run_again("reduce", x, out, op, root, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("reduce", x, out, op=op, root=root, **options)


def broadcast(
    comm: Caller,
    x: Any,
    root: int = 0,
    *,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Gives every rank the root's array.

    Args:
        x: Array; the same count and dtype on every rank. Replaced, except at the root.
        root: The rank whose array it is.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``x``.
    """
    if not async_op and stream is None:
        done = comm.run_again("broadcast", x, None, None, root, algorithm)
        if done is not MISS:
            return done
    return comm.call("broadcast", x, root=root, algorithm=algorithm, async_op=async_op, stream=stream)


def allgather(
    comm: Caller,
    x: Any,
    *,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Gives every rank the arrays of all ranks, in rank order.

    Args:
        x: Array of the same shape and dtype on every rank. It may be this rank's block of ``out``.
        out: Array of ``size`` times as many elements, for the result.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new array of shape ``(size, *x.shape)``.
    """
    if not async_op and stream is None:
        done = comm.run_again("allgather", x, out, None, None, algorithm)
        if done is not MISS:
            return done
    return comm.call("allgather", x, out, algorithm=algorithm, async_op=async_op, stream=stream)


def reduce_scatter(
    comm: Caller,
    x: Any,
    op: Op = "sum",
    *,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Combines the arrays of all ranks; rank r gets block r of the result.

    Args:
        x: Array whose first axis is a multiple of ``size``; left as it is.
        op: See ``allreduce``.
        out: Array for this rank's block.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new array of shape ``(x.shape[0] // size, *x.shape[1:])``.
    """
    if not async_op and stream is None:
        done = comm.run_again("reduce_scatter", x, out, op, None, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("reduce_scatter", x, out, op=op, **options)


def gather(
    comm: Caller,
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Gives the root the arrays of all ranks, in rank order.

    Args:
        x: Array of the same shape and dtype on every rank.
        root: The rank that gets them.
        out: Array of ``size`` times as many elements, at the root.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        At the root ``out``, or a new array of shape ``(size, *x.shape)``; elsewhere None.
    """
    if not async_op and stream is None:
        done = comm.run_again("gather", x, out, None, root, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("gather", x, out, root=root, **options)


def scatter(
    comm: Caller,
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Gives every rank its block of the root's array.

    Args:
        x: At the root, an array whose first axis is a multiple of ``size``; elsewhere None.
        root: The rank whose array it is.
        out: Array for this rank's block; must be given on all ranks but the root.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or at the root a new array of shape ``(x.shape[0] // size, *x.shape[1:])``.
    """
    given = x if comm.rank == root else None
    if not async_op and stream is None:
        first, rest = (out, None) if given is None else (x, out)
        done = comm.run_again("scatter", first, rest, None, root, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("scatter", given, out, root=root, **options)


def alltoall(
    comm: Caller,
    x: Any,
    *,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Sends block q of this rank's array to rank q, and gets block ``rank`` of every rank's.

    Args:
        x: Array whose first axis is a multiple of ``size``; left as it is.
        out: Array of the same number of elements.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new array of the shape of ``x``; block q is from rank q.
    """
    if not async_op and stream is None:
        done = comm.run_again("alltoall", x, out, None, None, algorithm)
        if done is not MISS:
            return done
    return comm.call("alltoall", x, out, algorithm=algorithm, async_op=async_op, stream=stream)


def barrier(comm: Caller, *, stream: Any = None) -> None:
    """Waits until every rank has come.

    Args:
        stream: A stream of a GPU, which then waits instead of the host: what is enqueued on it later begins
            when the streams of all ranks have come to their barrier.
    """
    if stream is not None:
        _barrier_on(comm, stream)
        return
    executor = comm._host
    unsigned = dtype_of(np.uint8)
    plan = executor.find("barrier", 0, unsigned, resolve_op("max", unsigned))
    if comm._group is not None:
        comm.put_off(Pending(lambda: executor.run(plan, None, None)), False, None)
    else:
        executor.run(plan, None, None)


def _barrier_on(comm: Caller, stream: Any) -> None:
    if comm._group is not None:
        raise ArgumentError("barrier(stream=) has no meaning inside comm.group(), whose calls run at its end")
    executor, unsigned = comm.device_executor(), dtype_of(np.uint8)
    with stream:
        plan = executor.find("barrier", 0, unsigned, resolve_op("max", unsigned))
        executor.run(plan, None, None)
