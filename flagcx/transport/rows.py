"""All-reduces of rows with an epilogue: what they are, and how a kernel for rows is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flagcx.dtypes import DType
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.epilogue import COLUMN, ELEMENT, ONE, ROW, Epilogue
from flagcx.kernels.peer import WARP, PeerArgs
from flagcx.kernels.rows import NAME, ROW_THREADS, RowArgs, RowKernel
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


@dataclass(frozen=True, slots=True)
class RowShape:
    """How the threads of a block share a row.

    Attributes:
        packs: Packs of 16 bytes of the row, the last of which may be partly filled.
        pieces: Packs that a thread holds.
        threads: Threads of a block.

    Example:
        >>> RowShape.of(5120, 2)
        RowShape(packs=640, pieces=2, threads=320)
    """

    packs: int
    pieces: int
    threads: int

    @classmethod
    def of(cls, columns: int, itemsize: int) -> RowShape:
        """The shape for rows of so many elements of ``itemsize`` bytes."""
        packs = -(-columns // (_PACK_NBYTES // itemsize))
        pieces = max(-(-packs // ROW_THREADS), 1)
        held = max(-(-packs // pieces), 1)
        return cls(packs, pieces, -(-held // WARP) * WARP)


class RowLaunch:
    """A kernel for rows with prepared arguments.

    Args:
        cupy: The CuPy module.
        device: The GPU.
        kernel: The kernel.
        rows: The operation.
        blocks: Blocks of threads.
        a: The arguments that it shares with other kernels.
        share: Packs of a row that each rank adds up.
        ahead: Rows that a block sends before it finishes one.
    """

    __slots__ = ("_args", "_blocks", "_function", "_keep", "_launch", "_params", "_threads")

    def __init__(
        self,
        cupy: Any,
        device: int,
        kernel: RowKernel,
        rows: Rows,
        blocks: int,
        a: PeerArgs,
        share: int = 0,
        ahead: int = 0,
    ) -> None:
        shape = RowShape.of(rows.columns, rows.dtype.numpy.itemsize)
        self._launch, self._blocks, self._threads = cupy.cuda.driver.launchKernel, blocks, shape.threads
        self._function: Any = load_kernel(cupy, device, kernel.source(), NAME) if blocks else None
        self._args = args = RowArgs(
            a=a, rows=rows.rows, columns=rows.columns, packs=shape.packs, share=share, ahead=ahead
        )
        args.numbers[: len(rows.epilogue.numbers)] = rows.epilogue.numbers
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._keep, self._params = pointers, ctypes.addressof(pointers)

    def __call__(self, source: int, target: int, operands: Sequence[int], stream: Any) -> None:
        """Enqueues the kernel.

        Args:
            source: Address of the rows.
            target: Address of the result.
            operands: Addresses of the epilogue's operands; 0 where there is none.
            stream: The stream.
        """
        if not self._blocks:
            return
        args = self._args
        args.a.sendbuf, args.a.recvbuf = source, target
        args.arrays[: len(operands)] = operands
        self._launch(
            self._function.ptr, self._blocks, 1, 1, self._threads, 1, 1, 0, stream.ptr, self._params, 0
        )


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
