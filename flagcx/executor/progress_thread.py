"""The thread that carries out what was started, beside the computation of the caller.

It sleeps nearly all the time and has little to do when it wakes. On a machine whose cores are all at work it
may then wait some milliseconds behind a computation, for the length of the scheduler's usual slice, and so do
the peers that wait for it. So it asks for short slices, which are due sooner; its share of the core stays.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from flagcx.transport.slices import ask_for_short_slices


def progress_thread() -> ThreadPoolExecutor:
    """A pool of the one thread, which is started with the first work."""
    return ThreadPoolExecutor(1, thread_name_prefix="flagcx", initializer=ask_for_short_slices)
