"""How a client comes to a store: it connects, and both ends show that they know the key.

The module ``store_server`` has a picture of it.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from flagcx.bootstrap import wire
from flagcx.bootstrap.sockets import is_own_user, parse_address, tune
from flagcx.descriptors import close_own, identity_of, is_own, occupy_standard_streams
from flagcx.errors import BootstrapError

_LONGEST_SILENCE_S = 5


class StoreLink(Connection):
    """A connection to a store, which the program may close at its descriptor.

    Args:
        handle: The socket's descriptor.
    """

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._identity = identity_of(handle)

    def send_bytes(self, *message: Any) -> None:
        """Sends a message; see ``Connection``.

        Raises:
            OSError: The connection has ended, or the program has closed its descriptor.
        """
        self._check()
        super().send_bytes(*message)

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """Receives a message; see ``Connection``.

        Raises:
            OSError: The connection has ended, or the program has closed its descriptor.
        """
        self._check()
        return super().recv_bytes(maxlength)

    def _check(self) -> None:
        if not is_own(self.fileno(), self._identity):
            raise OSError(errno.EBADF, "the program has closed the connection to the store")

    def _close(self) -> None:
        close_own(self.fileno(), self._identity)


def open_connection(address: str, timeout_s: float, rank: int) -> Connection:
    """Connects to a store's address, for a rank (-1: an observer)."""
    try:
        family, place = parse_address(address)
    except ValueError as error:
        raise BootstrapError(f"the store of rank {rank} cannot be found: {error}", rank=rank) from None
    occupy_standard_streams()
    link = socket.socket(family, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        link.connect(place)
        link.settimeout(None)
        # In the middle of a message, a silence of this length is the end: a stopped server must not hang us.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _LONGEST_SILENCE_S, 0))
        tune(link)
        if not is_own_user(link):
            raise OSError("another user listens there")
    except OSError as error:
        link.close()
        raise BootstrapError(
            f"rank {rank} cannot reach the store at {address}: {error}", rank=rank
        ) from error
    return StoreLink(link.detach())


def greet(
    address: str,
    authkey: bytes,
    claim: Mapping[str, Any],
    connection: Connection,
    hear: Callable[[], bytes],
) -> tuple[dict[str, Any], bytes]:
    """Shows the server that this end knows the key, and has the server show the same.

    Args:
        address: The server's address, for messages.
        authkey: The key.
        claim: What this end says of itself.
        connection: The connection, on which nothing has been sent.
        hear: Returns the next message of the server.

    Returns:
        The server's answer: its header and its body.

    Raises:
        BootstrapError: What listens there is no store, or is one of another key.
    """
    rank = claim.get("rank")
    opening = hear()
    if len(opening) != len(wire.MAGIC) + wire.NONCE_NBYTES or not opening.startswith(wire.MAGIC):
        raise BootstrapError(f"the server at {address} is no flagcx store", rank=rank)
    server_nonce, client_nonce = opening[len(wire.MAGIC) :], secrets.token_bytes(wire.NONCE_NBYTES)
    message = wire.pack(dict(claim))
    shown = wire.proof(authkey, "client", server_nonce, client_nonce, message)
    # A server that has just closed the connection is told by the next message, which does not come.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send_bytes(client_nonce + shown + message)
    proof, answer = _split(hear())
    if not wire.same_proof(proof, wire.proof(authkey, "server", server_nonce, client_nonce, answer)):
        raise BootstrapError(f"the store at {address} does not know this job's key", rank=rank)
    return wire.unpack(answer)


def _split(message: bytes) -> tuple[bytes, bytes]:
    return message[: wire.PROOF_NBYTES], message[wire.PROOF_NBYTES :]
