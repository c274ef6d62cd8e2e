"""The thread that carries out what was started, beside the computation of the caller.

It sleeps nearly all the time and has little to do when it wakes. On a machine whose cores are all at work it
may then wait some milliseconds behind a computation, for the length of the scheduler's usual slice, and so do
the peers that wait for it. So it asks for short slices, which are due sooner; its share of the core stays.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flagcx.daemon import Daemon
from flagcx.errors import ResourceError
from flagcx.transport.slices import ask_for_short_slices


def progress_thread(broke: Callable[[BaseException], object]) -> ThreadPoolExecutor:
    """A pool of the one thread, which runs already.

    Args:
        broke: Ends the communicator after an error, and tells the peers, which may be in the call.

    Raises:
        ResourceError: No thread can be started.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="flagcx", initializer=ask_for_short_slices)
    try:
        Daemon(int, "flagcx-first").start()  # which does not wait without end where none can be started
        pool.submit(int)  # with which the thread starts
    except RuntimeError as error:
        raise no_thread("calls", error, broke) from None
    return pool


def no_thread(what: str, error: Exception, broke: Callable[[BaseException], object]) -> ResourceError:
    """The error for a thread that cannot be started, with which the communicator ends.

    Args:
        what: What the thread is for.
        error: What Python says.
        broke: See ``progress_thread``.
    """
    problem = ResourceError(
        f"no thread can be started for {what} with async_op=True ({error}); allow this process more memory "
        f"(ulimit -v) or threads (ulimit -u), or leave async_op out"
    )
    broke(problem)
    return problem
