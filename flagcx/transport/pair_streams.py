"""Streams of the messages that a rank starts, so that none waits for a collective or for another pair.

The sends to a rank have a stream, and so have the receives from it: each message of a stream follows the one
before it, and nothing else. A message that the caller enqueues on a stream of its own follows those of its
pair that were started before, and the next that is started follows it. The messages of a rank to itself are
copies, on one further stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flagcx.transport.device_messages import Message, ToSelf
from flagcx.transport.stream_order import StreamOrder

_SENDS, _RECEIVES = -4, -3
"""Priorities of the streams. Streams of one priority share a few queues of the GPU, in which one that waits
keeps the others back; so sends have other queues than receives, and both have others than collectives."""


class PairStreams:
    """The streams of one communicator.

    Args:
        cupy: The CuPy module.
        order: The communicator's order, which these messages do not take part in.
        to_self: What this rank has sent to itself.
        enqueue: Enqueues a message to or from another rank on a stream.
    """

    def __init__(
        self, cupy: Any, order: StreamOrder, to_self: ToSelf, enqueue: Callable[[Message, Any], None]
    ) -> None:
        self._cupy, self._order, self._to_self, self._enqueue = cupy, order, to_self, enqueue
        self._streams: dict[tuple[bool, int], Any] = {}
        self._last: dict[tuple[bool, int], Any] = {}  # streams of the caller's, of messages not started

    def start(self, message: Message, array: Any, ready: Any) -> Any:
        """Enqueues a message on its stream.

        Args:
            message: The message.
            array: Its array, which is kept until it has been used.
            ready: The event after which the array may be used.

        Returns:
            The event after the message.
        """
        key = message.sends, message.peer
        own = message.peer == self._order.rank
        stream = self._stream((True, message.peer) if own else key)
        if own and not message.sends and not self._to_self.has_sent:
            return self._to_self.post(message, array, ready)
        stream.wait_event(ready)
        last = self._last.pop(key, None)
        if last is not None:
            self._order.chain(last, stream)
        if own:
            self._to_self.settle([message], stream)
        else:
            self._enqueue(message, stream)
        return self._order.keep_apart(stream, array)

    def meet(self, messages: Sequence[Message], stream: Any) -> None:
        """Makes a stream on which these are about to be enqueued wait for those started before them."""
        for message in messages:
            key = message.sends, message.peer
            started = self._streams.get(key)
            if started is not None:
                self._order.chain(started, stream)
            self._last[key] = stream

    def _stream(self, key: tuple[bool, int]) -> Any:
        found = self._streams.get(key)
        if found is None:
            priority = _SENDS if key[0] else _RECEIVES
            found = self._streams[key] = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
        return found

    def close(self) -> None:
        """Gives the streams back, after all operations have ended."""
        self._streams.clear()
        self._last.clear()
