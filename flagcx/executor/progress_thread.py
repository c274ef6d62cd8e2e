"""The thread that carries out what was started, beside the computation of the caller.

It sleeps nearly all the time and has little to do when it wakes. On a machine whose cores are all at work it
may then wait some milliseconds behind a computation, for the length of the scheduler's usual slice, and so do
the peers that wait for it. So it asks for short slices, which are due sooner; its share of the core stays.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

_SLICE_NS = 100_000
_SCHED_SETATTR = MappingProxyType(
    {"x86_64": 314, "aarch64": 274, "riscv64": 274, "loongarch64": 274, "ppc64le": 355, "s390x": 345}
)
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def progress_thread() -> ThreadPoolExecutor:
    """A pool of the one thread, which is started with the first work."""
    return ThreadPoolExecutor(1, thread_name_prefix="flagcx", initializer=ask_for_short_slices)


def ask_for_short_slices() -> bool:
    """Asks the scheduler to let this thread run for less at a time, and sooner.

    Returns:
        Whether it takes such wishes. Linux does since 6.12; before, nothing changes.

    Source: sched_setattr(2), field ``sched_runtime`` of a thread of SCHED_OTHER.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    policy, flags, nice, priority, deadline, period = 0, 0, 0, 0, 0, 0
    packed = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, flags, nice, priority, _SLICE_NS, deadline, period)
    attributes = ctypes.create_string_buffer(packed, len(packed))
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
