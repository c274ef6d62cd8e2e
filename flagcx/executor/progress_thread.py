"""The thread that carries out what was started, beside the computation of the caller.

It sleeps nearly all the time and has little to do when it wakes. On a machine whose cores are all at work it
may then wait some milliseconds behind a computation, for the length of the scheduler's usual slice, and so do
the peers that wait for it. So it asks for short slices, which are due sooner; its share of the core stays.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flagcx.daemon import Daemon, stay_if_process_ends
from flagcx.errors import CommunicatorError, ResourceError
from flagcx.transport.slices import ask_for_short_slices

MOST_CALLS, FEW_CALLS, MOST_NBYTES = 1024, 16, 1 << 30
"""How many calls may be under way, and how many bytes of arrays where there are more than a few."""


class ProgressThread:
    """The thread, which runs already, and the calls that it has yet to make.

    A program that never waits for what it starts would fill the memory with arrays of calls to come: one more
    call waits until there is room.

    Args:
        broke: Ends the communicator after an error, and tells the peers, which may be in the call.

    Raises:
        ResourceError: No thread can be started.
    """

    def __init__(self, broke: Callable[[BaseException], object]) -> None:
        # The bytes of each call that has not ended. No lock: a signal's handler may close the communicator at
        # any point of this. The thread alone takes away, callers alone add, and count by themselves.
        self._left: deque[int] = deque()
        self._started_nbytes = self._ended_nbytes = 0
        self._one_has_ended: threading.Event | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flagcx", initializer=ask_for_short_slices)
        try:
            Daemon(int, "flagcx-first").start()  # which does not wait without end where none can be started
            self._pool.submit(int)  # with which the thread starts
        except RuntimeError as error:
            raise no_thread("calls", error, broke) from None

    def wait_for_room(self, nbytes: int, hurry: Callable[[], object]) -> None:
        """Waits until a call with arrays of ``nbytes`` bytes can be submitted; ``hurry`` is called before."""
        while self._is_full(nbytes):
            hurry()
            self._one_has_ended = one_has_ended = threading.Event()
            if self._is_full(nbytes):  # still, after the thread can see for what this one waits
                one_has_ended.wait()
            self._one_has_ended = None

    def _is_full(self, nbytes: int) -> bool:
        calls = len(self._left)
        return calls >= FEW_CALLS and (
            calls >= MOST_CALLS or self._started_nbytes - self._ended_nbytes + nbytes > MOST_NBYTES
        )

    def submit(self, call: Callable[[], Any], nbytes: int) -> Future:
        """Makes a call after those that were submitted before.

        Raises:
            CommunicatorError: The interpreter ends, and starts nothing any more.
        """
        self._left.append(nbytes)
        self._started_nbytes += nbytes
        try:
            return self._pool.submit(self._make, call)
        except RuntimeError:
            stay_if_process_ends()
            raise CommunicatorError(
                "async_op=True starts no call any more, since the communicator is closed or the interpreter "
                "ends; leave async_op out"
            ) from None

    def _make(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        finally:
            self._ended_nbytes += self._left.popleft()
            if (one_has_ended := self._one_has_ended) is not None:
                one_has_ended.set()

    def close(self) -> None:
        """Makes the calls that are left, and ends the thread."""
        self._pool.shutdown()


def nbytes_of(arrays: Any) -> int:
    """Bytes of an array, or of all arrays of a list; 0 where there is none."""
    if arrays.__class__ is np.ndarray:
        return int(arrays.nbytes)
    if isinstance(arrays, (list, tuple)):
        return sum(map(nbytes_of, arrays))
    return getattr(arrays, "nbytes", 0)


def no_thread(what: str, error: Exception, broke: Callable[[BaseException], object]) -> ResourceError:
    """The error for a thread that cannot be started, with which the communicator ends.

    Args:
        what: What the thread is for.
        error: What Python says.
        broke: See ``ProgressThread``.
    """
    problem = ResourceError(
        f"no thread can be started for {what} with async_op=True ({error}); allow this process more memory "
        f"(ulimit -v) or threads (ulimit -u), or leave async_op out"
    )
    broke(problem)
    return problem
