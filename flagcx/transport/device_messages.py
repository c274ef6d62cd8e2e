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
    """The messages of one call, which ``str()`` describes: nobody makes the words until they are needed."""

    messages: Sequence[Message]

    def __str__(self) -> str:
        return f"send and receive of {sum(m.nbytes for m in self.messages)} bytes"


class ToSelf:
    """What a rank has sent to itself and not received yet: copies on its GPU.

    Args:
        cupy: The CuPy module.
        order: The communicator's order.
    """

    def __init__(self, cupy: Any, order: StreamOrder) -> None:
        self._cupy, self._order = cupy, order
        self._kept: deque[tuple[Any, int]] = deque()

    def check(self, own: Sequence[Message]) -> None:
        """Refuses to receive what was not sent, which would be waited for forever.

        Args:
            own: The messages of a call that this rank sends to itself or receives from itself.

        Raises:
            ArgumentError: This rank receives more from itself than it has sent, or of another size.
        """
        if not own:
            return
        rank = self._order.rank
        sizes = [nbytes for _, nbytes in self._kept] + [m.nbytes for m in own if m.sends]
        receives = [m.nbytes for m in own if not m.sends]
        for i, expected in enumerate(receives):
            if i >= len(sizes):
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
                copy = self._cupy.cuda.alloc(max(nbytes, 1))
                self._kept.append((copy, nbytes))
                self._copy(copy.ptr, at, nbytes, stream)
        for sends, at, nbytes, peer in messages:
            if peer == rank and not sends:
                copy, _ = self._kept.popleft()
                self._copy(at, copy.ptr, nbytes, stream)
                self._order.keep(stream, copy)
        return [message for message in messages if message.peer != rank]

    def _copy(self, to: int, start: int, nbytes: int, stream: Any) -> None:
        runtime = self._cupy.cuda.runtime
        if nbytes:
            runtime.memcpyAsync(to, start, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def close(self) -> None:
        """Drops what was never received."""
        self._kept.clear()
