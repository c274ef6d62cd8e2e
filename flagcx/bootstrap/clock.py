"""A clock that stands still while its process does, so that Ctrl-Z lets no time-out pass."""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_S = 1.0
"""How often a clock must be read while something is timed by it, in seconds."""
_STOOD_STILL_S = 3.0


class ActiveClock:
    """Seconds on the monotonic clock, without those in which this process was stopped.

    It is read at least every ``TICK_S`` while something is timed by it; a longer pause counts for nothing.

    Args:
        time_s: What it is made from.
    """

    def __init__(self, time_s: Callable[[], float] = time.monotonic) -> None:
        self._time_s = time_s
        self._last = time_s()
        self._stood_s = 0.0

    def now(self) -> float:
        """The time, in seconds from an arbitrary moment."""
        last, self._last = self._last, self._time_s()
        if self._last - last > _STOOD_STILL_S:
            self._stood_s += self._last - last
        return self._last - self._stood_s
