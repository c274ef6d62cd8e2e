"""The order of the operations that one communicator enqueues on a GPU, on any streams of the caller.

NCCL needs the operations of a communicator one after the other, and plans share scratch memory. So when a
call uses another stream than the call before, the new stream waits on the GPU for the old one; the host never
waits. The order also knows whether all operations are done, keeps buffers alive until then, and holds the
error of a communicator that failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

from flagcx.bootstrap.clock import ActiveClock
from flagcx.daemon import Daemon
from flagcx.errors import CommunicationError, CommunicatorError, FlagcxError, PeerTimeoutError
from flagcx.kernels.cuda import PER_THREAD, THREAD_LOCAL, capture_mode, is_capturing

_NOT_READY = 600
_SPIN_S = 100e-6
_SLEEP_S = 200e-6
_KEPT_S = 1.0
_RECENT = 64
_MARK_EVERY = 1024
_MARKS = 1024


class StreamOrder:
    """The operations that one communicator has enqueued.

    Attributes:
        device: Number of the device.
        rank: This rank, for messages.
        issued: Operations enqueued so far.
        what: The last operation; its ``str()`` describes it.
        mark: (Calls of all ranks so far, what stands for all of them in their order); the same on all ranks.
        marks: The mark after every 1024 calls, the latest last.
        apart: For each stream of operations outside the order, the event after the last of them.
        captured: Whether a stream was being captured, so that graphs of the caller may replay calls.
        inside: Whether a thread is inside a call into NCCL.
        failure: The error that ended the communicator, or None.
        reported: Whether a caller got that error, or no operation was unfinished, so that none has to.
    """

    def __init__(self, cupy: Any, device: int, rank: int) -> None:
        self._cupy, self.device, self.rank = cupy, device, rank
        self._runtime = cupy.cuda.runtime
        self._current = cupy.cuda.get_current_stream
        self.issued, self.inside = 0, False
        self.what: object = "nothing yet"
        self.mark, self.captured = (0, 0), False
        self.marks: deque[tuple[int, int]] = deque(maxlen=_MARKS)
        self._recent: deque[tuple[int, Any]] = deque(maxlen=_RECENT)
        self._remember = self._recent.append
        self.failure: FlagcxError | None = None
        self.reported = False
        self._last: Any = None
        self._last_ptr = -1
        self._latest: tuple[Any, int] | None = None  # on a stream that other threads cannot name
        self._captured: Any = None
        self._marker: tuple[Any, int, float] | None = None
        self._enqueued = self._done = 0  # operations that have been left, and that are known to be done
        self._entered = (0, 0.0)
        self._looking: float | None = None
        self._one_look = threading.Lock()
        self.apart: dict[int, Any] = {}
        self._kept: dict[int, deque[tuple[Any, tuple]]] = {}  # by stream, each in the order of its events
        self._keeping = threading.Lock()

    def enter(self, what: object, signature: int = 0) -> Any:
        """Begins an operation on the current stream, and returns that stream.

        Args:
            what: The operation: a ``Call``, where all ranks take part.
            signature: The call's signature; 0 if not all ranks take part.

        Raises:
            FlagcxError: The communicator failed before, or the current device is not its own.
        """
        if self.failure is not None or self._runtime.getDevice() != self.device:
            self._refuse()
        stream = self._current()
        if stream.ptr != self._last_ptr:
            self._follow(stream)
        self.issued += 1
        self.what = what
        if signature:
            number, before = self.mark
            self._remember((number, what))
            # One assignment, since the watchdog reads it; hashes of integers are the same in every process.
            self.mark = mark = number + 1, hash((before, signature))
            if not mark[0] % _MARK_EVERY:
                self.marks.append(mark)
        return stream

    def current(self) -> Any:
        """The current stream; for operations outside the order, too.

        Raises:
            FlagcxError: The communicator failed before, or the current device is not its own.
        """
        if self.failure is not None or self._runtime.getDevice() != self.device:
            self._refuse()
        return self._current()

    def _refuse(self) -> None:
        if self.failure is not None:
            raise self.report()
        raise CommunicatorError(
            f"the current device is {self._runtime.getDevice()}, but rank {self.rank} uses device "
            f"{self.device}; call it under cupy.cuda.Device({self.device})"
        )

    def chain(self, before: Any, after: Any) -> None:
        """Makes stream ``after`` wait for ``before``, unless only one of them is being captured."""
        if before.ptr != after.ptr and self.is_capturing(before) == self.is_capturing(after):
            after.wait_event(before.record(self.event()))

    @property
    def calls(self) -> int:
        """Calls of all ranks so far."""
        return self.mark[0]

    def last_calls(self) -> list[tuple[int, str]]:
        """The last calls of all ranks that this one has made: their numbers, and words equal on all ranks."""
        return [(number, call.describe()) for number, call in list(self._recent)]

    def leave(self, stream: Any) -> None:
        """Ends what ``enter`` began, after the operation has been enqueued."""
        self._enqueued = self.issued
        if stream.ptr == PER_THREAD and not self.is_capturing(stream):
            self._latest = stream.record(self.event()), self.issued
        if self._marker is None and not self.is_capturing(stream):
            self._mark(stream)

    def is_capturing(self, stream: Any) -> bool:
        """Whether the stream is being captured into a graph."""
        capturing = is_capturing(self._runtime, stream)
        if capturing:
            self.captured = True
        return capturing

    def event(self) -> Any:
        """A new event without time stamps."""
        return self._cupy.cuda.Event(disable_timing=True)

    def _follow(self, stream: Any) -> None:
        """Makes a stream wait for the one that was used before it."""
        if self.is_capturing(stream):
            # A graph cannot wait for streams outside it: its owner orders its launches. Inside it we do.
            before = self._last if self._captured is None else self._captured
            if before is not None and before.ptr != stream.ptr and self.is_capturing(before):
                stream.wait_event(before.record(self.event()))
            self._captured, self._last_ptr = stream, -1
            return
        before, self._captured = self._last, None
        if self._latest is not None:
            stream.wait_event(self._latest[0])
        elif before is not None and before.ptr != stream.ptr and not self.is_capturing(before):
            stream.wait_event(before.record(self.event()))
        self._last, self._latest = stream, None
        # The default stream of another thread has the same handle.
        self._last_ptr = -1 if stream.ptr == PER_THREAD else stream.ptr

    def keep(self, stream: Any, *arrays: object) -> Any:
        """Keeps arrays alive until the stream reaches the event, recorded now, that this returns."""
        event = stream.record(self.event())
        with self._keeping:
            self._kept.setdefault(stream.ptr, deque()).append((event, arrays))
        self._release()
        return event

    def keep_apart(self, stream: Any, *arrays: object) -> Any:
        """``keep`` for an operation outside the order, for which ``drain`` and ``settle`` wait too."""
        if self.is_capturing(stream):
            return stream.record(self.event())  # the capturing rank keeps a graph's arrays
        event = self.apart[stream.ptr] = self.keep(stream, *arrays)
        return event

    def _release(self) -> None:
        with self._keeping:
            for pointer, kept in list(self._kept.items()):
                while kept and self.reached(kept[0][0]):
                    kept.popleft()
                if not kept:
                    del self._kept[pointer]

    def reached(self, event: Any) -> bool:
        """Whether an event has been reached.

        Raises:
            CUDARuntimeError: An operation on the GPU failed, which CuPy's ``done`` hides.
        """
        status = self._runtime.eventQuery(event.ptr)
        if status in (0, _NOT_READY):
            return bool(status == 0)
        raise self._runtime.CUDARuntimeError(status)

    def _mark(self, stream: Any) -> None:
        enqueued = self._enqueued  # before the event: another thread may enqueue meanwhile
        event, enqueued = self._latest or (stream.record(self.event()), enqueued)
        self._marker = event, enqueued, time.monotonic()

    def pending_since(self) -> float | None:
        """When the oldest operation that is known to be unfinished was seen first; None if all are done.

        A thread inside NCCL counts too: NCCL connects ranks in their first call, and waits on the host for a
        peer that makes another one. So does a ``look`` that CUDA keeps: it may while another thread copies
        from the GPU, which may wait for an operation that never ends.
        """
        marker, looking, now = self._marker, self._looking, time.monotonic()
        if self.inside and self._entered[0] != self.issued:
            self._entered = self.issued, now
        kept = looking is not None and now - looking > _KEPT_S and self._enqueued > self._done
        times = [
            marker[2] if marker is not None else None,
            self._entered[1] if self.inside else None,
            looking if kept else None,
        ]
        return min((at for at in times if at is not None), default=None)

    def look(self) -> None:
        """Finds out which operations are done, and releases the arrays that were kept for them.

        A thread of the watchdog calls this now and then. An operation gets a marker only after the last
        marker has been reached, so a busy loop of calls records no events.
        """
        with self._one_look:
            self._looking = time.monotonic()
            try:
                with capture_mode(THREAD_LOCAL):  # a caller may capture and restrict all threads
                    self._look()
            finally:
                self._looking = None

    def all_done(self) -> bool:
        """Whether no operation is unfinished by now, outside the order either."""
        looker = Daemon(self.look, "flagcx-look")
        looker.start()
        looker.join(2 * _KEPT_S)
        return self.pending_since() is None and not self.apart

    def _look(self) -> None:
        self._runtime.setDevice(self.device)
        try:
            self._release()
            for pointer, event in list(self.apart.items()):
                if self.reached(event) and self.apart.get(pointer) is event:
                    del self.apart[pointer]
            for _ in range(2):  # of operations after the marker's, all may be done too
                marker = self._marker
                if marker is not None:
                    if not self.reached(marker[0]):
                        return
                    self._done, self._marker = marker[1], None
                if self._enqueued == self._done or self._last is None:
                    return
                enqueuing = self._last.ptr == PER_THREAD and self._latest is None
                if enqueuing or self.is_capturing(self._last):
                    return
                self._mark(self._last)
        except self._runtime.CUDARuntimeError:  # the stream is gone, or was captured
            self._done, self._marker = self._enqueued, None

    def wait(self, event: Any, timeout_s: float) -> None:
        """Waits on the host until an event is reached.

        Raises:
            FlagcxError: The communicator failed meanwhile.
            CommunicationError: An operation on the GPU failed.
            PeerTimeoutError: The event was not reached in time.
        """
        clock = ActiveClock()
        while not self._reached(event):
            waited = clock.now()
            if self.failure is not None:
                raise self.report()
            if waited > timeout_s:
                raise PeerTimeoutError(f"rank {self.rank}: {self.what} is not done after {timeout_s:g} s")
            if waited > _SPIN_S:
                time.sleep(_SLEEP_S)
        if self.failure is not None:
            raise self.report()

    def _reached(self, event: Any) -> bool:
        try:
            return self.reached(event)
        except self._runtime.CUDARuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank}: the GPU failed in or before {self.what}: {error}"
            ) from error

    def report(self) -> FlagcxError:
        """A copy of the failure to raise, so that each raise has a traceback of its own."""
        error, self.reported = self.failure, True
        assert error is not None
        if isinstance(error, CommunicationError):
            return type(error)(str(error), peer=error.peer)
        return type(error)(str(error))

    def settle(self, limit_s: float) -> None:
        """Waits on the host, for at most ``limit_s``, until all operations have ended, done or failed."""
        end = time.monotonic() + limit_s
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            for event in self._ends():
                while not self.reached(event) and time.monotonic() < end:
                    time.sleep(_SLEEP_S)

    def drain(self, timeout_s: float) -> None:
        """Waits on the host until all operations are done; raises as ``wait`` does."""
        for event in self._ends():
            self.wait(event, timeout_s)
        self._kept.clear()

    def _ends(self) -> list[Any]:
        """An event after all operations of the order, if it can have one, and those of others."""
        ordered = self._last is not None and not self.is_capturing(self._last)
        return [*self.apart.values(), *([self._last_event()] if ordered else [])]

    def _last_event(self) -> Any:
        """An event after all operations; another thread's default stream has the handle of this one's."""
        return self._last.record(self.event()) if self._latest is None else self._latest[0]

    def close(self) -> None:
        """Drops the references to streams and events, each of which costs memory of the GPU."""
        self._last = self._latest = self._captured = self._marker = None
        self._last_ptr = -1
        self._kept.clear()
        self.apart.clear()
