"""A slow link in place of a fast one, for trials: every call takes the time that a real link would.

The data still travels by the transport inside. When it is there, the rank sleeps for what is left of the
time that the link would have needed, and leaves its core to others meanwhile, as a network card does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import perf_counter_ns, sleep
from typing import Any

from flagcx.schedule.model import Send
from flagcx.transport.base import Call, Plan, Progress, Transport
from flagcx.transport.link_speed import LinkSpeed
from flagcx.transport.messenger import Message, Messenger


class Throttled(Transport):
    """A transport that takes its time.

    The time of a call is that of this rank's bytes, sent or received, whichever are more, and of one latency
    for each step in which the rank takes part. It counts from when the peers' data could leave: waiting for
    a late peer is not part of it, moving the data inside is.

    Args:
        transport: What carries the arrays.
        link: The speed of the link.

    Example:
        >>> slow = Throttled(transport, LinkSpeed(0.125, latency_us=50))  # doctest: +SKIP
    """

    def __init__(self, transport: Transport, link: LinkSpeed) -> None:
        self.name = f"{transport.name}, throttled"
        self.rank, self.size = transport.rank, transport.size
        self.kind, self.cross_memory = transport.kind, transport.cross_memory  # type: ignore[misc]
        self._time_ns = link.time_ns
        self.link, self.progress, self._inner = link, transport.progress, transport
        if transport.messenger is not None:
            self.messenger = PacedMessenger(transport.messenger, transport.rank, link)

    def compile(self, call: Call) -> Plan:
        """Compiles the call inside; see ``Transport.compile``."""
        return _Paced(self._inner.compile(call), self._time_ns(*_load(call)), self.progress)

    def transfer(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """Sends and receives at the link's pace; see ``Transport.transfer``."""
        sent, received = (sum(a.nbytes for a, _ in messages) for messages in (sends, receives))
        time_ns = self._time_ns(max(sent, received), 1)
        _at_pace(time_ns, self.progress, self._inner.transfer, sends, receives)

    def protocols(self, *call: Any) -> Collection[str]:
        """Those of the transport inside, as the other methods are."""
        return self._inner.protocols(*call)

    def take(self, array: Any, what: str, writable: bool) -> Any:
        """Takes a caller's array as the carrying transport does."""
        return self._inner.take(array, what, writable)

    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Takes or makes the array of a result as the carrying transport does."""
        return self._inner.result(out, what, shape, dtype)

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """Makes an array that the carrying transport's peers reach."""
        return self._inner.empty(shape, dtype)

    def hints(self) -> list[str]:
        """What the carrying transport says of the calls."""
        return self._inner.hints()

    def has_lost(self) -> bool:
        """What the carrying transport knows of the ranks."""
        return self._inner.has_lost()

    def check_end(self) -> None:
        """Lets the carrying transport compare the ranks' calls."""
        self._inner.check_end()

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers through the carrying transport."""
        self._inner.abort(reason, culprit)

    def close(self) -> None:
        """Closes the carrying transport."""
        self._inner.close()


class PacedMessenger(Messenger):
    """Carries messages at a link's pace: those of one direction share its bandwidth, one after the other.

    Args:
        messenger: Carries them.
        rank: This rank, whose messages to itself cross no link.
        link: The speed of the link.
    """

    def __init__(self, messenger: Messenger, rank: int, link: LinkSpeed) -> None:
        self._inner, self._rank, self._link = messenger, rank, link
        self.timeout_s = messenger.timeout_s
        self._free_ns = {True: 0, False: 0}  # when all that was sent, or received, has crossed the link

    def begin(self, sends: bool, array: Any, peer: int) -> Message:
        """Begins a message; see ``Messenger.begin``."""
        message = self._inner.begin(sends, array, peer)
        return message if peer == self._rank else _PacedMessage(message, array.nbytes, self)

    def due_ns(self, sends: bool, start_ns: int, nbytes: int) -> int:
        """When a message that could leave at ``start_ns`` has crossed the link."""
        begin_ns = max(start_ns, self._free_ns[sends])
        self._free_ns[sends] = begin_ns + self._link.time_ns(nbytes, 0)
        return begin_ns + self._link.time_ns(nbytes, 1)

    def examine(self, message: Message, waited_s: float, late: bool, caller: bool) -> None:
        """Looks for a reason to give up a message that the peer holds up; see ``Messenger.examine``."""
        if not isinstance(message, _PacedMessage):
            self._inner.examine(message, waited_s, late, caller)
        elif not message.has_come:
            self._inner.examine(message.inner, waited_s, late, caller)

    def end_wait(self) -> None:
        """A caller's wait is over."""
        self._inner.end_wait()

    def abandon(self, messages: Sequence[Message]) -> None:
        """Lets go of messages that won't end."""
        self._inner.abandon([m.inner if isinstance(m, _PacedMessage) else m for m in messages])

    def rest(self, looks: int, waited_s: float, caller: bool) -> None:
        """Waits a little."""
        self._inner.rest(looks, waited_s, caller)


class _PacedMessage:
    """A message that ends when it would have crossed the link; see ``messenger.Message``."""

    __slots__ = ("_due_ns", "_messenger", "_nbytes", "has_come", "inner", "peer", "sends")

    def __init__(self, message: Message, nbytes: int, messenger: PacedMessenger) -> None:
        self.inner, self._nbytes, self._messenger = message, nbytes, messenger
        self.peer, self.sends = message.peer, message.sends
        self.has_come, self._due_ns = False, 0

    def ready(self) -> bool:
        return perf_counter_ns() >= self._due_ns if self.has_come else self.inner.ready()

    def advance(self) -> bool:
        if not self.has_come:
            start_ns = perf_counter_ns()
            self.has_come = self.inner.advance()
            if self.has_come:
                self._due_ns = self._messenger.due_ns(self.sends, start_ns, self._nbytes)
        return self.has_come and perf_counter_ns() >= self._due_ns


def throttled(transport: Transport, throttle: str) -> Transport:
    """Puts a slow link in front of a transport, where the setting asks for one.

    Args:
        transport: What carries the arrays.
        throttle: See ``LinkSpeed.parse``; the transport itself is returned for an empty text.
    """
    return Throttled(transport, LinkSpeed.parse(throttle)) if throttle else transport


class _Paced:
    """A plan that takes its time."""

    __slots__ = ("_plan", "_progress", "_time_ns")

    def __init__(self, plan: Plan, time_ns: int, progress: Progress | None) -> None:
        self._plan, self._time_ns, self._progress = plan, time_ns, progress

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        _at_pace(self._time_ns, self._progress, self._plan.run, sendbuf, recvbuf)


def _at_pace(time_ns: int, progress: Progress | None, call: Callable[..., object], *args: Any) -> None:
    """Makes a call, then sleeps for what is left of its time, in which waiting for peers does not count."""
    waited_ns = 0 if progress is None else progress.waited_ns
    due_ns = perf_counter_ns() + time_ns
    call(*args)
    if progress is not None:
        due_ns += progress.waited_ns - waited_ns
    left_ns = due_ns - perf_counter_ns()
    if left_ns > 0:
        sleep(left_ns / 1e9)


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
