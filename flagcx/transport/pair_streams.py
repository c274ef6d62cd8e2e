"""Messages that a rank starts: each on the stream of its pair, and launched when both ranks are ready for it.

The sends to a rank have a stream, and so have the receives from it: each message of a stream follows the one
before it, and nothing else. A kernel that waits would hold up more than itself, since CUDA waits for all
kernels that run before it loads another one, or frees memory. So a message that was started is only posted
at first: a launch that does not wait tells the peer that this rank has come so far. A thread launches the
message itself when the peer is as far; ``wait`` does so at once, as the caller's stream waits then anyway.

A message that the caller enqueues on a stream of its own follows those of its pair that were started before,
and the next that is started follows it. The messages of a rank to itself are copies, on one further stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from flagcx.kernels.cuda import RELAXED, capture_mode
from flagcx.transport.device_messages import Message, ToSelf
from flagcx.transport.stream_order import StreamOrder

logger = logging.getLogger("flagcx")

_PRIORITY = -4
_LEAST_PAUSE_S, _MOST_PAUSE_S, _LINGER_S, _STOP_S = 50e-6, 1e-3, 0.5, 1.0


class Counts(Protocol):
    """What the peers are ready for."""

    def matched(self, message: Message) -> bool:
        """Whether the peer is ready for this rank's next message to it, or from it."""


class Carrier(Protocol):
    """Enqueues messages to and from other ranks."""

    def prepare_messages(self, stream: Any) -> None:
        """Loads the kernels."""

    def post(self, message: Message, stream: Any) -> None:
        """Enqueues what tells the peer that this rank is ready for a message."""

    def start(self, message: Message, stream: Any) -> None:
        """Enqueues the message."""

    def posted(self, stream: Any) -> Counts:
        """What the peers are ready for by now."""


class Started:
    """A message that was started; it stands for the event after it, which is there once it was launched.

    Args:
        pairs: The streams.
        message: The message.
        array: Its array, which is kept until it has been used.
        ready: The event after which the array may be used.
    """

    __slots__ = ("_pairs", "array", "event", "message", "posted", "ready")

    def __init__(self, pairs: PairStreams, message: Message, array: Any, ready: Any) -> None:
        self._pairs, self.message, self.array, self.ready = pairs, message, array, ready
        self.posted: Any = None
        self.event: Any = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.event is not None and bool(self.event.done)

    @property
    def ptr(self) -> Any:
        """The event's handle; launches the message if that has not been done."""
        if self.event is None:
            self._pairs.launch(self)
        return self.event.ptr


class _Pair:
    """The messages of one direction between this rank and another.

    Attributes:
        stream: Their stream.
        waiting: Those that were started and not launched.
        last: The stream of the caller's with a message that the next one follows, or None.
    """

    def __init__(self, stream: Any, last: Any) -> None:
        self.stream, self.last = stream, last
        self.waiting: deque[Started] = deque()


