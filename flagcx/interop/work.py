"""The works that a process group returns for its calls: torch's ``Work``, with a ``Future`` on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from flagcx.errors import PeerTimeoutError
from flagcx.interop.no_dynamo import no_dynamo


@no_dynamo
class CallWork(Work):
    """A call that has ended, and the base of the others; ``value`` is its future's: the result's tensors."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value
        self._future: Any = None

    def is_completed(self) -> bool:
        """Whether the call has ended."""
        return True

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error that ended the call, if any."""
        return None

    def result(self) -> Any:
        """The result's tensors."""
        return self._value

    def synchronize(self) -> None:
        """Makes the current stream, or the host for tensors there, wait for the call."""
        self.wait()

    def block_current_stream(self) -> None:
        """Makes the current stream, or the host for tensors there, wait for the call."""
        self.wait()

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the result's tensors."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(self._value)
        return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the call, and raises its error; at most as long as a ``timeout`` that is above 0."""
        return True


@no_dynamo
class ThreadWork(CallWork):
    """A call on tensors of the host, under way on the process group's thread.

    The future's callbacks run on other threads, since they may wait for later calls.
    """

    def __init__(self, call: Future, value: Any, callbacks: ThreadPoolExecutor) -> None:
        super().__init__(value)
        self._call, self._callbacks = call, callbacks

    def is_completed(self) -> bool:
        return self._call.done()

    def exception(self) -> BaseException | None:
        return self._call.exception() if self._call.done() else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else None
        try:
            self._call.result(seconds)
        except FutureTimeout:
            if self._call.done():
                raise
            raise PeerTimeoutError(f"the operation still runs after {seconds} s; wait again") from None
        return True

    def get_future(self) -> Any:
        if self._future is None:
            self._future = torch.futures.Future()
            if self._call.done():
                self._end(self._call)
            else:
                self._call.add_done_callback(self._end_elsewhere)
        return self._future

    def _end_elsewhere(self, call: Future) -> None:
        try:
            self._callbacks.submit(self._end, call)
        except RuntimeError:  # The process is ending, or the group is closed.
            self._end(call)

    def _end(self, call: Future) -> None:
        error = call.exception()
        if error is None:
            self._future.set_result(self._value)
        else:
            self._future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))


@no_dynamo
class StreamWork(CallWork):
    """A call on tensors of a GPU, enqueued on a torch stream.

    Later calls on other streams must wait for it: ``follow`` makes the current stream wait for ``end``, an
    event of CuPy's behind the call. Without them, in a capture, the current stream is the call's own.
    """

    def __init__(
        self, stream: Any, value: Any, end: Any = None, follow: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(value)
        self._stream, self._end, self._follow = stream, end, follow

    def is_completed(self) -> bool:
        return self._stream.query() if self._end is None else self._end.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the call; the host goes on, unless a ``timeout`` is given."""
        if self._follow is not None:
            self._follow(self._end)
        else:
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                current.wait_stream(self._stream)
        if timeout:
            (self._end or self._stream).synchronize()
        return True

    def get_future(self) -> Any:
        """A future whose callbacks run at once, on streams that wait for the call."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._stream.device])
            with torch.cuda.stream(self._stream):
                self._future.set_result(self._value)
        return self._future


@no_dynamo
class CoalescedWork(CallWork):
    """Several calls as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__([work.result() for work in works if isinstance(work, CallWork)])
        self._works = tuple(works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            if timeout:
                work.wait(timeout)
            else:
                work.wait()
        return True

    def get_future(self) -> Any:
        if self._future is None:
            ends = torch.futures.collect_all([work.get_future() for work in self._works])
            self._future = ends.then(_values)
        return self._future


def _values(ends: Any) -> list:
    return [end.wait() for end in ends.value()]
