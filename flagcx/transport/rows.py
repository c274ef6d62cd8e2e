"""All-reduces of rows with an epilogue: what they are, and how a kernel for rows is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import and_
from typing import Any, NamedTuple

import numpy as np

from flagcx.dtypes import DType
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.epilogue import COLUMN, ELEMENT, ONE, ROW, Epilogue
from flagcx.kernels.peer import PeerArgs
from flagcx.kernels.rows import NAME, RowArgs, RowKernel
from flagcx.transport.base import Plan

_PACK_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """An all-reduce of rows with an epilogue, less the arrays.

    Attributes:
        rows: Number of rows.
        columns: Elements of a row.
        dtype: The dtype of the rows.
        epilogue: What is done with each row of the sum.
    """

    rows: int
    columns: int
    dtype: DType
    epilogue: Epilogue

    @property
    def count(self) -> int:
        """Elements of all rows."""
        return self.rows * self.columns

    def describe(self) -> str:
        """The operation in words that must be the same on every rank."""
        return f"rows of {self.columns}, then {self.epilogue.describe()}"


class RowArrays(NamedTuple):
    """What a rank gives to such a call: the ``sendbuf`` of its plan.

    Attributes:
        x: The rows.
        operands: The epilogue's operands, in order; None where the call has no such array.
    """

    x: Any
    operands: Sequence[Any]


class RowLaunch:
    """A kernel for rows with prepared arguments.

    Arrays that begin at multiples of 16 bytes have a kernel of their own. The other one is compiled when it
    is needed first; to the peers both are the same.

    Args:
        cupy: The CuPy module.
        device: The GPU.
        kernel: The kernel.
        rows: The operation.
        blocks: Blocks of threads.
        a: The arguments that it shares with other kernels.
    """

    __slots__ = (
        "_args",
        "_blocks",
        "_compiled",
        "_keep",
        "_launch",
        "_load",
        "_masks",
        "_params",
        "_threads",
    )

    def __init__(
        self, cupy: Any, device: int, kernel: RowKernel, rows: Rows, blocks: int, a: PeerArgs
    ) -> None:
        def load(aligned: bool) -> Any:
            return load_kernel(cupy, device, replace(kernel, aligned=aligned).source(), NAME)

        whole = rows.columns * rows.dtype.numpy.itemsize % _PACK_NBYTES == 0
        self._launch, self._blocks, self._threads = (
            cupy.cuda.driver.launchKernel,
            blocks,
            kernel.shape.threads,
        )
        self._load, self._compiled = load, {whole: load(whole)} if blocks else {}
        # Rows and result, and the operands that are read and written in packs.
        packs = [True, True, *(operand.shape in (ELEMENT, COLUMN) for operand in rows.epilogue.operands)]
        self._masks = [_PACK_NBYTES - 1 if pack else 0 for pack in packs] if whole else None
        self._args = args = RowArgs(a=a, rows=rows.rows)
        args.numbers[: len(rows.epilogue.numbers)] = rows.epilogue.numbers
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._keep, self._params = pointers, ctypes.addressof(pointers)

    def __call__(self, places: Sequence[int], stream: Any) -> None:
        """Enqueues the kernel.

        Args:
            places: Addresses of the rows, of the result, and of the epilogue's operands; 0 for none.
            stream: The stream.
        """
        if not self._blocks:
            return
        aligned = self._masks is not None and not any(map(and_, places, self._masks))
        function = self._compiled.get(aligned)
        if function is None:
            function = self._compiled[aligned] = self._load(aligned)
        args = self._args
        args.a.sendbuf, args.a.recvbuf = places[:2]
        args.arrays[: len(places) - 2] = places[2:]
        self._launch(function.ptr, self._blocks, 1, 1, self._threads, 1, 1, 0, stream.ptr, self._params, 0)


class HostRows:
    """The all-reduce of rows of the host, then the epilogue's counterpart.

    Args:
        rows: The operation.
        plan: Adds up the rows, out of place.
    """

    __slots__ = ("_plan", "_rows", "_shapes")

    def __init__(self, rows: Rows, plan: Plan) -> None:
        self._rows, self._plan = rows, plan
        shapes = {ELEMENT: (rows.rows, rows.columns), COLUMN: (rows.columns,), ROW: (rows.rows, 1), ONE: (1,)}
        self._shapes = [shapes[operand.shape] for operand in rows.epilogue.operands]

    def run(self, sendbuf: RowArrays, recvbuf: np.ndarray) -> None:
        """Runs the call once, on arrays of any shapes with as many elements."""
        shape = self._rows.rows, self._rows.columns
        total = np.empty(shape, sendbuf.x.dtype)
        self._plan.run(sendbuf.x, total)
        pairs = zip(sendbuf.operands, self._shapes, strict=True)
        operands = [None if array is None else array.reshape(like) for array, like in pairs]
        self._rows.epilogue.apply(total, operands, recvbuf.reshape(shape))

    def __repr__(self) -> str:
        return f"<HostRows {self._rows.describe()}>"
