"""A connection to a store, as its server sees it."""

from __future__ import annotations

import secrets
import socket

from flagcx.bootstrap import wire


class Peer:
    """A connection: a stranger's (rank -1) until it has shown the key, then a rank's.

    Attributes:
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
