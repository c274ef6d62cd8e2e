"""The collectives with blocks of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.arguments import blocks_of, check_rank
from flagcx.communicator.dispatch import Dispatch, Op, refuse_async, untangle
from flagcx.communicator.streams import on_stream, run_on
from flagcx.dtypes import DType, ReduceOp, dtype_of, resolve_op
from flagcx.engine import Engine
from flagcx.errors import ArgumentError
from flagcx.familiar import Bound
from flagcx.group import Pending, Reductions

if TYPE_CHECKING:
    from flagcx.compression import Decision

_IS_PLAIN = attrgetter("flags.carray")


def _is_apart(out: Any, x: np.ndarray) -> bool:
    """Whether a result can go to ``out`` without a closer look: a plain array that does not overlap ``x``."""
    return out.__class__ is np.ndarray and out.flags.carray and not np.may_share_memory(out, x)


class EvenCollectives(Dispatch):
    """Operations on arrays of which every rank has one of the same size."""

    def allreduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        compression: Any = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combines the arrays of all ranks, element by element; every rank gets the result.

        Args:
            x: Array of any shape and dtype of the table; the same count and dtype on every rank. Replaced
                by the result, unless ``out`` is given. Or a list of arrays, of any mix of dtypes: they
                travel in few messages, which is far faster for many small ones.
            op: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor",
                ``fc.scaled_sum(factor)``, or any associative and commutative binary NumPy ufunc.
            out: Array for the result; ``x`` is then left as it is. For a list, a list of as many.
            algorithm: See the class ``Communicator``.
            compression: How a sum or average of floating-point numbers travels: "fp16", "bf16", "fp8",
                "int8", "int4", "topk", "randomk", "powersgd", "sparse", "auto", a codec, or a slot of a
                ``Feedback``; see ``flagcx.compression``. Plainly if None.
            async_op: See the class ``Communicator``.
            stream: See the class ``Communicator``.

        Returns:
            ``x``, or ``out`` where it is given. The same bits on every rank.

        Example:
            >>> comm.allreduce(gradient, op="avg")  # doctest: +SKIP
        """
        group = self._group
        if (
            group is not None
            and out is algorithm is compression is stream is None
            and not async_op
            and group.add_quickly(x, op)
        ):
            return x
        if stream is not None:
            options = {"out": out, "algorithm": algorithm, "compression": compression, "async_op": async_op}
            return run_on(stream, EvenCollectives.allreduce, self, (x, op), options)
        if compression is not None:
            from flagcx.communicator import compressed

            return compressed.allreduce(self, x, op, out, algorithm, compression, async_op)
        engine = self._engine
        device = self._device
        if device is not None and x.__class__ is device.array_class:
            plan = device.quick.get((x.shape, x.dtype, op, algorithm))
            if plan is None or out is not None or async_op or not device.is_contiguous(x):
                return self._allreduce(x, op, out, algorithm, async_op)
            device.run(plan, x, x)
            return x
        try:
            key = (x.shape, x.dtype, op) if out is None else (x.shape, x.dtype, op, out.shape, out.dtype)
            plan = engine.quick.get(key)
        except (AttributeError, TypeError):
            plan = None
        if (
            plan is not None
            and algorithm is None
            and not async_op
            and x.__class__ is np.ndarray
            and x.flags.carray
            and (out is None or _is_apart(out, x))
            and engine.turn.acquire(False)
        ):
            result = x if out is None else out
            try:
                plan.run(x, result)
            except BaseException as error:
                engine.broke(error)
                raise
            finally:
                engine.turn.release()
            return result
        return self._allreduce(x, op, out, algorithm, async_op)

    def explain_compression(self, x: Any, compression: Any = "auto") -> Decision:
        """What ``allreduce(x, compression=...)`` does, and why. All ranks must call it.

        Args:
            x: Array like those that are to be reduced; only its length and dtype count.
            compression: See ``allreduce``.

        Returns:
            A ``flagcx.compression.Decision``: the codec, the reason, the predicted times.

        Example:
            >>> print(comm.explain_compression(gradient))  # doctest: +SKIP
        """
        from flagcx.communicator import compressed

        return compressed.explain(self, x, compression)

    def _allreduce(self, x: Any, op: Op, out: Any, algorithm: str | None, async_op: bool) -> Any:
        if isinstance(x, (list, tuple)):
            return self._allreduce_many(x, op, out, algorithm, async_op)
        group = self._group
        engine = self._engine_of(x)
        given, result, dtype, resolved = self._reduced(engine, x, op, out, "x", "out")
        given, in_place = untangle("allreduce", self.rank, given, result)
        value = x if out is None else out
        if group is not None:
            refuse_async(async_op)
            reductions = group.reductions()
            reductions.add(engine, result if in_place else given, result, dtype, resolved, op, algorithm)
            if given is x and out is None and algorithm is None:
                reductions.remember(x, op, self._fits(engine))
            return value
        plan = engine.find("allreduce", given.size, dtype, resolved, None, algorithm, in_place)
        if given is x and in_place:
            if engine is self._device:
                engine.remember((x.shape, x.dtype, op, algorithm), plan)
            elif algorithm is None:
                engine.remember((x.shape, x.dtype, op), plan)
        elif given is x and result is out and algorithm is None and engine is self._engine:
            engine.remember((x.shape, x.dtype, op, out.shape, out.dtype), plan)
        return self._go(engine, plan, given, result, value, async_op, "allreduce")

    def _fits(self, engine: Engine) -> Callable[[Any], bool]:
        """Tells whether an array like one that was checked can be taken without a closer look."""
        device = self._device
        return device.is_contiguous if device is not None and engine is device else _IS_PLAIN

    def _reduced(
        self, engine: Engine, x: Any, op: Op, out: Any, what: str, out_what: str
    ) -> tuple[Any, Any, DType, ReduceOp]:
        """Takes the arrays of an all-reduce: INPUT and OUTPUT, their dtype, and the operation."""
        given = engine.take(x, what, out is None)
        dtype = dtype_of(given.dtype)
        resolved = resolve_op(op, dtype)
        result = given if out is None else engine.result(out, out_what, given.shape, given.dtype)
        return given, result, dtype, resolved

    def _allreduce_many(
        self, xs: Sequence[Any], op: Op, outs: Any, algorithm: str | None, async_op: bool
    ) -> Any:
        """All-reduces of a list of arrays, in few messages."""
        if outs is not None and (not isinstance(outs, (list, tuple)) or len(outs) != len(xs)):
            got = f"{len(outs)} arrays" if isinstance(outs, (list, tuple)) else type(outs).__name__
            raise ArgumentError(f"out must be a list of {len(xs)} arrays, one for each of x; got {got}")
        bound = self._bound(xs, op, algorithm) if outs is None and self._group is None else None
        if bound is not None:
            assert self._device is not None
            given = [*xs]  # the caller may change his list while the work goes on
            return self._go(self._device, bound, given, given, xs, async_op, f"allreduce of {len(xs)} arrays")
        reductions = Reductions(self._fusion_of)
        plain = outs is None and algorithm is None
        i = 0
        while i < len(xs):
            x, out = xs[i], None if outs is None else outs[i]
            engine = self._engine_of(x)
            given, result, dtype, resolved = self._reduced(engine, x, op, out, f"x[{i}]", f"out[{i}]")
            given, in_place = untangle("allreduce", self.rank, given, result)
            reductions.add(engine, result if in_place else given, result, dtype, resolved, op, algorithm)
            i += 1
            if plain and given is x:
                reductions.remember(x, op, self._fits(engine))
                i = reductions.add_many(xs, i, op)
        value = xs if outs is None else outs
        if self._group is not None:
            refuse_async(async_op)
            self._group.append(reductions)
        elif async_op:
            return reductions.start(value)
        else:
            reductions.run()
        return value

    def _bound(self, xs: Sequence[Any], op: Op, algorithm: str | None) -> Bound | None:
        """What was bound to a list of arrays of GPUs that came before."""
        device = self._device
        if device is None or not xs or xs[0].__class__ is not device.array_class:
            return None
        familiar = self._fusion_of(device).familiar
        return None if familiar is None else familiar.of_arrays((((op, algorithm, 0),), tuple(map(id, xs))))

    @on_stream
    def reduce(
        self,
        x: Any,
        op: Op = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combines the arrays of all ranks; the root gets the result.

        Args:
            x: Array; at the root it is replaced by the result, unless ``out`` is given. Elsewhere it is
                left as it is.
            op: See ``allreduce``.
            root: The rank that gets the result.
            out: Array for the result, at the root.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            At the root ``x``, or ``out`` where it is given; elsewhere None.
        """
        root = check_rank(root, self.size, "root")
        at_root = self.rank == root
        engine = self._engine_of(x)
        given = engine.take(x, "x", at_root and out is None)
        result = None
        if at_root:
            result = given if out is None else engine.result(out, "out", given.shape, given.dtype)
        value = (x if out is None else out) if at_root else None
        resolved = resolve_op(op, dtype_of(given.dtype))
        return self._call(
            engine,
            "reduce",
            given,
            result,
            given.size,
            value,
            op=resolved,
            root=root,
            algorithm=algorithm,
            async_op=async_op,
        )

    @on_stream
    def broadcast(
        self, x: Any, root: int = 0, *, algorithm: str | None = None, async_op: bool = False
    ) -> Any:
        """Gives every rank the root's array.

        Args:
            x: Array; the same count and dtype on every rank. Replaced, except at the root.
            root: The rank whose array it is.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``x``.
        """
        root = check_rank(root, self.size, "root")
        engine = self._engine_of(x)
        array = engine.take(x, "x", self.rank != root)
        given = array if self.rank == root else None
        return self._call(
            engine,
            "broadcast",
            given,
            array,
            array.size,
            x,
            root=root,
            algorithm=algorithm,
            async_op=async_op,
        )

    @on_stream
    def allgather(
        self, x: Any, *, out: Any = None, algorithm: str | None = None, async_op: bool = False
    ) -> Any:
        """Gives every rank the arrays of all ranks, in rank order.

        Args:
            x: Array of the same shape and dtype on every rank. It may be this rank's block of ``out``.
            out: Array of ``size`` times as many elements, for the result.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or a new array of shape ``(size, *x.shape)``.
        """
        engine = self._engine_of(x)
        given = engine.take(x, "x", False)
        result = engine.result(out, "out", (self.size, *given.shape), given.dtype)
        value = result if out is None else out
        return self._call(
            engine, "allgather", given, result, given.size, value, algorithm=algorithm, async_op=async_op
        )

    @on_stream
    def reduce_scatter(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combines the arrays of all ranks; rank r gets block r of the result.

        Args:
            x: Array whose first axis is a multiple of ``size``; left as it is.
            op: See ``allreduce``.
            out: Array for this rank's block.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or a new array of shape ``(x.shape[0] // size, *x.shape[1:])``.
        """
        engine = self._engine_of(x)
        given = engine.take(x, "x", False)
        count, shape = blocks_of(given, self.size, "x")
        result = engine.result(out, "out", shape, given.dtype)
        resolved = resolve_op(op, dtype_of(given.dtype))
        value = result if out is None else out
        return self._call(
            engine,
            "reduce_scatter",
            given,
            result,
            count,
            value,
            op=resolved,
            algorithm=algorithm,
            async_op=async_op,
        )

    @on_stream
    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives the root the arrays of all ranks, in rank order.

        Args:
            x: Array of the same shape and dtype on every rank.
            root: The rank that gets them.
            out: Array of ``size`` times as many elements, at the root.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            At the root ``out``, or a new array of shape ``(size, *x.shape)``; elsewhere None.
        """
        root = check_rank(root, self.size, "root")
        engine = self._engine_of(x)
        given = engine.take(x, "x", False)
        result = None
        if self.rank == root:
            result = engine.result(out, "out", (self.size, *given.shape), given.dtype)
        value = result if out is None else out if self.rank == root else None
        return self._call(
            engine,
            "gather",
            given,
            result,
            given.size,
            value,
            root=root,
            algorithm=algorithm,
            async_op=async_op,
        )

    @on_stream
    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives every rank its block of the root's array.

        Args:
            x: At the root, an array whose first axis is a multiple of ``size``; elsewhere None.
            root: The rank whose array it is.
            out: Array for this rank's block; must be given on all ranks but the root.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or at the root a new array of shape ``(x.shape[0] // size, *x.shape[1:])``.
        """
        root = check_rank(root, self.size, "root")
        if self.rank != root:
            if out is None:
                raise ArgumentError(f"scatter needs out= on rank {self.rank}: only the root knows the shape")
            engine = self._engine_of(out)
            result = engine.take(out, "out", True)
            return self._call(
                engine,
                "scatter",
                None,
                result,
                result.size,
                out,
                root=root,
                algorithm=algorithm,
                async_op=async_op,
            )
        engine = self._engine_of(x)
        given = engine.take(x, "x", False)
        count, shape = blocks_of(given, self.size, "x")
        result = engine.result(out, "out", shape, given.dtype)
        value = result if out is None else out
        return self._call(
            engine, "scatter", given, result, count, value, root=root, algorithm=algorithm, async_op=async_op
        )

    @on_stream
    def alltoall(
        self, x: Any, *, out: Any = None, algorithm: str | None = None, async_op: bool = False
    ) -> Any:
        """Sends block q of this rank's array to rank q, and gets block ``rank`` of everybody's.

        Args:
            x: Array whose first axis is a multiple of ``size``; left as it is.
            out: Array of the same number of elements.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or a new array of the shape of ``x``; block q is from rank q.
        """
        engine = self._engine_of(x)
        given = engine.take(x, "x", False)
        count, _ = blocks_of(given, self.size, "x")
        result = engine.result(out, "out", given.shape, given.dtype)
        value = result if out is None else out
        return self._call(
            engine, "alltoall", given, result, count, value, algorithm=algorithm, async_op=async_op
        )

    def barrier(self) -> None:
        """Waits until every rank has come."""
        engine = self._engine
        unsigned = dtype_of(np.uint8)
        plan = engine.find("barrier", 0, unsigned, resolve_op("max", unsigned))
        if self._group is not None:
            self._put_off(Pending(lambda: engine.run(plan, None, None)), False, None)
        else:
            engine.run(plan, None, None)
