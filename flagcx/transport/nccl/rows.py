"""All-reduces of rows on GPUs in two launches or more: any plan that adds them up, then the epilogue."""

from __future__ import annotations

from typing import Any

from flagcx.kernels.peer import PeerArgs, PeerLayout
from flagcx.kernels.rows import LOCAL, RowKernel, RowShape
from flagcx.transport.base import Plan
from flagcx.transport.device import address, check_alignment
from flagcx.transport.nccl.plans import Scratch
from flagcx.transport.rows import RowArrays, RowLaunch, Rows
from flagcx.transport.stream_order import StreamOrder

_BLOCKS_PER_PROCESSOR = 4


class AddedRows:
    """Adds up the rows, into the result where it has their dtype, then applies the epilogue to them there.

    Args:
        cupy: The CuPy module.
        device: The GPU.
        order: The communicator's order.
        scratch: Where memory for callers' graphs is kept.
        rows: The operation.
        plan: Adds up the rows.
    """

    def __init__(
        self, cupy: Any, device: int, order: StreamOrder, scratch: Scratch, rows: Rows, plan: Plan
    ) -> None:
        self._cupy, self._order, self._scratch, self._plan, self._rows = cupy, order, scratch, plan, rows
        shape = RowShape.of(rows.columns, rows.dtype.numpy.itemsize)
        kernel = RowKernel(LOCAL, rows.dtype, rows.epilogue, PeerLayout(1, 1, True), shape, True)
        most = _BLOCKS_PER_PROCESSOR * cupy.cuda.Device(device).attributes["MultiProcessorCount"]
        self._launch = RowLaunch(cupy, device, kernel, rows, min(rows.rows, most), PeerArgs())

    def run(self, sendbuf: RowArrays, recvbuf: Any) -> None:
        """Enqueues the call on the current stream."""
        order, rows = self._order, self._rows
        places = [address(array, order) for array in sendbuf.operands]
        for dtype, at in zip(rows.epilogue.dtypes, places, strict=True):
            check_alignment(1 if dtype is None else dtype.numpy.alignment, at)
        target = address(recvbuf, order)
        check_alignment(rows.epilogue.out.numpy.alignment, target)
        stream = self._cupy.cuda.get_current_stream()
        total = recvbuf if rows.dtype == rows.epilogue.out else self._array(stream)
        self._plan.run(sendbuf.x, total)
        stream = order.enter(order.what)
        self._launch([address(total, order), target, *places], stream)
        order.leave(stream)

    def _array(self, stream: Any) -> Any:
        """A new array for the sum; one for a caller's graph is kept as long as the communicator."""
        nbytes = max(self._rows.count * self._rows.dtype.numpy.itemsize, 1)
        capturing = self._order.is_capturing(stream)
        memory = self._scratch.private(nbytes) if capturing else self._cupy.cuda.alloc(nbytes)
        made = self._cupy.ndarray((self._rows.count,), self._rows.dtype.numpy, memory)
        if capturing:
            self._scratch.pin(self, made)
        return made

    def __repr__(self) -> str:
        return f"<AddedRows {self._rows.describe()}, {self._plan}>"
