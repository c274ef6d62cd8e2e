"""All-reduce: of an array, of a list of arrays, in a group; the one call with a look-up of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, overload

from numpy import ndarray

from flagcx.arguments import check_algorithm, untangle
from flagcx.communicator import functional
from flagcx.communicator.buffers import buffers_of, check_many
from flagcx.communicator.caller import Caller, is_apart, refuse_async
from flagcx.communicator.foreign_calls import refuse, refuses_foreign
from flagcx.dtypes import Op, dtype_of, resolve_op
from flagcx.errors import ArgumentError
from flagcx.executor.host import Executor
from flagcx.executor.staging import stage
from flagcx.foreign_arrays import any_immutable, is_immutable
from flagcx.fusion.cache import Bound, identities
from flagcx.fusion.known_lists import ArraysChanged
from flagcx.fusion.reductions import Reductions

if TYPE_CHECKING:
    from flagcx.communicator.options import A, B, Either, Later, Now, Unpack
    from flagcx.compression import Decision
    from flagcx.executor.work import Work

_IS_PLAIN = attrgetter("flags.carray")


@overload
def allreduce(
    comm: Caller, x: A, op: Op = ..., *, out: None = ..., compression: Any = ..., **options: Unpack[Now]
) -> A: ...
@overload
def allreduce(
    comm: Caller, x: Any, op: Op = ..., *, out: B, compression: Any = ..., **options: Unpack[Now]
) -> B: ...
@overload
def allreduce(
    comm: Caller, x: A, op: Op = ..., *, out: None = ..., compression: Any = ..., **options: Unpack[Later]
) -> Work[A]: ...
@overload
def allreduce(
    comm: Caller, x: Any, op: Op = ..., *, out: Any = ..., compression: Any = ..., **options: Unpack[Either]
) -> Any: ...
@refuses_foreign("x")
def allreduce(
    comm: Caller,
    x: Any = None,
    op: Op = "sum",
    *more: NoReturn,
    out: Any = None,
    algorithm: str | None = None,
    compression: Any = None,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Combines the arrays of all ranks, element by element; every rank gets the result.

    Args:
        x: Array of any shape, strides and dtype of the table; the same count and dtype on every rank, while
            shapes may differ, as in MPI: elements meet in the order of C. Replaced by the result, unless
            ``out`` is given. Or a list of arrays, of any mix of dtypes: they
            travel in few messages, which is far faster for many small ones.
        op: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor",
            ``fc.scaled_sum(factor)``, or any associative and commutative binary NumPy ufunc. The
            algorithm says in which order contributions are combined, the same for every rank: "one_shot",
            "two_shot" and "direct" go by rank, "recursive_doubling" puts the lower rank's first, rings,
            trees and the others a rank's own before what arrives. "avg" divides the sum and rounds
            once, integers toward zero; integers, half precision and fp8 are added up in a wider dtype
            by every algorithm but NCCL's own, so that no sum overflows.
        out: Array for the result; ``x`` is then left as it is. For a list, a list of as many.
        algorithm: See ``Communicator``.
        compression: How a sum or average of floating-point numbers travels: "fp16", "bf16", "fp8",
            "int8", "int4", "topk", "randomk", "powersgd", "sparse", "auto", a codec, or a slot of a
            ``Feedback``; see ``flagcx.compression``. Uncompressed if None.
        async_op: See ``Communicator``.
        stream: See ``Communicator``.

    Returns:
        ``x``, or ``out`` where it is given. The same bits on every rank; a warning says where a rank's
        floating-point mode (flushing subnormal numbers to zero) stands against that.

    Example:
        >>> comm.allreduce(gradient, op="avg")  # doctest: +SKIP
    """
    if more or foreign:
        refuse(allreduce, more, foreign)
    group = comm._group
    if (
        group is not None
        and out is algorithm is compression is stream is None
        and not async_op
        and group.add_quickly(x, op)
    ):
        return x
    if compression is not None or stream is not None:
        return _with_options(comm, x, op, out, algorithm, compression, async_op, stream)
    device = comm._device
    if device is not None and x.__class__ is device.array_class:
        if out is None:
            plan = device.quick.get((x.shape, x.dtype, op, algorithm))
            if plan is None or async_op or not device.is_contiguous(x):
                return _checked(comm, x, op, out, algorithm, async_op)
            device.run(plan, x, x)
            return x
        if not async_op and device.is_apart(out, x):
            plan = device.quick.get((x.shape, x.dtype, op, algorithm, out.shape, out.dtype))
            if plan is not None and device.is_contiguous(x):
                device.run(plan, x, out)
                return out
        return _checked(comm, x, op, out, algorithm, async_op)
    executor = comm._host
    try:
        if out is None:
            run = executor.quick.get((x.shape, x.dtype, op, algorithm))
        else:
            run = executor.quick.get((x.shape, x.dtype, op, algorithm, out.shape, out.dtype))
    except (AttributeError, TypeError):
        run = None
    if (
        run is not None
        and not async_op
        and x.__class__ is ndarray
        and x.flags.carray
        and (out is None or is_apart(out, x))
        and executor.turn.acquire(False)
    ):
        result = x if out is None else out
        try:
            executor.quietly(run, x, result)
        except BaseException as error:
            executor.broke(error)
            raise
        finally:
            executor.turn.release()
        if executor.noted:
            executor.float_errors.warn()
        return result
    return _checked(comm, x, op, out, algorithm, async_op)


