"""All-reduce: of an array, of a list of arrays, and in a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.arguments import untangle
from flagcx.communicator.dispatch import Dispatch, refuse_async
from flagcx.communicator.streams import run_on
from flagcx.dtypes import DType, Op, ReduceOp, dtype_of, resolve_op
from flagcx.errors import ArgumentError
from flagcx.executor.host import Executor
from flagcx.fusion.cache import Bound
from flagcx.fusion.group import Reductions

if TYPE_CHECKING:
    from flagcx.compression import Decision

_IS_PLAIN = attrgetter("flags.carray")


def _is_apart(out: Any, x: np.ndarray) -> bool:
    """Whether a result can go to ``out`` without a closer look: a plain array that does not overlap ``x``."""
    return out.__class__ is np.ndarray and out.flags.carray and not np.may_share_memory(out, x)


class AllReduce(Dispatch):
    """The operation that training waits for, with quick ways for calls like earlier ones."""

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
            return run_on(stream, AllReduce.allreduce, self, (x, op), options)
        if compression is not None:
            from flagcx.communicator import compressed

            return compressed.allreduce(self, x, op, out, algorithm, compression, async_op)
        executor = self._executor
        device = self._device
        if device is not None and x.__class__ is device.array_class:
            plan = device.quick.get((x.shape, x.dtype, op, algorithm))
            if plan is None or out is not None or async_op or not device.is_contiguous(x):
                return self._allreduce(x, op, out, algorithm, async_op)
            device.run(plan, x, x)
            return x
        try:
            key = (x.shape, x.dtype, op) if out is None else (x.shape, x.dtype, op, out.shape, out.dtype)
            plan = executor.quick.get(key)
        except (AttributeError, TypeError):
            plan = None
        if (
            plan is not None
            and algorithm is None
            and not async_op
            and x.__class__ is np.ndarray
            and x.flags.carray
            and (out is None or _is_apart(out, x))
            and executor.turn.acquire(False)
        ):
            result = x if out is None else out
            try:
                plan.run(x, result)
            except BaseException as error:
                executor.broke(error)
                raise
            finally:
                executor.turn.release()
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
        executor = self._executor_of(x)
        given, result, dtype, resolved = self._reduced(executor, x, op, out, "x", "out")
        given, in_place = untangle("allreduce", self.rank, given, result)
        value = x if out is None else out
        if group is not None:
            refuse_async(async_op)
            reductions = group.reductions()
            reductions.add(executor, result if in_place else given, result, dtype, resolved, op, algorithm)
            if given is x and out is None and algorithm is None:
                reductions.remember(x, op, self._fits(executor))
            return value
        plan = executor.find("allreduce", given.size, dtype, resolved, None, algorithm, in_place)
        if given is x and in_place:
            if executor is self._device:
                executor.remember((x.shape, x.dtype, op, algorithm), plan)
            elif algorithm is None:
                executor.remember((x.shape, x.dtype, op), plan)
        elif given is x and result is out and algorithm is None and executor is self._executor:
            executor.remember((x.shape, x.dtype, op, out.shape, out.dtype), plan)
        return self._go(executor, plan, given, result, value, async_op, "allreduce")

    def _fits(self, executor: Executor) -> Callable[[Any], bool]:
        """Tells whether an array like one that was checked can be taken without a closer look."""
        device = self._device
        return device.is_contiguous if device is not None and executor is device else _IS_PLAIN

    def _reduced(
        self, executor: Executor, x: Any, op: Op, out: Any, what: str, out_what: str
    ) -> tuple[Any, Any, DType, ReduceOp]:
        """Takes the arrays of an all-reduce: INPUT and OUTPUT, their dtype, and the operation."""
        given = executor.take(x, what, out is None)
        dtype = dtype_of(given.dtype)
        resolved = resolve_op(op, dtype)
        result = given if out is None else executor.result(out, out_what, given.shape, given.dtype)
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
            executor = self._executor_of(x)
            given, result, dtype, resolved = self._reduced(executor, x, op, out, f"x[{i}]", f"out[{i}]")
            given, in_place = untangle("allreduce", self.rank, given, result)
            reductions.add(executor, result if in_place else given, result, dtype, resolved, op, algorithm)
            i += 1
            if plain and given is x:
                reductions.remember(x, op, self._fits(executor))
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
        bindings = self._fusion_of(device).bindings
        return None if bindings is None else bindings.of_arrays((((op, algorithm, 0),), tuple(map(id, xs))))
