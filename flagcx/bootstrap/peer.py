"""A connection to a store, as its server sees it."""

from __future__ import annotations

import secrets
import socket

from flagcx.bootstrap import wire


class Peer:
    """A connection: a stranger's (rank -1) until it has shown the key, then a rank's.

    Attributes:
        outbox: What is to be sent, in frames.
        joined: Whether it is a rank's that has not left.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.socket = connection
        self.deadline = deadline
        self.nonce = secrets.token_bytes(wire.NONCE_NBYTES)
        self.reader = wire.FrameReader(wire.MAX_GREETING_NBYTES)
        self.outbox = bytearray()
        self.rank = -1
        self.joined = False

    def flush(self) -> None:
        """Sends as much of ``outbox`` as the socket takes now."""
        try:
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()  # The peer is gone; reading will tell so next.
