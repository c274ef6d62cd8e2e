"""Sends and receives on a GPU: the messages of a call, and those of a rank to itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from flagcx.errors import ArgumentError
from flagcx.transport.stream_order import StreamOrder


class Message(NamedTuple):
    """A message of this rank to or from another, or itself.

    Attributes:
        sends: Whether it is sent; else it is received.
        at: Address of its first byte.
        nbytes: Bytes.
        peer: The other rank.
    """

    sends: bool
    at: int
    nbytes: int
    peer: int


class Transfer(NamedTuple):
    """The messages of one call, which ``str()`` describes: nobody makes the words until they are needed.

    Attributes:
        messages: All of them.
        own: Those of this rank to or from itself.
    """

    messages: tuple[Message, ...]
    own: tuple[Message, ...]

    def __str__(self) -> str:
        return f"send and receive of {sum(m.nbytes for m in self.messages)} bytes"


class Posted:
    """A receive that a rank has started from itself, before it sends.

    It stands for the event after the receive, which there is none of before the send.

    Args:
        message: The receive.
        array: Its array.
        ready: The event after which the array may be written.
        rank: This rank.
    """

    def __init__(self, message: Message, array: Any, ready: Any, rank: int) -> None:
        self.message, self.array, self.ready, self._rank = message, array, ready, rank
        self.event: Any = None

    @property
    def done(self) -> bool:
        """Whether the message has been sent, and received."""
        return self.event is not None and bool(self.event.done)

    @property
    def ptr(self) -> Any:
        """The event's handle.

        Raises:
            ArgumentError: The message was not sent, so that waiting for it would not end.
        """
        if self.event is None:
            raise ArgumentError(
                f"rank {self._rank} waits for {self.message.nbytes} bytes from itself that it has not sent; "
                f"call send before wait"
            )
        return self.event.ptr


class ToSelf:
    """What a rank has sent to itself and not received yet, copies on its GPU; or receives before their sends.

    Args:
        cupy: The CuPy module.
        order: The communicator's order.
    """

    def __init__(self, cupy: Any, order: StreamOrder) -> None:
        self._cupy, self._order = cupy, order
        self._kept: deque[tuple[Any, int, Any]] = deque()
        self._posted: deque[Posted] = deque()

    @property
    def has_sent(self) -> bool:
        """Whether there is something that this rank has sent to itself and not received."""
        return bool(self._kept)

    def check(self, own: Sequence[Message], started: bool = False) -> None:
        """Refuses to receive what was not sent, which would be waited for forever.

        Args:
            own: The messages of a call that this rank sends to itself or receives from itself.
            started: Whether the call does not wait for them, so that they may be sent later.

        Raises:
            ArgumentError: This rank receives more from itself than it has sent, or of another size.
        """
        if not own:
            return
        rank = self._order.rank
        sizes = [nbytes for _, nbytes, _ in self._kept] + [m.nbytes for m in own if m.sends]
        taken = [m.nbytes for m in own if not m.sends]
        for i, expected in enumerate([posted.message.nbytes for posted in self._posted] + taken):
            if i >= len(sizes):
                if started or not taken:
                    return
                raise ArgumentError(
                    f"rank {rank} receives {expected} bytes from itself and has sent nothing that is left; "
                    f"call send first, or put both into one comm.group()"
                )
            if sizes[i] != expected:
                raise ArgumentError(
                    f"rank {rank} receives {expected} bytes from itself, where it has sent {sizes[i]}; both "
                    f"must have the same count and dtype"
                )

    def settle(self, messages: Sequence[Message], stream: Any) -> Sequence[Message]:
        """Copies what goes to this rank itself, in the order of the calls; returns the other messages."""
        rank = self._order.rank
        for sends, at, nbytes, peer in messages:
            if peer == rank and sends:
                self._send(at, nbytes, stream)
        for sends, at, nbytes, peer in messages:
            if peer == rank and not sends:
                copy, _, sent_on = self._kept.popleft()
                self._order.chain(sent_on, stream)
                self._copy(at, copy.ptr, nbytes, stream)
                self._order.keep(stream, copy)
        return [message for message in messages if message.peer != rank]

    def _send(self, at: int, nbytes: int, stream: Any) -> None:
        """Copies to the first receive that waits for it, or to memory of its own."""
        if self._posted:
            posted = self._posted.popleft()
            stream.wait_event(posted.ready)
            self._copy(posted.message.at, at, nbytes, stream)
            posted.event = self._order.keep_apart(stream, posted.array)
            return
        copy = self._cupy.cuda.alloc(max(nbytes, 1))
        self._kept.append((copy, nbytes, stream))
        self._copy(copy.ptr, at, nbytes, stream)

    def post(self, message: Message, array: Any, ready: Any) -> Posted:
        """Leaves a receive to the send that comes later."""
        posted = Posted(message, array, ready, self._order.rank)
        self._posted.append(posted)
        return posted

    def _copy(self, to: int, start: int, nbytes: int, stream: Any) -> None:
        runtime = self._cupy.cuda.runtime
        if nbytes:
            runtime.memcpyAsync(to, start, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def close(self) -> None:
        """Drops what was never received, and receives that were never sent to."""
        self._kept.clear()
        self._posted.clear()
