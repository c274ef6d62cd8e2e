"""Runs the calls of a process group in order: on a thread of the host, or on a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from flagcx.communicator import Communicator
from flagcx.errors import CommunicationError
from flagcx.interop.tensors import DeviceViews, HostViews
from flagcx.interop.work import CallWork, StreamWork, ThreadWork
from flagcx.kernels.cuda import RELAXED, capture_mode

Task = Callable[[], object]
_MOST_CALLBACKS = 64
_NOTHING = nullcontext()


class PlainCall(partial):
    """A task that is one call of the communicator, and uses no operation of torch."""


class HostQueue:
    """Tasks on tensors of the CPU: on the caller's thread if it waits, else on the queue's own thread.

    Attributes:
        comm: The communicator.
        views: The tensors as arrays.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.views = comm, HostViews()
        self._turn = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._callbacks: ThreadPoolExecutor | None = None
        self._last: Future | None = None
        self._scratch: dict[str, Any] = {}

    def run(self, task: Task, tensors: Sequence[Any], waits: bool, value: Any = None) -> CallWork:
        """Runs a task after those before it.

        Args:
            task: The task.
            tensors: The tensors that it uses.
            waits: Whether the caller waits for it anyway.
            value: The value of the work's future; the tensors by default.
        """
        value = tensors if value is None else value
        if not waits:
            return self._start(task, tensors, value)
        self.settle()
        with self._turn:
            task()
        return CallWork(value)

    def settle(self) -> None:
        """Waits until the tasks started before have ended. Their errors are raised by their works alone."""
        last = self._last
        if last is not None:
            last.exception()
            if self._last is last:
                self._last = None

    def _start(self, task: Task, tensors: Sequence[Any], value: Any) -> ThreadWork:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="flagcx-torch")
            self._callbacks = ThreadPoolExecutor(_MOST_CALLBACKS, thread_name_prefix="flagcx-callback")
        assert self._callbacks is not None
        # The thread keeps the tensors: a view of them does not, and the caller may drop them.
        self._last = self._thread.submit(self._in_turn, task, tensors)
        return ThreadWork(self._last, value, self._callbacks)

    def _in_turn(self, task: Task, _: Sequence[Any]) -> None:
        with self._turn:
            task()

    def scratch(self, name: str, like: Any, count: int) -> Any:
        """A flat tensor of ``count`` elements of a dtype, for one task; later tasks use its memory again."""
        nbytes = count * like.element_size()
        found = self._scratch.get(name)
        if found is None or found.numel() < nbytes:
            found = self._scratch[name] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return found[:nbytes].view(like.dtype)

    def close(self) -> None:
        """Waits for the tasks that were started."""
        for pool in (self._thread, self._callbacks):
            if pool is not None:
                pool.shutdown()
        self._scratch.clear()


class DeviceQueue:
    """Tasks on tensors of one GPU: on the current stream if the caller waits, else on the queue's own stream.

    Attributes:
        comm: The communicator.
        views: The tensors as arrays.
        device: The GPU's number.
    """

    def __init__(self, comm: Communicator, cupy: Any, device: int) -> None:
        self.comm, self.device, self.views = comm, device, DeviceViews(cupy, device)
        self._cupy = cupy
        self._side = torch.cuda.Stream(device)
        self._before = cupy.cuda.Event(disable_timing=True)
        self._streams: dict[int, Any] = {}
        self._turn = threading.RLock()
        self._get_device, self._ended = cupy.cuda.runtime.getDevice, CallWork([])

    def run(self, task: Task, tensors: Sequence[Any], waits: bool, value: Any = None) -> CallWork:
        """Enqueues a task after those before it, with the arguments of ``HostQueue.run``.

        While a graph is captured every task goes onto the stream that is captured.
        """
        with self._turn:
            captures = torch.cuda.is_current_stream_capturing()
            if waits and not captures:
                self._enqueue(task, _raw_stream(self.device))
                return self._ended  # on the very stream that the caller goes on with
            value = tensors if value is None else value
            if captures:
                current = torch.cuda.current_stream(self.device)
                # A plan may need scratch memory, which torch's rule for captures forbids to allocate.
                with capture_mode(RELAXED):
                    self._enqueue(task, current.cuda_stream)
                return StreamWork(current, value)
            with self._as_current():
                return self._start(task, tensors, value)

    def _start(self, task: Task, tensors: Sequence[Any], value: Any) -> StreamWork:
        """Enqueues a task on the queue's own stream, by calls of CUDA: torch's own take twice the time."""
        side, stream = self._side, self._as_cupys(self._side.cuda_stream)
        self._before.record(self._as_cupys(_raw_stream(self.device)))
        stream.wait_event(self._before)
        if isinstance(task, PlainCall):
            with stream:
                task()
        else:  # it may copy tensors, which torch does on its current stream
            current = torch.cuda.current_stream(self.device)
            torch.cuda.set_stream(side)
            try:
                with stream:
                    task()
            finally:
                torch.cuda.set_stream(current)
        for tensor in tensors:
            tensor.record_stream(side)
        end = self._cupy.cuda.Event(disable_timing=True)
        end.record(stream)
        return StreamWork(side, value, end, self._follow)

    def _follow(self, end: Any) -> None:
        """Makes the current stream wait for an event."""
        with self._as_current():
            self._as_cupys(_raw_stream(self.device)).wait_event(end)

    def _as_current(self) -> Any:
        """A context in which the GPU is CUDA's current one."""
        return _NOTHING if self._get_device() == self.device else self._cupy.cuda.Device(self.device)

    def probe(self) -> None:
        """Makes a first call, in which all ranks connect, and checks its result.

        Raises:
            CommunicationError: The result is wrong.
        """
        ones = torch.ones(1, device=f"cuda:{self.device}")
        self.run(lambda: self.comm.allreduce(self.views.elements(ones)), (ones,), True)
        if ones.item() != self.comm.size:
            raise CommunicationError(
                f"a first all-reduce of ones gave {ones.item()} on {self.comm.size} ranks; look at the "
                f"output of NCCL_DEBUG=WARN"
            )

    def _enqueue(self, task: Task, pointer: int) -> None:
        """Runs a task with a stream of torch's, by its handle, as CuPy's current one."""
        with self._as_current(), self._streams.get(pointer) or self._as_cupys(pointer):
            task()

    def _as_cupys(self, pointer: int) -> Any:
        found = self._streams.get(pointer)
        if found is None:
            cuda = self._cupy.cuda
            found = cuda.ExternalStream(pointer, self.device) if pointer else cuda.Stream.null
            self._streams[pointer] = found
        return found

    def scratch(self, name: str, like: Any, count: int) -> Any:
        """A flat tensor of ``count`` elements, for one task."""
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def close(self) -> None:
        """Nothing to give back: torch keeps its streams."""


CallQueue = HostQueue | DeviceQueue


def _stream_handle(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# torch makes an object for each look at the current stream, which takes longer than a small all-reduce.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)
