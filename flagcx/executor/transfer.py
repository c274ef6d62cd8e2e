"""The messages of one call between two ranks or more, until all of them have ended."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as now

from flagcx.profiler import OperationInfo, RecordBuffer
from flagcx.profiler.records import NO_CALL

After = Callable[[], object]


class Transfer:
    """The messages of one call.

    Args:
        after: What is left to do when they have ended, such as to copy what came to where it belongs.
        what: What the records call it; None where nothing is recorded.

    Attributes:
        left: How many messages have not ended; 0 only when nothing is left to do.
        moved_ns: Time spent moving data so far.
        waited_s: For how long callers have waited since data moved last.
    """

    __slots__ = ("_after", "_start_ns", "_what", "left", "moved_ns", "waited_s")

    def __init__(self, after: After | None, what: OperationInfo | None) -> None:
        self._after, self._what, self._start_ns = after, what, now()
        self.left, self.moved_ns, self.waited_s = 1, 0, 0.0  # the call itself, until all have begun

    def count_down(self, ring: RecordBuffer | None) -> None:
        """Notes that one message has ended; after the last, does what is left to do."""
        if self.left > 1:
            self.left -= 1
            return
        if self._after is not None:
            self._after()  # before another thread may see that all has ended
        self.left = 0
        if ring is not None:
            end_ns = now()
            waiting_ns = max(end_ns - self._start_ns - self.moved_ns, 0)
            ring.append((self._what, NO_CALL, self._start_ns, end_ns, waiting_ns, 0))
