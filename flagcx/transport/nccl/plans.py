"""Plans for GPU arrays: a schedule, captured in CUDA graphs for repeated calls, or NCCL's own collective."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from flagcx.dtypes import DType
from flagcx.kernels.launch import Launch, Memories
from flagcx.memory import DEVICE, PoolStats, track_memory
from flagcx.transport.base import Call
from flagcx.transport.device import address, check_alignment
from flagcx.transport.nccl.binding import Enqueue, GroupedMessage, NcclCommunicator
from flagcx.transport.nccl.steps import SendRecv
from flagcx.transport.stream_order import StreamOrder

CAPTURE_AT = 3
"""The number of the call with the same arrays that is captured; the first ones set up NCCL's connections."""

URGENT = -5
"""Priority of streams whose kernels wait for peers, above that of computations. CUDA clamps it to the GPU's
highest."""

_MAX_GRAPHS = 16
_MOST_GRAPHS = 2048
"""Graphs of one plan, and of all plans of a communicator."""
_MAX_SEEN = 256
_GRAIN = 2 << 20

PlanStep = tuple[tuple[GroupedMessage, ...], Sequence[Launch]]


class Scratch:
    """Device memory that all plans of a communicator share; it grows and never shrinks.

    Attributes:
        version: Counts how often the memory has moved.
        captures: The stream on which plans capture their graphs.
    """

    kind = DEVICE

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.version = 0
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.captures = cupy.cuda.Stream(non_blocking=True, priority=URGENT)
        self._memory: Any = None
        self._peak = 0
        self._pinned: list[tuple[object, ...]] = []
        self._captured: deque[tuple[weakref.ref[SchedulePlan], int]] = deque()
        track_memory(self)

    def stats(self) -> PoolStats:
        """The current figures, without memory of the callers' own graphs."""
        nbytes = 0 if self._memory is None else self._memory.mem.size
        blocks = 0 if self._memory is None else 1
        return PoolStats(nbytes, nbytes, self._peak, blocks, self.version, self.version)

    def get(self, nbytes: int) -> Any:
        """The memory, with at least ``nbytes`` bytes.

        CuPy's pool reuses memory that is replaced only for its own stream, on which nothing else is
        allocated, so operations that are still enqueued may go on using it.
        """
        if self._memory is None or self._memory.mem.size < nbytes:
            self._memory = None
            self.version += 1
            self._memory = self.private(-(-nbytes // _GRAIN) * _GRAIN)
            self._peak = max(self._peak, self._memory.mem.size)
        return self._memory

    def private(self, nbytes: int) -> Any:
        """Memory of its own for a graph that the caller captures."""
        with self._stream:
            return self._cupy.cuda.alloc(nbytes)

    def pin(self, *used: object) -> None:
        """Keeps objects that a caller's graph uses until the communicator is closed."""
        self._pinned.append(used)

    def add_graph(self, plan: SchedulePlan, graph: Any) -> None:
        """Counts a graph that a plan has captured; beyond the most, the oldest of all plans is dropped."""
        self._captured.append((weakref.ref(plan), id(graph)))
        if len(self._captured) > _MOST_GRAPHS:
            owner, oldest = self._captured.popleft()
            if (found := owner()) is not None:
                found.drop_graph(oldest)

    def close(self) -> None:
        """Gives the memory back."""
        self._memory = self._stream = self.captures = None
        self._pinned.clear()
        self._captured.clear()


class SchedulePlan:
    """A schedule, ready to be enqueued for any arrays of one dtype and count.

    Args:
        call: The call.
        steps: Messages and launches.
        scratch_nbytes: Bytes of the schedule's SCRATCH and of received data that is still to be reduced.
        scaled_nbytes: Bytes of a scaled copy of INPUT.
        order: The communicator's order.
        communicator: NCCL's communicator.
        scratch: The communicator's memory.
        guard: Calls a function that enqueues, and turns its exceptions into those of flagcx.
    """

    def __init__(
        self,
        call: Call,
        steps: Sequence[PlanStep],
        scratch_nbytes: int,
        scaled_nbytes: int,
        order: StreamOrder,
        communicator: NcclCommunicator,
        scratch: Scratch,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._call, self._steps, self._order = call, tuple(steps), order
        self._signature = call.signature()
        self._communicator, self._scratch, self._guard = communicator, scratch, guard
        # Room for a shift of up to 16 bytes of either memory: see _memories.
        self._scaled_at = -(-scratch_nbytes // 16) * 16 + 16
        self._nbytes = self._scaled_at + scaled_nbytes + 16 if scratch_nbytes or scaled_nbytes else 0
        self._alignment = call.dtype.numpy.alignment
        self._graphs: OrderedDict[tuple[int, int, int], tuple[Any, Any]] = OrderedDict()
        self._seen: dict[tuple[int, int, int], int] = {}
        # The graph that was launched last and its arrays: the same call again needs no look-up.
        self._source = self._target = self._version = -1
        self._replay: Callable[[Any], None] = _nothing

    @property
    def graphs(self) -> int:
        """The number of CUDA graphs, one for each set of arrays that came back."""
        return len(self._graphs)

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Enqueues the call on the current stream."""
        order = self._order
        source = address(sendbuf, order)
        target = source if recvbuf is sendbuf else address(recvbuf, order)
        stream = order.enter(self._call, self._signature)
        if order.is_capturing(stream):
            self._run_into_capture(source, target, stream)
            return
        if source == self._source and target == self._target and self._version == self._scratch.version:
            self._replay(stream)
        else:
            self._run_found(source, target, stream)
        order.leave(stream)

    def _run_found(self, source: int, target: int, stream: Any) -> None:
        """Launches the graph of these arrays, perhaps captured now, or enqueues step by step."""
        check_alignment(self._alignment, source, target)
        memory = self._scratch.get(self._nbytes) if self._nbytes else None
        if self._version != self._scratch.version:
            self._forget_moved(0 if memory is None else memory.ptr)
        key = source, target, 0 if memory is None else memory.ptr
        found = self._graphs.get(key) or self._captured(key, memory)
        if found is None:
            self._guard(lambda: self._enqueue(self._memories(key), stream))
            return
        found[0].launch(stream)
        self._source, self._target, self._version = source, target, self._scratch.version
        self._replay = found[0].launch

    def _forget_moved(self, scratch: int) -> None:
        """Drops the graphs that use the scratch memory from before it moved."""
        for key in [k for k in self._graphs if k[2] != scratch]:
            del self._graphs[key]
        self._source, self._version, self._replay = -1, self._scratch.version, _nothing

    def _run_into_capture(self, source: int, target: int, stream: Any) -> None:
        """Enqueues into the caller's graph, which may run at any time, with scratch of its own."""
        check_alignment(self._alignment, source, target)
        memory = self._scratch.private(self._nbytes) if self._nbytes else None
        self._scratch.pin(self, memory)
        key = source, target, 0 if memory is None else memory.ptr
        self._guard(lambda: self._enqueue(self._memories(key), stream))

    def _memories(self, key: tuple[int, int, int]) -> Memories:
        """Addresses. SCRATCH is as far from a multiple of 16 as its destination, so whole packs are added."""
        sendbuf, recvbuf, scratch = key
        if not scratch:
            return sendbuf, recvbuf, 0, 0
        scaled = scratch + self._scaled_at + sendbuf % 16
        return sendbuf, recvbuf, scratch + (recvbuf or sendbuf) % 16, scaled

    def _enqueue(self, memories: Memories, stream: Any) -> None:
        for messages, launches in self._steps:
            if messages:
                self._communicator.group(messages, memories, stream.ptr)
            for launch in launches:
                launch(memories, stream)

    def _captured(self, key: tuple[int, int, int], memory: Any) -> tuple[Any, Any] | None:
        """The graph of these arrays, captured at their ``CAPTURE_AT``-th call; None before that."""
        seen = self._seen.get(key, 0) + 1
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen[key] = seen
        if seen < CAPTURE_AT or not self._steps:
            return None
        graph = self._capture(self._memories(key))
        self._scratch.add_graph(self, graph)
        self._graphs[key] = graph, memory
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
            self._source = -1
        return self._graphs[key]

    def drop_graph(self, number: int) -> None:
        """Gives the graph with this ``id`` back, if it is still there."""
        for key in [key for key, (graph, _) in self._graphs.items() if id(graph) == number]:
            del self._graphs[key]
            self._seen.pop(key, None)
            self._source, self._replay = -1, _nothing

    def _capture(self, memories: Memories) -> Any:
        stream = self._scratch.captures
        with stream:
            stream.begin_capture()
            try:
                self._guard(lambda: self._enqueue(memories, stream))
            except BaseException:
                with contextlib.suppress(Exception):
                    stream.end_capture()  # The first error is the one to raise.
                raise
            return stream.end_capture()

    def close(self) -> None:
        """Gives the graphs back. Must come before the communicator is destroyed."""
        self._source, self._replay = -1, _nothing
        self._graphs.clear()

    def __repr__(self) -> str:
        return f"<SchedulePlan {self._call}>"


class NativePlan:
    """NCCL's own collective.

    Args:
        call: The call.
        enqueue: Enqueues it.
        order: The communicator's order.
        fault: Takes an exception of ``enqueue`` and returns the one to raise.
    """

    __slots__ = ("_call", "_enqueue", "_fault", "_order", "_signature")

    def __init__(
        self,
        call: Call,
        enqueue: Enqueue,
        order: StreamOrder,
        fault: Callable[[BaseException], BaseException],
    ) -> None:
        self._call, self._enqueue, self._order, self._fault = call, enqueue, order, fault
        self._signature = call.signature()

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Enqueues the call on the current stream."""
        order = self._order
        source = address(sendbuf, order)
        target = source if recvbuf is sendbuf else address(recvbuf, order)
        stream = order.enter(self._call, self._signature)
        order.inside = True
        try:
            self._enqueue(source, target, stream.ptr)
        except BaseException as error:
            raise self._fault(error) from error
        finally:
            order.inside = False
        order.leave(stream)

    def __repr__(self) -> str:
        return f"<NativePlan {self._call}>"


def _nothing(stream: Any) -> None:
    """Replaces the launch of a graph where there is none."""


def grouped(messages: Sequence[SendRecv], dtype: DType) -> tuple[GroupedMessage, ...]:
    """Messages in bytes instead of elements."""
    size = dtype.numpy.itemsize
    return tuple((m.sends, m.at[0], m.at[1] * size, m.count * size, m.peer) for m in messages)
