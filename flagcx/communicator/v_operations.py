"""The collectives with blocks of different sizes (MPI's v forms): counts are elements, blocks lie end to end.

``algorithm``, ``async_op`` and ``stream`` are described by ``Communicator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from flagcx.arguments import check_counts, check_rank, on_device
from flagcx.communicator.caller import MISS, Caller
from flagcx.communicator.counted import counted_alltoall
from flagcx.communicator.foreign_calls import refuse, refuses_foreign
from flagcx.communicator.operations import allgather, alltoall
from flagcx.dtypes import Op
from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.communicator.options import A, B, Either, Later, Now, Sizes, Unpack
    from flagcx.executor.work import Work


@overload
def allgatherv(comm: Caller, x: A, counts: Sizes = ..., *, out: None = ..., **options: Unpack[Now]) -> A: ...
@overload
def allgatherv(comm: Caller, x: Any, counts: Sizes = ..., *, out: B, **options: Unpack[Now]) -> B: ...
@overload
def allgatherv(
    comm: Caller, x: A, counts: Sizes = ..., *, out: None = ..., **options: Unpack[Later]
) -> Work[A]: ...
@overload
def allgatherv(
    comm: Caller, x: Any, counts: Sizes = ..., *, out: Any = ..., **options: Unpack[Either]
) -> Any: ...
@refuses_foreign("x")
def allgatherv(
    comm: Caller,
    x: Any = None,
    counts: Sizes = None,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Gives every rank the arrays of all ranks, end to end.

    Args:
        x: Array of ``counts[rank]`` elements.
        counts: Elements of every rank's array, the same list on every rank; asked for where not given.
        out: Array of ``sum(counts)`` elements.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new one-dimensional array.
    """
    if more or foreign:
        refuse(allgatherv, more, foreign)
    done = _again(comm, async_op or stream, "allgather", x, out, None, None, algorithm, counts)
    if done is not MISS:
        return done
    sizes = _counts(comm, "allgatherv", x, counts)
    return comm.call("allgather", x, out, counts=sizes, algorithm=algorithm, async_op=async_op, stream=stream)


