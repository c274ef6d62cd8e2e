"""A connection to a store, as its server sees it."""

from __future__ import annotations

import secrets
import selectors
import socket
from collections.abc import Callable
from functools import partial

from flagcx.bootstrap import wire


class Peer:
    """A connection: a stranger's (rank -1) until it has shown the key, then a rank's.

    Args:
        connection: Its socket, which does not block.
        deadline: Until when it has to show the key, on the server's clock.
        selector: What the server waits with.
        attend: Called with the connection and the events for which the selector has woken the server.

    Attributes:
        outbox: What is to be sent, in frames.
        joined: Whether it is a rank's that has not left.
    """

    def __init__(
        self,
        connection: socket.socket,
        deadline: float,
        selector: selectors.BaseSelector,
        attend: Callable[[Peer, int], None],
    ) -> None:
        self.socket = connection
        self.deadline = deadline
        self._selector = selector
        selector.register(connection, selectors.EVENT_READ, partial(attend, self))
        self.nonce = secrets.token_bytes(wire.NONCE_NBYTES)
        self.reader = wire.FrameReader(wire.MAX_GREETING_NBYTES)
        self.outbox = bytearray()
        self.rank = -1
        self.joined = False

    def send(self, payload: bytes) -> None:
        """Sends a payload, as much as the socket takes now, and the rest when it takes more."""
        self.outbox += wire.frame(payload)
        self.flush()

    def flush(self) -> None:
        """Sends as much of ``outbox`` as the socket takes now; wakes the server when it takes more."""
        self._write()
        if self.socket.fileno() >= 0:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)
            key = self._selector.get_key(self.socket)
            if key.events != events:
                self._selector.modify(self.socket, events, key.data)

    def close(self) -> None:
        """Ends the connection."""
        self._selector.unregister(self.socket)
        self.socket.close()

    def _write(self) -> None:
        try:
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()  # The peer is gone; reading will tell so next.
