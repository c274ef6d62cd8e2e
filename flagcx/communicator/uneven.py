"""The collectives with blocks of different sizes (MPI's v forms)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.arguments import check_counts, check_rank
from flagcx.communicator.even import EvenCollectives
from flagcx.communicator.streams import on_stream
from flagcx.dtypes import Op, dtype_of, resolve_op
from flagcx.errors import ArgumentError, ArrayError


class UnevenCollectives(EvenCollectives):
    """Operations on blocks whose sizes differ between ranks. Counts are elements; blocks lie end to end."""

    @on_stream
    def allgatherv(
        self,
        x: Any,
        counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives every rank the arrays of all ranks, end to end.

        Args:
            x: Array of ``counts[rank]`` elements.
            counts: Elements of every rank's array, the same list on every rank; asked for where not given.
            out: Array of ``sum(counts)`` elements.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or a new one-dimensional array.
        """
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        sizes = self._counts(given.size, counts)
        _check_own(given, sizes[self.rank], f"counts[{self.rank}]")
        result = executor.result(out, "out", (sum(sizes),), given.dtype)
        value = result if out is None else out
        return self._call(
            executor, "allgather", given, result, sizes, value, algorithm=algorithm, async_op=async_op
        )

    @on_stream
    def reduce_scatterv(
        self,
        x: Any,
        counts: Sequence[int],
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combines the arrays of all ranks; rank r gets ``counts[r]`` elements of the result.

        Args:
            x: Array of ``sum(counts)`` elements, blocks end to end; left as it is.
            counts: Elements of every rank's part, the same list on every rank.
            op: See ``allreduce``.
            out: Array of ``counts[rank]`` elements.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or a new one-dimensional array.
        """
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        sizes = check_counts(counts, self.size, "counts")
        _check_own(given, sum(sizes), "sum(counts)")
        result = executor.result(out, "out", (sizes[self.rank],), given.dtype)
        resolved = resolve_op(op, dtype_of(given.dtype))
        value = result if out is None else out
        return self._call(
            executor,
            "reduce_scatter",
            given,
            result,
            sizes,
            value,
            op=resolved,
            algorithm=algorithm,
            async_op=async_op,
        )

    @on_stream
    def gatherv(
        self,
        x: Any,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives the root the arrays of all ranks, end to end.

        Args:
            x: Array of ``counts[rank]`` elements.
            counts: Elements of every rank's array, the same list on every rank; asked for where not given.
            root: The rank that gets them.
            out: Array of ``sum(counts)`` elements, at the root.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            At the root ``out``, or a new one-dimensional array; elsewhere None.
        """
        root = check_rank(root, self.size, "root")
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        sizes = self._counts(given.size, counts)
        _check_own(given, sizes[self.rank], f"counts[{self.rank}]")
        result = value = None
        if self.rank == root:
            result = executor.result(out, "out", (sum(sizes),), given.dtype)
            value = result if out is None else out
        return self._call(
            executor, "gather", given, result, sizes, value, root=root, algorithm=algorithm, async_op=async_op
        )

    @on_stream
    def scatterv(
        self,
        x: Any,
        counts: Sequence[int],
        root: int = 0,
        *,
        out: Any = None,
        dtype: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives rank r ``counts[r]`` elements of the root's array.

        Args:
            x: At the root, an array of ``sum(counts)`` elements; elsewhere None.
            counts: Elements of every rank's part, the same list on every rank.
            root: The rank whose array it is.
            out: Array of ``counts[rank]`` elements.
            dtype: The element type; needed where neither ``x`` nor ``out`` tells it.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or a new one-dimensional array.
        """
        root = check_rank(root, self.size, "root")
        sizes = check_counts(counts, self.size, "counts")
        executor = self._executor_of(x if x is not None else out)
        given = None
        if self.rank == root:
            given = executor.take(x, "x", False)
            _check_own(given, sum(sizes), "sum(counts)")
            dtype = given.dtype
        elif out is not None:
            dtype = out.dtype
        elif dtype is None:
            raise ArgumentError(f"scatterv needs out= or dtype= on rank {self.rank}: only the root has x")
        result = executor.result(out, "out", (sizes[self.rank],), np.dtype(dtype))
        value = result if out is None else out
        return self._call(
            executor,
            "scatter",
            given,
            result,
            sizes,
            value,
            root=root,
            algorithm=algorithm,
            async_op=async_op,
        )

    @on_stream
    def alltoallv(
        self,
        x: Any,
        send_counts: Sequence[int],
        receive_counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends ``send_counts[q]`` elements to each rank q, and gets what everybody sends here.

        Args:
            x: Array of ``sum(send_counts)`` elements, blocks end to end.
            send_counts: Elements for each rank.
            receive_counts: Elements from each rank; asked for where not given.
            out: Array of ``sum(receive_counts)`` elements.
            algorithm: See the class ``Communicator``.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``, or a new one-dimensional array; blocks in rank order.
        """
        executor = self._executor_of(x)
        given = executor.take(x, "x", False)
        sent = check_counts(send_counts, self.size, "send_counts")
        _check_own(given, sum(sent), "sum(send_counts)")
        if receive_counts is None:
            receive_counts = self.alltoall(np.array(sent, np.int64)).tolist()
        received = check_counts(receive_counts, self.size, "receive_counts")
        result = executor.result(out, "out", (sum(received),), given.dtype)
        value = result if out is None else out
        return self._call(
            executor,
            "alltoall",
            given,
            result,
            (sent, received),
            value,
            algorithm=algorithm,
            async_op=async_op,
        )

    def _counts(self, own: int, counts: Sequence[int] | None) -> tuple[int, ...]:
        if counts is None:
            counts = self.allgather(np.array([own], np.int64)).reshape(-1).tolist()
        return check_counts(counts, self.size, "counts")


def _check_own(array: np.ndarray, count: int, what: str) -> None:
    if array.size != count:
        raise ArrayError(f"x has {array.size} elements, but {what} is {count}")
