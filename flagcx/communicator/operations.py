"""The collectives with blocks of one size, and the barrier: what each does, and its arrays.

Each is a method of ``Communicator``: it asks for a call like an earlier one (``run_again``), and leaves any
other to ``call``; both stand in ``caller.py``. ``algorithm``, ``async_op`` and ``stream`` mean the same in
all of them, and are described by ``Communicator``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, overload

from flagcx.arguments import check_rank
from flagcx.communicator.caller import MISS, Caller
from flagcx.communicator.foreign_calls import refuse, refuses_foreign
from flagcx.dtypes import Op, dtype_of, resolve_op
from flagcx.errors import ArgumentError
from flagcx.fusion.group import Pending

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flagcx.communicator.options import A, B, Either, Later, Now, S, Unpack
    from flagcx.executor.host import Executor
    from flagcx.executor.work import Work
    from flagcx.transport.base import Plan

_BARRIER = ("barrier",)
"""The key of a barrier's plan among those of calls that came before."""


@overload
def reduce(
    comm: Caller, x: A, op: Op = ..., root: int = ..., *, out: None = ..., **options: Unpack[Now]
) -> A | None: ...
@overload
def reduce(
    comm: Caller, x: Any, op: Op = ..., root: int = ..., *, out: B, **options: Unpack[Now]
) -> B | None: ...
@overload
def reduce(
    comm: Caller, x: A, op: Op = ..., root: int = ..., *, out: None = ..., **options: Unpack[Later]
) -> Work[A | None]: ...
@overload
def reduce(
    comm: Caller, x: Any, op: Op = ..., root: int = ..., *, out: Any = ..., **options: Unpack[Either]
) -> Any: ...
@refuses_foreign("x")
def reduce(
    comm: Caller,
    x: Any = None,
    op: Op = "sum",
    root: int = 0,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
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
    if more or foreign:
        refuse(reduce, more, foreign)
    if not async_op and stream is None:
        done = comm.run_again("reduce", x, out, op, root, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("reduce", x, out, op=op, root=root, **options)


@overload
def broadcast(comm: Caller, x: A, root: int = ..., **options: Unpack[Now]) -> A: ...
@overload
def broadcast(comm: Caller, x: A, root: int = ..., **options: Unpack[Later]) -> Work[A]: ...
@overload
def broadcast(comm: Caller, x: Any, root: int = ..., **options: Unpack[Either]) -> Any: ...
@refuses_foreign("x")
def broadcast(
    comm: Caller,
    x: Any = None,
    root: int = 0,
    *more: NoReturn,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Gives every rank the root's array.

    Args:
        x: Array; the same count and dtype on every rank. Replaced, except at the root.
        root: The rank whose array it is.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``x``.
    """
    if more or foreign:
        refuse(broadcast, more, foreign)
    if not async_op and stream is None:
        done = comm.run_again("broadcast", x, None, None, root, algorithm)
        if done is not MISS:
            return done
    return comm.call("broadcast", x, root=root, algorithm=algorithm, async_op=async_op, stream=stream)


@overload
def allgather(comm: Caller, x: NDArray[S], *, out: None = ..., **options: Unpack[Now]) -> NDArray[S]: ...
@overload
def allgather(comm: Caller, x: A, *, out: None = ..., **options: Unpack[Now]) -> A: ...
@overload
def allgather(comm: Caller, x: Any, *, out: B, **options: Unpack[Now]) -> B: ...
@overload
def allgather(
    comm: Caller, x: NDArray[S], *, out: None = ..., **options: Unpack[Later]
) -> Work[NDArray[S]]: ...
@overload
def allgather(comm: Caller, x: A, *, out: None = ..., **options: Unpack[Later]) -> Work[A]: ...
@overload
def allgather(comm: Caller, x: Any, *, out: Any = ..., **options: Unpack[Either]) -> Any: ...
@refuses_foreign("x")
def allgather(
    comm: Caller,
    x: Any = None,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Gives every rank the arrays of all ranks, in rank order.

    Args:
        x: Array of the same shape and dtype on every rank. It may be this rank's block of ``out``.
        out: Array of ``size`` times as many elements, for the result.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new array of shape ``(size, *x.shape)``.
    """
    if more or foreign:
        refuse(allgather, more, foreign)
    if not async_op and stream is None:
        done = comm.run_again("allgather", x, out, None, None, algorithm)
        if done is not MISS:
            return done
    return comm.call("allgather", x, out, algorithm=algorithm, async_op=async_op, stream=stream)


@overload
def reduce_scatter(comm: Caller, x: A, op: Op = ..., *, out: None = ..., **options: Unpack[Now]) -> A: ...
@overload
def reduce_scatter(comm: Caller, x: Any, op: Op = ..., *, out: B, **options: Unpack[Now]) -> B: ...
@overload
def reduce_scatter(
    comm: Caller, x: A, op: Op = ..., *, out: None = ..., **options: Unpack[Later]
) -> Work[A]: ...
@overload
def reduce_scatter(
    comm: Caller, x: Any, op: Op = ..., *, out: Any = ..., **options: Unpack[Either]
) -> Any: ...
@refuses_foreign("x")
def reduce_scatter(
    comm: Caller,
    x: Any = None,
    op: Op = "sum",
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
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
    if more or foreign:
        refuse(reduce_scatter, more, foreign)
    if not async_op and stream is None:
        done = comm.run_again("reduce_scatter", x, out, op, None, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("reduce_scatter", x, out, op=op, **options)


@overload
def gather(
    comm: Caller, x: NDArray[S], root: int = ..., *, out: None = ..., **options: Unpack[Now]
) -> NDArray[S] | None: ...
@overload
def gather(comm: Caller, x: A, root: int = ..., *, out: None = ..., **options: Unpack[Now]) -> A | None: ...
@overload
def gather(comm: Caller, x: Any, root: int = ..., *, out: B, **options: Unpack[Now]) -> B | None: ...
@overload
def gather(
    comm: Caller, x: NDArray[S], root: int = ..., *, out: None = ..., **options: Unpack[Later]
) -> Work[NDArray[S] | None]: ...
@overload
def gather(
    comm: Caller, x: A, root: int = ..., *, out: None = ..., **options: Unpack[Later]
) -> Work[A | None]: ...
@overload
def gather(comm: Caller, x: Any, root: int = ..., *, out: Any = ..., **options: Unpack[Either]) -> Any: ...
@refuses_foreign("x")
def gather(
    comm: Caller,
    x: Any = None,
    root: int = 0,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
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
    if more or foreign:
        refuse(gather, more, foreign)
    if not async_op and stream is None:
        done = comm.run_again("gather", x, out, None, root, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("gather", x, out, root=root, **options)


@overload
def scatter(comm: Caller, x: A, root: int = ..., *, out: None = ..., **options: Unpack[Now]) -> A: ...
@overload
def scatter(comm: Caller, x: Any, root: int = ..., *, out: B, **options: Unpack[Now]) -> B: ...
@overload
def scatter(comm: Caller, x: A, root: int = ..., *, out: None = ..., **options: Unpack[Later]) -> Work[A]: ...
@overload
def scatter(comm: Caller, x: Any, root: int = ..., *, out: Any = ..., **options: Unpack[Either]) -> Any: ...
@refuses_foreign("x")
def scatter(
    comm: Caller,
    x: Any = None,
    root: int = 0,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
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
    if more or foreign:
        refuse(scatter, more, foreign)
    root = check_rank(root, comm.size, "root")
    given = x if comm.rank == root else None
    if not async_op and stream is None:
        first, rest = (out, None) if given is None else (x, out)
        done = comm.run_again("scatter", first, rest, None, root, algorithm)
        if done is not MISS:
            return done
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("scatter", given, out, root=root, **options)


@overload
def alltoall(comm: Caller, x: A, *, out: None = ..., **options: Unpack[Now]) -> A: ...
@overload
def alltoall(comm: Caller, x: Any, *, out: B, **options: Unpack[Now]) -> B: ...
@overload
def alltoall(comm: Caller, x: A, *, out: None = ..., **options: Unpack[Later]) -> Work[A]: ...
@overload
def alltoall(comm: Caller, x: Any, *, out: Any = ..., **options: Unpack[Either]) -> Any: ...
@refuses_foreign("x")
def alltoall(
    comm: Caller,
    x: Any = None,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Sends block q of this rank's array to rank q, and gets block ``rank`` of every rank's.

    Args:
        x: Array whose first axis is a multiple of ``size``; left as it is.
        out: Array of the same number of elements.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new array of the shape of ``x``; block q is from rank q.
    """
    if more or foreign:
        refuse(alltoall, more, foreign)
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
        if comm._group is not None:
            raise ArgumentError(
                "barrier(stream=) has no meaning inside comm.group(), whose calls run at its end"
            )
        device = comm.device_executor()
        with stream:
            device.run(_meeting(device), None, None)
        return
    executor = comm._host
    run = executor.quick.get(_BARRIER)
    if run is None or not executor.turn.acquire(False):
        _checked_barrier(comm, executor)
        return
    try:
        executor.quietly(run, None, None)
    except BaseException as error:
        executor.broke(error)
        raise
    finally:
        executor.turn.release()


def _checked_barrier(comm: Caller, executor: Executor) -> None:
    """A barrier in a group, or the first one, or one that cannot go straight to its plan."""
    plan = _meeting(executor)
    if comm._group is not None:
        comm.put_off(Pending(lambda: executor.run(plan, None, None)), False, None)
        return
    executor.remember(_BARRIER, plan.run)
    executor.run(plan, None, None)


def _meeting(executor: Executor) -> Plan:
    """The plan of a barrier."""
    unsigned = dtype_of("uint8")
    return executor.find("barrier", 0, unsigned, resolve_op("max", unsigned))
