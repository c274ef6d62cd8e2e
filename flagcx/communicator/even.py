"""The collectives with blocks of one size."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.arguments import blocks_of, check_rank
from flagcx.communicator.allreduce import AllReduce
from flagcx.communicator.streams import on_stream
from flagcx.dtypes import Op, dtype_of, resolve_op
from flagcx.errors import ArgumentError
from flagcx.fusion.group import Pending


class EvenCollectives(AllReduce):
    """Operations on arrays of which every rank has one of the same size."""

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
        executor = self._executor_of(x)
        given = executor.take(x, "x", at_root and out is None)
        result = None
        if at_root:
            result = given if out is None else executor.result(out, "out", given.shape, given.dtype)
        value = (x if out is None else out) if at_root else None
        resolved = resolve_op(op, dtype_of(given.dtype))
        return self._call(
            executor,
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
        executor = self._executor_of(x)
        array = executor.take(x, "x", self.rank != root)
        given = array if self.rank == root else None
        return self._call(
            executor,
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
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        result = executor.result(out, "out", (self.size, *given.shape), given.dtype)
        value = result if out is None else out
        return self._call(
            executor, "allgather", given, result, given.size, value, algorithm=algorithm, async_op=async_op
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
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        count, shape = blocks_of(given, self.size, "x")
        result = executor.result(out, "out", shape, given.dtype)
        resolved = resolve_op(op, dtype_of(given.dtype))
        value = result if out is None else out
        return self._call(
            executor,
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
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        result = None
        if self.rank == root:
            result = executor.result(out, "out", (self.size, *given.shape), given.dtype)
        value = result if out is None else out if self.rank == root else None
        return self._call(
            executor,
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
            executor = self._executor_of(out)
            result = executor.take(out, "out", True)
            return self._call(
                executor,
                "scatter",
                None,
                result,
                result.size,
                out,
                root=root,
                algorithm=algorithm,
                async_op=async_op,
            )
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        count, shape = blocks_of(given, self.size, "x")
        result = executor.result(out, "out", shape, given.dtype)
        value = result if out is None else out
        return self._call(
            executor,
            "scatter",
            given,
            result,
            count,
            value,
            root=root,
            algorithm=algorithm,
            async_op=async_op,
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
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        count, _ = blocks_of(given, self.size, "x")
        result = executor.result(out, "out", given.shape, given.dtype)
        value = result if out is None else out
        return self._call(
            executor, "alltoall", given, result, count, value, algorithm=algorithm, async_op=async_op
        )

    def barrier(self) -> None:
        """Waits until every rank has come."""
        executor = self._executor
        unsigned = dtype_of(np.uint8)
        plan = executor.find("barrier", 0, unsigned, resolve_op("max", unsigned))
        if self._group is not None:
            self._put_off(Pending(lambda: executor.run(plan, None, None)), False, None)
        else:
            executor.run(plan, None, None)