@overload
def reduce_scatterv(
    comm: Caller, x: A, counts: Sequence[int], op: Op = ..., *, out: None = ..., **options: Unpack[Now]
) -> A: ...
@overload
def reduce_scatterv(
    comm: Caller, x: Any, counts: Sequence[int], op: Op = ..., *, out: B, **options: Unpack[Now]
) -> B: ...
@overload
def reduce_scatterv(
    comm: Caller, x: A, counts: Sequence[int], op: Op = ..., *, out: None = ..., **options: Unpack[Later]
) -> Work[A]: ...
@overload
def reduce_scatterv(
    comm: Caller, x: Any, counts: Sequence[int], op: Op = ..., *, out: Any = ..., **options: Unpack[Either]
) -> Any: ...
@refuses_foreign("x", "counts")
def reduce_scatterv(
    comm: Caller,
    x: Any = None,
    counts: Any = None,
    op: Op = "sum",
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Combines the arrays of all ranks; rank r gets ``counts[r]`` elements of the result.

    Args:
        x: Array of ``sum(counts)`` elements, blocks end to end; left as it is.
        counts: Elements of every rank's part, the same list on every rank.
        op: See ``allreduce``.
        out: Array of ``counts[rank]`` elements.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new one-dimensional array.
    """
    if more or foreign:
        refuse(reduce_scatterv, more, foreign)
    done = _again(comm, async_op or stream, "reduce_scatter", x, out, op, None, algorithm, counts)
    if done is not MISS:
        return done
    sizes = check_counts(counts, comm.size, "counts")
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("reduce_scatter", x, out, op=op, counts=sizes, **options)


@overload
def gatherv(
    comm: Caller, x: A, counts: Sizes = ..., root: int = ..., *, out: None = ..., **options: Unpack[Now]
) -> A | None: ...
@overload
def gatherv(
    comm: Caller, x: Any, counts: Sizes = ..., root: int = ..., *, out: B, **options: Unpack[Now]
) -> B | None: ...
@overload
def gatherv(
    comm: Caller, x: A, counts: Sizes = ..., root: int = ..., *, out: None = ..., **options: Unpack[Later]
) -> Work[A | None]: ...
@overload
def gatherv(
    comm: Caller, x: Any, counts: Sizes = ..., root: int = ..., *, out: Any = ..., **options: Unpack[Either]
) -> Any: ...
@refuses_foreign("x")
def gatherv(
    comm: Caller,
    x: Any = None,
    counts: Sizes = None,
    root: int = 0,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Gives the root the arrays of all ranks, end to end.

    Args:
        x: Array of ``counts[rank]`` elements.
        counts: Elements of every rank's array, the same list on every rank; asked for where not given.
        root: The rank that gets them.
        out: Array of ``sum(counts)`` elements, at the root.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        At the root ``out``, or a new one-dimensional array; elsewhere None.
    """
    if more or foreign:
        refuse(gatherv, more, foreign)
    done = _again(comm, async_op or stream, "gather", x, out, None, root, algorithm, counts)
    if done is not MISS:
        return done
    sizes = _counts(comm, "gatherv", x, counts)
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("gather", x, out, root=root, counts=sizes, **options)


@refuses_foreign("x", "counts")
def scatterv(
    comm: Caller,
    x: Any = None,
    counts: Any = None,
    root: int = 0,
    *more: NoReturn,
    out: Any = None,
    dtype: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Gives rank r ``counts[r]`` elements of the root's array.

    Args:
        x: At the root, an array of ``sum(counts)`` elements; elsewhere None.
        counts: Elements of every rank's part, the same list on every rank.
        root: The rank whose array it is.
        out: Array of ``counts[rank]`` elements.
        dtype: The element type; needed where neither ``x`` nor ``out`` tells it.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new one-dimensional array.
    """
    if more or foreign:
        refuse(scatterv, more, foreign)
    root = check_rank(root, comm.size, "root")
    first, rest = (x, out) if comm.rank == root else (out, None)
    done = _again(comm, async_op or stream, "scatter", first, rest, None, root, algorithm, counts)
    if done is not MISS:
        return done
    sizes = check_counts(counts, comm.size, "counts")
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("scatter", x, out, root=root, counts=sizes, dtype=dtype, **options)


@refuses_foreign("x", "send_counts")
def alltoallv(
    comm: Caller,
    x: Any = None,
    send_counts: Any = None,
    receive_counts: Any = None,
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Sends ``send_counts[q]`` elements to each rank q, and gets what every rank sends here.

    The counts may lie on the GPU, as those of a mixture of experts do, where each token goes to the rank of
    its expert: the host then neither knows them nor waits for them, and the call may be captured in a graph.

    Args:
        x: Array of ``sum(send_counts)`` elements, blocks end to end; where the counts are on the GPU, of at
            least as many.
        send_counts: Elements for each rank: a list, or an array of ``size`` integers on the GPU.
        receive_counts: Elements from each rank, of the same kind; asked for where not given.
        out: Array of ``sum(receive_counts)`` elements. Where the counts are on the GPU it must be given, and
            may have more, which are left as they are.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.

    Returns:
        ``out``, or a new one-dimensional array; blocks in rank order.

    Example:
        >>> received = comm.alltoall(sent)                          # doctest: +SKIP
        >>> comm.alltoallv(tokens, sent, received, out=here)        # doctest: +SKIP
        >>> comm.alltoallv(answers, received, sent, out=tokens)     # doctest: +SKIP
    """
    if more or foreign:
        refuse(alltoallv, more, foreign)
    device = comm._device
    if (device is not None and send_counts.__class__ is device.array_class) or on_device(send_counts):
        if stream is not None:

            def again(x: Any, sent: Any, received: Any, out: Any) -> Any:
                return alltoallv(comm, x, sent, received, out=out, algorithm=algorithm, async_op=async_op)

            return comm.run_on(stream, again, (x, send_counts, receive_counts, out))
        return counted_alltoall(comm, x, send_counts, receive_counts, out, algorithm, async_op)
    if receive_counts is not None:
        counts = send_counts, receive_counts
        done = _again(comm, async_op or stream, "alltoall", x, out, None, None, algorithm, counts)
        if done is not MISS:
            return done
    sent = check_counts(send_counts, comm.size, "send_counts")
    if receive_counts is None:
        _refuse_to_ask(comm, "alltoallv", "receive_counts")
        receive_counts = alltoall(comm, np.array(sent, np.int64)).tolist()
    received = check_counts(receive_counts, comm.size, "receive_counts")
    if sent[comm.rank] != received[comm.rank]:
        raise ArgumentError(
            f"send_counts[{comm.rank}] is {sent[comm.rank]} and receive_counts[{comm.rank}] is "
            f"{received[comm.rank]} on rank {comm.rank}, which is what it sends to itself; they must be equal"
        )
    options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op, "stream": stream}
    return comm.call("alltoall", x, out, counts=(sent, received), **options)


def _again(
    comm: Caller,
    other: Any,
    collective: str,
    x: Any,
    out: Any,
    op: Any,
    root: Any,
    algorithm: Any,
    counts: Any,
) -> Any:
    """Makes a call on GPU arrays like an earlier one, unless it is to be made in ``other`` ways."""
    if other or counts is None or x.__class__ is np.ndarray:
        return MISS
    try:
        known = tuple(map(tuple, counts)) if collective == "alltoall" else tuple(counts)
    except TypeError:
        return MISS
    return comm.again_on_device(collective, x, out, op, root, algorithm, known)


def _counts(comm: Caller, what: str, x: Any, counts: Sequence[int] | None) -> tuple[int, ...]:
    """Elements of every rank's array: as the caller says, or as the ranks tell each other."""
    if counts is None:
        _refuse_to_ask(comm, what, "counts")
        own = comm.executor_of(x).take(x, "x", False).size
        counts = allgather(comm, np.array([own], np.int64)).reshape(-1).tolist()
    return check_counts(counts, comm.size, "counts")


def _refuse_to_ask(comm: Caller, what: str, name: str) -> None:
    if comm._group is not None:
        raise ArgumentError(
            f"{what} inside comm.group() needs {name}=: calls of a group run at its end, so the ranks cannot "
            f"tell each other their counts before"
        )
