"""A clock that stands still while its process does, so that Ctrl-Z lets no time-out pass.

The monotonic clock goes on while a process is stopped (Ctrl-Z, SIGSTOP), and nothing tells the process of it
afterwards. A wait that looks at its clock every ``TICK_S`` can tell by itself: between two looks a process
that runs lets hardly more than a tick pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_S = 0.5
"""How often a clock must be read while something is timed by it, in seconds."""
_LONGEST_S = 2 * TICK_S


class ActiveClock:
    """Seconds since it was made in which this process ran.

    A wait reads it at least every ``TICK_S``. Of the time between two readings at most two ticks count, so a
    pause, however long, takes at most a second from a time-out. A clock serves one thread at a time.

    Args:
        time_s: What it is made from.
    """

    __slots__ = ("_active_s", "_read_at", "_time_s")

    def __init__(self, time_s: Callable[[], float] = time.monotonic) -> None:
        self._time_s = time_s
        self._read_at = time_s()
        self._active_s = 0.0

    def now(self) -> float:
        """The time, in seconds."""
        at = self._time_s()
        self._active_s += min(at - self._read_at, _LONGEST_S)
        self._read_at = at
        return self._active_s
