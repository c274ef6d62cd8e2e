"""Averages on GPUs by algorithms of several hops, whose sums need a wider dtype than the array's."""

from __future__ import annotations

from typing import Any

from flagcx.kernels.average import MEAN, WIDEN, average_source
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.source import MAX_SOURCES, THREADS
from flagcx.schedule.model import Buffer, Schedule
from flagcx.transport.average import Average
from flagcx.transport.base import Call, Plan
from flagcx.transport.device import address, check_alignment
from flagcx.transport.nccl.plans import Scratch
from flagcx.transport.stream_order import StreamOrder

_MOST_BLOCKS = 1024


def adds_once(schedule: Schedule) -> bool:
    """Whether the launch that adds up all contributions divides too, so that no sum leaves its accumulator.

    The sums of ``two_shot`` travel before they are divided.
    """
    return schedule.size <= MAX_SOURCES and schedule.algorithm in ("one_shot", "direct")


class AveragedPlan:
    """Widens, adds up by a plan for the wider dtype, and divides and rounds once, all on the current stream.

    Args:
        cupy: The CuPy module.
        device: The GPU.
        order: The communicator's order.
        scratch: Where memory for callers' graphs is kept.
        call: The average.
        plan: Adds up arrays of the wider dtype.
        average: How averages are made.
        in_place: Whether ``plan`` works in place.
    """

    def __init__(
        self,
        cupy: Any,
        device: int,
        order: StreamOrder,
        scratch: Scratch,
        call: Call,
        plan: Plan,
        average: Average,
        in_place: bool,
    ) -> None:
        self._cupy, self._plan, self._order, self._scratch = cupy, plan, order, scratch
        self._average, self._in_place, self._call = average, in_place, call
        layout = call.layout(call.program())
        self._given, self._got = layout.count(Buffer.INPUT), layout.count(Buffer.OUTPUT)
        source = average_source(call.dtype)
        self._widen, self._mean = (load_kernel(cupy, device, source, name) for name in (WIDEN, MEAN))

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Enqueues the call on the current stream."""
        order = self._order
        source, target = address(sendbuf, order), 0 if recvbuf is None else address(recvbuf, order)
        check_alignment(self._call.dtype.numpy.alignment, source, target)
        stream = self._cupy.cuda.get_current_stream()
        parts = self._arrays(self._given, stream)
        sums = parts if self._in_place or recvbuf is None else self._arrays(self._got, stream)
        self._launch(self._widen, (source, *_ends(parts)), self._given, (), stream)
        for part, total in zip(parts, sums, strict=True):
            self._plan.run(part, None if recvbuf is None else total)
        if recvbuf is not None:
            factor = float(self._call.schedule.size)
            self._launch(self._mean, (*_ends(sums), target), self._got, (factor,), stream)

    def _arrays(self, count: int, stream: Any) -> list[Any]:
        """New arrays of the wider dtype; those for a caller's graph are kept as long as the communicator."""
        cupy, dtype = self._cupy, self._average.wide.numpy
        if not self._order.is_capturing(stream):
            return [cupy.empty(count, dtype) for _ in range(self._average.sums)]
        made = []
        for _ in range(self._average.sums):
            memory = self._scratch.private(max(count * dtype.itemsize, 1))
            made.append(cupy.ndarray((count,), dtype, memory))
        self._scratch.pin(self, *made)
        return made

    def _launch(self, kernel: Any, addresses: tuple, count: int, rest: tuple, stream: Any) -> None:
        if count:
            grid = min(-(-count // THREADS), _MOST_BLOCKS)
            kernel((grid,), (THREADS,), (*addresses, count, *rest), stream=stream)

    def __repr__(self) -> str:
        return f"<AveragedPlan {self._call}>"


def _ends(arrays: list[Any]) -> tuple[int, int]:
    return arrays[0].data.ptr, arrays[-1].data.ptr