def explain_compression(comm: Caller, x: Any, compression: Any = "auto") -> Decision:
    """Says what ``allreduce(x, compression=...)`` does, and why. All ranks must call it.

    Args:
        x: Array like those that are to be reduced; only its length and dtype count.
        compression: See ``allreduce``.

    Returns:
        A ``flagcx.compression.Decision``: the codec, the reason, the predicted times.

    Example:
        >>> print(comm.explain_compression(gradient))  # doctest: +SKIP
    """
    from flagcx.communicator import compressed

    return compressed.explain(comm, x, compression)


def _with_options(comm, x, op, out, algorithm, compression, async_op, stream) -> Any:
    """An all-reduce that is compressed, or enqueued on a stream of the caller's."""
    if stream is None:
        from flagcx.communicator import compressed

        def compress(x: Any, out: Any) -> Any:
            return compressed.allreduce(comm, x, op, out, algorithm, compression, async_op)

        return (
            functional.call(comm, compress, "allreduce", None, x, out)
            if is_immutable(x)
            else compress(x, out)
        )

    def call(x: Any, out: Any) -> Any:
        return allreduce(
            comm, x, op, out=out, algorithm=algorithm, compression=compression, async_op=async_op
        )

    return comm.run_on(stream, call, (x, out))


def _checked(comm: Caller, x: Any, op: Op, out: Any, algorithm: str | None, async_op: bool) -> Any:
    """An all-reduce unlike those before."""
    if isinstance(x, (list, tuple)):
        return _allreduce_many(comm, x, op, out, algorithm, async_op)
    group = comm._group
    if group is None or is_immutable(x):
        return comm.call("allreduce", x, out, op=op, algorithm=algorithm, async_op=async_op)
    refuse_async(async_op)
    return _add(comm, group.reductions(), x, op, out, algorithm)


def _add(
    comm: Caller,
    reductions: Reductions,
    x: Any,
    op: Op,
    out: Any,
    algorithm: str | None,
    names: tuple[str, str] = ("x", "out"),
) -> Any:
    """Adds an all-reduce to those that will be made together; returns what the caller gets."""
    check_algorithm(algorithm)
    executor = comm.executor_of(x)
    try:
        sendbuf, recvbuf, _, value = buffers_of(executor, "allreduce", None, x, out, names)
    except ArgumentError as error:
        comm.note_refusal(error)
        raise
    dtype = dtype_of(sendbuf.dtype)
    resolved = resolve_op(op, dtype)
    staging = stage(executor, sendbuf, recvbuf)
    if staging is not None:
        sendbuf, recvbuf = staging.sendbuf, staging.recvbuf
        reductions.staged.append(staging)
    sendbuf, in_place = untangle("allreduce", comm.rank, sendbuf, recvbuf)
    reductions.add(executor, recvbuf if in_place else sendbuf, recvbuf, dtype, resolved, op, algorithm)
    if sendbuf is x and out is None and algorithm is None:
        reductions.remember(x, op, _fits(comm, executor))
    return value


def _fits(comm: Caller, executor: Executor) -> Callable[[Any], bool]:
    """Tells whether an array like one that was checked can be taken without a closer look."""
    device = comm._device
    return device.is_contiguous if device is not None and executor is device else _IS_PLAIN


def _allreduce_many(
    comm: Caller, xs: Sequence[Any], op: Op, outs: Any, algorithm: str | None, async_op: bool
) -> Any:
    """All-reduces of a list of arrays, in few messages."""
    check_many(xs, outs)
    if outs is None and any_immutable(xs):
        again = partial(_allreduce_many, comm, op=op, algorithm=algorithm, async_op=async_op)
        return functional.call_with_many(comm, lambda xs, outs: again(xs, outs=outs), xs)
    value = xs if outs is None else outs
    if outs is None and not async_op and comm._group is None:
        xs = _left_to_reduce(comm, xs, op, algorithm)
        if not xs:
            return value
    bound = _bound(comm, xs, op, algorithm) if outs is None and comm._group is None else None
    if bound is not None:
        assert comm._device is not None
        arrays = [*xs]  # the caller may change its list while the work goes on
        what = f"allreduce of {len(xs)} arrays"
        return comm.run(comm._device, bound, arrays, arrays, value, async_op, what)
    reductions = Reductions(comm.fusion_of)
    i = 0
    while i < len(xs):
        out, names = None if outs is None else outs[i], (f"x[{i}]", f"out[{i}]")
        _add(comm, reductions, xs[i], op, out, algorithm, names)
        i += 1
        if outs is None and algorithm is None:
            i = reductions.add_many(xs, i, op)
    if comm._group is not None:
        refuse_async(async_op)
        comm._group.append(reductions)
    elif async_op:
        return reductions.start(value)
    else:
        reductions.run()
    return value


def _left_to_reduce(comm: Caller, xs: Sequence[Any], op: Op, algorithm: str | None) -> Sequence[Any]:
    """Reduces a list of NumPy arrays that came before; returns what is left of it to be reduced."""
    if not xs or xs[0].__class__ is not ndarray:
        return xs
    lists, names = comm.fusion_of(comm._host).lists, (((op, algorithm, 0),), identities(xs))
    known = lists.find(names)
    if known is None:
        return xs
    try:
        comm._host.run(known, xs, xs)
    except ArraysChanged as changed:
        lists.drop(names)
        return [xs[number] for number in changed.left]
    return []


def _bound(comm: Caller, xs: Sequence[Any], op: Op, algorithm: str | None) -> Bound | None:
    """What was bound to a list of arrays of GPUs that came before."""
    device = comm._device
    if device is None or not xs or xs[0].__class__ is not device.array_class:
        return None
    bindings = comm.fusion_of(device).bindings
    return None if bindings is None else bindings.of_arrays((((op, algorithm, 0),), identities(xs)))
