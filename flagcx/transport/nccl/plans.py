"""Plans for GPU arrays: enqueue a schedule or NCCL's own collective; capture what repeats in a graph."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flagcx.dtypes import DType
from flagcx.errors import ArrayError
from flagcx.kernels.launch import Launch, Memories
from flagcx.memory import DEVICE, PoolStats, track_memory
from flagcx.transport.base import Call
from flagcx.transport.device import check_home
from flagcx.transport.stream_order import StreamOrder

CAPTURE_AT = 3
"""The call with the same arrays that is captured; the first ones also set up NCCL's connections."""

URGENT = -5
"""Priority of streams whose kernels wait for peers, to go before a computation's. A GPU that has no such high
one takes its highest."""

_MAX_GRAPHS = 16
_MAX_SEEN = 256
_GRAIN = 2 << 20

GroupedMove = tuple[bool, int, int, int, int]
"""Whether it sends, the memory's number, offset and length in bytes, and the peer."""

PlanStep = tuple[tuple[GroupedMove, ...], Sequence[Launch]]


class Link(Protocol):
    """What a plan asks of NCCL."""

    def group(self, moves: Sequence[GroupedMove], memories: Memories, stream: int) -> None:
        """Enqueues sends and receives that run concurrently."""


class Scratch:
    """Device memory that all plans of a communicator share; it grows, and is never cut.

    Args:
        cupy: The CuPy module.

    Attributes:
        version: Goes up whenever the memory moves.
        captures: The stream on which plans capture their graphs.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.version = 0
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.captures = cupy.cuda.Stream(non_blocking=True, priority=URGENT)
        self._memory: Any = None
        self._peak = 0
        self._pinned: list[tuple[object, ...]] = []
        track_memory(self)

    @property
    def kind(self) -> str:
        """The kind of memory, for ``fc.memory_stats``."""
        return DEVICE

    def stats(self) -> PoolStats:
        """The figures of now; memory of the callers' own graphs is not in them."""
        nbytes = 0 if self._memory is None else self._memory.mem.size
        blocks = 0 if self._memory is None else 1
        return PoolStats(nbytes, nbytes, self._peak, blocks, self.version, self.version)

    def get(self, nbytes: int) -> Any:
        """The memory, with at least ``nbytes`` bytes.

        What it replaces is reused by CuPy's pool for its stream alone, on which nothing else is allocated,
        so work that is still enqueued may go on using it.
        """
        if self._memory is None or self._memory.mem.size < nbytes:
            self._memory = None
            self.version += 1
            self._memory = self.private(-(-nbytes // _GRAIN) * _GRAIN)
            self._peak = max(self._peak, self._memory.mem.size)
        return self._memory

    def private(self, nbytes: int) -> Any:
        """Fresh memory that nobody else is given, for a graph that the caller captures."""
        with self._stream:
            return self._cupy.cuda.alloc(nbytes)

    def pin(self, *what: object) -> None:
        """Keeps what a caller's graph uses until the communicator is closed."""
        self._pinned.append(what)

    def close(self) -> None:
        """Gives the memory back."""
        self._memory = self._stream = self.captures = None
        self._pinned.clear()


class SchedulePlan:
    """A schedule, ready to be enqueued for any arrays of one dtype and count.

    Args:
        call: The call.
        steps: What to enqueue.
        scratch_nbytes: Bytes of the schedule's SCRATCH and of what waits to be reduced.
        scaled_nbytes: Bytes of a scaled copy of INPUT.
        order: The communicator's order.
        link: The communicator.
        scratch: The communicator's memory.
        guard: Wraps the enqueueing: turns faults of NCCL into exceptions of flagcx.
    """

    def __init__(
        self,
        call: Call,
        steps: Sequence[PlanStep],
        scratch_nbytes: int,
        scaled_nbytes: int,
        order: StreamOrder,
        link: Link,
        scratch: Scratch,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._what = Description(call)
        self._steps, self._order, self._link = tuple(steps), order, link
        self._scratch, self._guard = scratch, guard
        # Room for a shift of up to 16 bytes of either memory, see _memories.
        self._scaled_at = -(-scratch_nbytes // 16) * 16 + 16
        self._nbytes = self._scaled_at + scaled_nbytes + 16 if scratch_nbytes or scaled_nbytes else 0
        self._alignment = call.dtype.numpy.alignment
        self._graphs: OrderedDict[tuple[int, int, int], tuple[Any, Any]] = OrderedDict()
        self._seen: dict[tuple[int, int, int], int] = {}
        # The graph that was launched last, and what it is for: found without a look-up if it comes again.
        self._source = self._target = self._version = -1
        self._replay: Callable[[Any], None] = _nothing

    @property
    def graphs(self) -> int:
        """How many CUDA graphs the plan has, one for each set of arrays that came back."""
        return len(self._graphs)

    def run(self, given: Any, result: Any) -> None:
        """Enqueues the call on the current stream; see ``Plan.run``."""
        order = self._order
        source = address(given, order)
        target = source if result is given else address(result, order)
        stream = order.enter(self._what)
        if order.is_capturing(stream):
            self._run_into_capture(source, target, stream)
            return
        if source == self._source and target == self._target and self._version == self._scratch.version:
            self._replay(stream)
        else:
            self._run_found(source, target, stream)
        order.leave(stream)

    def _run_found(self, source: int, target: int, stream: Any) -> None:
        """Looks for the graph of these arrays, captures it if it is time to, or enqueues step by step."""
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
        """Drops the graphs that use memory from before it moved."""
        for key in [k for k in self._graphs if k[2] != scratch]:
            del self._graphs[key]
        self._source, self._version, self._replay = -1, self._scratch.version, _nothing

    def _run_into_capture(self, source: int, target: int, stream: Any) -> None:
        """Enqueues into the caller's graph, which may run at any time: with scratch of its own."""
        check_alignment(self._alignment, source, target)
        memory = self._scratch.private(self._nbytes) if self._nbytes else None
        self._scratch.pin(self, memory)
        key = source, target, 0 if memory is None else memory.ptr
        self._guard(lambda: self._enqueue(self._memories(key), stream))

    def _memories(self, key: tuple[int, int, int]) -> Memories:
        """Addresses, with SCRATCH as far from a multiple of 16 as what it is added to: for whole packs."""
        given, result, scratch = key
        if not scratch:
            return given, result, 0, 0
        return given, result, scratch + (result or given) % 16, scratch + self._scaled_at + given % 16

    def _enqueue(self, memories: Memories, stream: Any) -> None:
        for moves, launches in self._steps:
            if moves:
                self._link.group(moves, memories, stream.ptr)
            for launch in launches:
                launch(memories, stream)

    def _captured(self, key: tuple[int, int, int], memory: Any) -> tuple[Any, Any] | None:
        """The graph for arrays that came back, captured now if it is time to; else None."""
        seen = self._seen.get(key, 0) + 1
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen[key] = seen
        if seen < CAPTURE_AT or not self._steps:
            return None
        graph = self._capture(self._memories(key))
        self._graphs[key] = graph, memory
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
            self._source = -1
        return self._graphs[key]

    def _capture(self, memories: Memories) -> Any:
        stream = self._scratch.captures
        with stream:
            stream.begin_capture()
            try:
                self._guard(lambda: self._enqueue(memories, stream))
            except BaseException:
                with contextlib.suppress(Exception):
                    stream.end_capture()  # What is wrong has been said.
                raise
            return stream.end_capture()

    def close(self) -> None:
        """Gives the graphs back. Must come before the communicator is destroyed."""
        self._source, self._replay = -1, _nothing
        self._graphs.clear()

    def __repr__(self) -> str:
        return f"<SchedulePlan {self._what}>"


class NativePlan:
    """NCCL's own collective.

    Args:
        call: The call.
        issue: (address of INPUT, address of OUTPUT, stream) -> enqueues it.
        order: The communicator's order.
        guard: Called with an exception that came out of ``issue``; returns the one to raise.
    """

    __slots__ = ("_guard", "_issue", "_order", "_what")

    def __init__(
        self,
        call: Call,
        issue: Callable[[int, int, int], None],
        order: StreamOrder,
        guard: Callable[[BaseException], BaseException],
    ) -> None:
        self._what, self._issue, self._order, self._guard = Description(call), issue, order, guard

    def run(self, given: Any, result: Any) -> None:
        """Enqueues the call on the current stream; see ``Plan.run``."""
        order = self._order
        source = address(given, order)
        target = source if result is given else address(result, order)
        stream = order.enter(self._what)
        order.inside = True
        try:
            self._issue(source, target, stream.ptr)
        except BaseException as error:
            raise self._guard(error) from error
        finally:
            order.inside = False
        order.leave(stream)

    def close(self) -> None:
        """Nothing to give back."""

    def __repr__(self) -> str:
        return f"<NativePlan {self._what}>"


class Description:
    """Describes a call; makes the words only when somebody asks."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def __str__(self) -> str:
        s = self._call.schedule
        op = "" if self._call.op is None else f", {self._call.op.name}"
        return f"{s.collective} ({s.algorithm}) of {self._call.counts} {self._call.dtype.name}{op}"


def address(array: Any, order: StreamOrder) -> int:
    """Address of an array of the order's device; 0 for None."""
    if array is None:
        return 0
    data = array.data
    if data.device_id != order.device:
        check_home(data.device_id, order.device, order.rank)
    return data.ptr


def check_alignment(alignment: int, *addresses: int) -> None:
    """Raises ArrayError if an array begins at no multiple of so many bytes."""
    for at in addresses:
        if at % alignment:
            raise ArrayError(
                f"an array begins at address {at:#x}, and its dtype needs a multiple of {alignment} bytes; "
                f"pass a copy of it, x.copy()"
            )


def _nothing(stream: Any) -> None:
    """Stands for a graph where there is none."""


def grouped(moves: Sequence[Any], dtype: DType) -> tuple[GroupedMove, ...]:
    """Moves of elements as moves of bytes."""
    size = dtype.numpy.itemsize
    return tuple((m.sends, m.at[0], m.at[1] * size, m.count * size, m.peer) for m in moves)
