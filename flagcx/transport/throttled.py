"""A slow link in place of a fast one, for trials: every call takes the time that a real link would.

The data still travels by the transport inside. When it is there, the rank sleeps for what is left of the
time that the link would have needed, and leaves its core to others meanwhile, as a network card does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns, sleep
from typing import Any

from flagcx.errors import ArgumentError
from flagcx.schedule.model import Send
from flagcx.transport.base import Call, Plan, Transport


@dataclass(frozen=True, slots=True)
class Link:
    """One rank's link to all others: full duplex, and shared by all its messages.

    Attributes:
        bandwidth_gb_per_s: In each direction, in 10^9 bytes per second; 0.0125 is 100 Mbit/s.
        latency_us: Time before the first byte of a step arrives.
    """

    bandwidth_gb_per_s: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_gb_per_s > 0:
            raise ArgumentError(f"a link needs a bandwidth above 0 GB/s, got {self.bandwidth_gb_per_s!r}")
        if not self.latency_us >= 0:
            raise ArgumentError(f"a link's latency is 0 us or more, got {self.latency_us!r}")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Reads ``"0.0125"`` or ``"0.0125,50"``: GB/s, then perhaps us.

        Raises:
            ArgumentError: The text is neither.

        Example:
            >>> Link.parse("0.125,50")
            Link(bandwidth_gb_per_s=0.125, latency_us=50.0)
        """
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2:
            raise ArgumentError(
                f"throttle={text!r} is no link; expected GB/s, or GB/s and us of latency, such as "
                f'"0.0125" (100 Mbit/s) or "0.125,50"'
            )
        return cls(*numbers)

    def time_ns(self, nbytes: int, steps: int) -> int:
        """How long ``nbytes`` in the busier direction take, in ``steps`` steps one after the other."""
        return int(nbytes / self.bandwidth_gb_per_s + 1e3 * steps * self.latency_us)


class Throttled:
    """A transport that takes its time.

    The time of a call is that of this rank's bytes, sent or received, whichever are more, and of one latency
    for each step in which the rank takes part. It counts from when the peers' data could leave: waiting for
    a late peer is not part of it, moving the data inside is.

    Args:
        transport: What carries the arrays.
        bandwidth_gb_per_s: See ``Link``.
        latency_us: See ``Link``.

    Attributes:
        link: The link.

    Example:
        >>> slow = Throttled(transport, bandwidth_gb_per_s=0.125, latency_us=50)  # doctest: +SKIP
    """

    def __init__(self, transport: Any, bandwidth_gb_per_s: float, latency_us: float = 0.0) -> None:
        self.link = Link(bandwidth_gb_per_s, latency_us)
        self.name = f"{transport.name}, throttled"
        self.rank, self.size = transport.rank, transport.size
        self.progress = getattr(transport, "progress", None)
        self._inner = transport
        self.take, self.result, self.empty = transport.take, transport.result, transport.empty
        self.abort, self.close = transport.abort, transport.close
        self.check_end = getattr(transport, "check_end", None)

    def compile(self, call: Call) -> Plan:
        """See ``transport.base.Transport``."""
        return _Paced(self._inner.compile(call), self.link.time_ns(*_load(call)), self.progress)

    def transfer(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """See ``transport.base.Transport``."""
        sent, received = (sum(a.nbytes for a, _ in messages) for messages in (sends, receives))
        pace = _Pace(self.link.time_ns(max(sent, received), 1), self.progress)
        self._inner.transfer(sends, receives)
        pace.keep()


def throttled(transport: Any, throttle: str) -> Transport:
    """Puts a slow link in front of a transport, where the setting asks for one.

    Args:
        transport: What carries the arrays.
        throttle: See ``Link.parse``; the transport itself is returned for an empty text.
    """
    if not throttle:
        return transport
    link = Link.parse(throttle)
    return Throttled(transport, link.bandwidth_gb_per_s, link.latency_us)


class _Pace:
    """A call that has begun, and the time that it must take without its waits."""

    __slots__ = ("_due_ns", "_progress", "_waited_ns")

    def __init__(self, time_ns: int, progress: Any) -> None:
        self._progress = progress
        self._waited_ns = progress.waited_ns if progress is not None else 0
        self._due_ns = perf_counter_ns() + time_ns

    def keep(self) -> None:
        """Sleeps for what is left."""
        waited = self._progress.waited_ns - self._waited_ns if self._progress is not None else 0
        left = self._due_ns + waited - perf_counter_ns()
        if left > 0:
            sleep(left / 1e9)


class _Paced:
    """A plan that takes its time."""

    __slots__ = ("_plan", "_progress", "_time_ns")

    def __init__(self, plan: Plan, time_ns: int, progress: Any) -> None:
        self._plan, self._time_ns, self._progress = plan, time_ns, progress

    def run(self, given: Any, result: Any) -> None:
        """See ``transport.base.Plan``."""
        pace = _Pace(self._time_ns, self._progress)
        self._plan.run(given, result)
        pace.keep()


def _load(call: Call) -> tuple[int, int]:
    """Bytes that the rank of a call sends or receives, whichever are more, and its steps with messages."""
    program = call.program()
    layout = call.layout(program)
    sent = received = steps = 0
    for step in program.steps:
        steps += bool(step.transfers)
        for t in step.transfers:
            start, stop = layout.slice(t.src if isinstance(t, Send) else t.dst)
            if isinstance(t, Send):
                sent += stop - start
            else:
                received += stop - start
    return max(sent, received) * call.dtype.numpy.itemsize, steps