class PairStreams:
    """The messages of one communicator that were started.

    Args:
        cupy: The CuPy module.
        order: The communicator's order, which these messages do not take part in.
        to_self: What this rank has sent to itself.
        carrier: Enqueues messages to and from other ranks.
    """

    def __init__(self, cupy: Any, order: StreamOrder, to_self: ToSelf, carrier: Carrier) -> None:
        self._cupy, self._order, self._to_self, self._carrier = cupy, order, to_self, carrier
        self._pairs: dict[tuple[bool, int], _Pair] = {}
        self._before: dict[tuple[bool, int], Any] = {}  # streams of the caller's, of pairs that are not here
        self._side: Any = None
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- calls ------------------------------------------------------------------------------------

    def start(self, message: Message, array: Any, ready: Any) -> Any:
        """Starts a message; see ``Started``. Returns what stands for the event after it."""
        if message.peer == self._order.rank:
            return self._start_own(message, array, ready)
        with self._wake:
            self._prepare()
            pair = self._pair((message.sends, message.peer))
            started = Started(self, message, array, ready)
            pair.waiting.append(started)
            if self._order.is_capturing(self._cupy.cuda.get_current_stream()):
                self._launch_up_to(pair, started)  # a graph's kernels wait for each other
            elif pair.waiting[0] is started:
                self._post(pair)
            if pair.waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="flagcx-pairs", daemon=True)
                self._thread.start()
            self._wake.notify()
        return started

    def meet(self, messages: Sequence[Message], stream: Any) -> None:
        """Makes a stream on which these are about to be enqueued wait for those started before them."""
        for message in messages:
            key = message.sends, message.peer
            pair = self._pairs.get(key)
            if pair is None:
                self._before[key] = stream
                continue
            with self._lock:
                if pair.waiting:
                    self._launch_up_to(pair, pair.waiting[-1])
                self._order.chain(pair.stream, stream)
                pair.last = stream

    def launch(self, started: Started) -> None:
        """Launches a message, and those before it, though its peer may not be ready.

        Raises:
            FlagcxError: The communicator failed.
        """
        with self._lock:
            if self._order.failure is not None:
                raise self._order.report()
            message = started.message
            if started.event is None:
                self._launch_up_to(self._pair((message.sends, message.peer)), started)

    def finish(self) -> None:
        """Launches all messages that were started."""
        with self._lock:
            for pair in self._pairs.values():
                if pair.waiting:
                    self._launch_up_to(pair, pair.waiting[-1])

    def close(self) -> None:
        """Gives the streams back, after all operations have ended."""
        with self._wake:
            self._closed, thread = True, self._thread
            for pair in self._pairs.values():
                pair.waiting.clear()
            self._wake.notify()
        if thread is not None:
            thread.join(_STOP_S)
        self._pairs.clear()
        self._side = None

    # -- with the lock held -----------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._side is None:
            self._side = self._stream()
            self._carrier.prepare_messages(self._side)

    def _stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY)

    def _pair(self, key: tuple[bool, int]) -> _Pair:
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = _Pair(self._stream(), self._before.pop(key, None))
        return found

    def _start_own(self, message: Message, array: Any, ready: Any) -> Any:
        if not message.sends and not self._to_self.has_sent:
            return self._to_self.post(message, array, ready)
        stream = self._pair((True, message.peer)).stream
        stream.wait_event(ready)
        self._to_self.settle([message], stream)
        return self._order.keep_apart(stream, array)

    def _follow(self, pair: _Pair, started: Started) -> None:
        """Makes the stream of a pair wait for what its next message follows."""
        pair.stream.wait_event(started.ready)
        if pair.last is not None:
            self._order.chain(pair.last, pair.stream)
            pair.last = None

    def _post(self, pair: _Pair) -> None:
        """Tells the peer that this rank is ready for the first message that waits."""
        started = pair.waiting[0]
        self._follow(pair, started)
        self._carrier.post(started.message, pair.stream)
        started.posted = pair.stream.record(self._order.event())

    def _launch_up_to(self, pair: _Pair, last: Started) -> None:
        launched = None
        while launched is not last:
            launched = pair.waiting.popleft()
            if launched.posted is None:
                self._follow(pair, launched)
            self._carrier.start(launched.message, pair.stream)
            launched.event = self._order.keep_apart(pair.stream, launched.array)
        if pair.waiting:
            self._post(pair)

    # -- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Launches messages when their peers are ready for them.

        After an error the next call of the caller's, or the watchdog, says what it is.
        """
        pause_s = _LEAST_PAUSE_S
        try:
            with capture_mode(RELAXED), self._cupy.cuda.Device(self._order.device):
                while self._is_wanted():
                    moved = self._advance()
                    pause_s = _LEAST_PAUSE_S if moved else min(1.5 * pause_s, _MOST_PAUSE_S)
                    time.sleep(pause_s)
        except Exception as error:
            logger.debug("messages that were started are launched by wait() alone: %s", error)

    def _is_wanted(self) -> bool:
        """Waits until messages wait for peers; False if there are none for a while, or no more."""
        with self._wake:
            if not self._any_waits():
                self._wake.wait(_LINGER_S)
            if self._any_waits():
                return True
            self._thread = None
            return False

    def _any_waits(self) -> bool:
        over = self._closed or self._order.failure is not None
        return not over and any(pair.waiting for pair in self._pairs.values())

    def _advance(self) -> bool:
        """Launches the messages that both ranks are ready for. Returns whether there were any."""
        with self._lock:
            ready = [pair for pair in self._pairs.values() if pair.waiting and _is_posted(pair.waiting[0])]
            if not ready or self._closed:
                return False
            counts = self._carrier.posted(self._side)
            matched = [pair for pair in ready if counts.matched(pair.waiting[0].message)]
            for pair in matched:
                self._launch_up_to(pair, pair.waiting[0])
            return bool(matched)


def _is_posted(started: Started) -> bool:
    return started.posted is not None and bool(started.posted.done)
