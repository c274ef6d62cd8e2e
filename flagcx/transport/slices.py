"""Short slices of a core for threads that others wait for.

A rank that waits gives its core away (``sched_yield``), and with it the rest of its slice: on a core that it
shares with a computation it comes back after that one's slice, milliseconds later. With short slices it gives
away little, and is due soon; its share of the core stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from types import MappingProxyType

_SLICE_NS = 100_000
_SCHED_SETATTR = MappingProxyType(
    {"x86_64": 314, "aarch64": 274, "riscv64": 274, "loongarch64": 274, "ppc64le": 355, "s390x": 345}
)
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def ask_for_short_slices() -> bool:
    """Asks the scheduler to let this thread run for less at a time, and sooner.

    Returns:
        Whether it takes such wishes. Linux does since 6.12; before, nothing changes.

    Source: sched_setattr(2), field ``sched_runtime`` of a thread of SCHED_OTHER.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    policy, flags, priority, deadline, period = 0, 0, 0, 0, 0
    packed = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, flags, nice, priority, _SLICE_NS, deadline, period)
    attributes = ctypes.create_string_buffer(packed, len(packed))
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
