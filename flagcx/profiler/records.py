"""The records of the operations, kept at the least cost.

A recorded plan reads the clock twice and puts one tuple into a buffer, which drops its oldest; everything
else is done when a report is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns as now
from typing import Any

from flagcx.transport.base import Plan, Progress

CAPACITY = 1024
"""Records that are kept. More would not stay in the processor's cache, and cost more to replace."""
NO_CALL = -1
"""The sequence number of an operation that not all ranks take part in."""


@dataclass(slots=True)
class Uncounted:
    """The counters of a transport that counts nothing: work on a GPU goes on after the call."""

    sequence: int = NO_CALL
    waited_ns: int = 0
    background: bool = False


@dataclass(frozen=True, slots=True)
class OperationInfo:
    """The operation that a plan carries out; shared by the records of all its runs.

    Attributes:
        collective: Name of the collective, or "transfer".
        nbytes: Bytes of the message, or of one block where the collective has blocks.
        dtype: Name of the dtype.
        algorithm: Name of the algorithm.
        pieces: Pieces that each block is cut into.
        protocol: How the transport moves the data; empty for its own choice.
        transport: Name of the transport.
    """

    collective: str
    nbytes: int
    dtype: str
    algorithm: str
    pieces: int
    protocol: str
    transport: str


@dataclass(frozen=True, slots=True)
class Record:
    """One run of an operation on one rank.

    Attributes:
        operation: The operation.
        sequence: Number of the call, the same on all ranks; -1 where only some take part.
        start_ns: When it began, on the machine's monotonic clock.
        end_ns: When it ended. On a GPU: when it was enqueued.
        waiting_ns: Time that it waited for peers.
        queued_ns: Time that it waited for other work of this rank before it began.
        sent_nbytes: Bytes that this rank sent, where they were counted: in compressed calls; else None.
    """

    operation: OperationInfo
    sequence: int
    start_ns: int
    end_ns: int
    waiting_ns: int
    queued_ns: int
    sent_nbytes: int | None = None

    @property
    def elapsed_ns(self) -> int:
        """Time from begin to end."""
        return self.end_ns - self.start_ns

    @property
    def moving_ns(self) -> int:
        """Time not spent waiting: copies and sums."""
        return self.elapsed_ns - self.waiting_ns


class RecordBuffer:
    """The last records of one communicator.

    Attributes:
        append: Adds a record, as a tuple of the fields of ``Record``.
    """

    __slots__ = ("_records", "append")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[tuple] = deque(maxlen=capacity)
        self.append = self._records.append

    def records(self) -> list[Record]:
        """The records, oldest first."""
        return [Record(*fields) for fields in self._records.copy()]

    def clear(self) -> None:
        """Forgets all records."""
        self._records.clear()


class RecordedPlan:
    """A plan whose runs are recorded.

    Args:
        plan: The plan.
        operation: The operation that it carries out.
        ring: The buffer for the records.
        progress: The counters of its transport.
        shared: Whether all ranks make this call together.

    Attributes:
        run: See ``transport.base.Plan``; a third argument says how long the call waited for its turn, in ns.
            A function, not a method: it costs a third less.
    """

    __slots__ = ("operation", "plan", "run")

    def __init__(
        self,
        plan: Plan,
        operation: OperationInfo,
        ring: RecordBuffer,
        progress: Progress,
        shared: bool = True,
    ) -> None:
        self.plan, self.operation = plan, operation
        self.run = _recording(plan.run, operation, ring, progress if shared else _NoCall(progress))

    def run_queued(self, given: Any, result: Any, queued_at_ns: int) -> None:
        """Runs the plan of a call that was made at ``queued_at_ns`` and had to wait for its turn."""
        self.run(given, result, now() - queued_at_ns)


class _NoCall:
    """The counters of a transport, for operations that are no calls of all ranks."""

    __slots__ = ("_progress", "sequence")

    def __init__(self, progress: Progress) -> None:
        self._progress, self.sequence = progress, NO_CALL

    @property
    def waited_ns(self) -> int:
        return self._progress.waited_ns


def _recording(
    run: Callable[[Any, Any], object], operation: OperationInfo, ring: RecordBuffer, progress: Any
) -> Callable[..., None]:
    """A function that does what ``run`` does, and adds a record.

    What it needs are defaults of its arguments: a variable of this function would be one more object that
    Python's garbage collector visits, for each of thousands of plans.
    """

    def recorded(
        given: Any,
        result: Any,
        queued_ns: int = 0,
        run: Callable[[Any, Any], object] = run,
        operation: OperationInfo = operation,
        append: Callable[[tuple], None] = ring.append,
        progress: Any = progress,
    ) -> None:
        waited = progress.waited_ns
        start = now()
        run(given, result)
        append((operation, progress.sequence, start, now(), progress.waited_ns - waited, queued_ns))

    return recorded
