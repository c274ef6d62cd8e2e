"""The sockets of a store: their addresses as text, and their options."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Callable

from flagcx.descriptors import occupy_standard_streams
from flagcx.errors import BootstrapError

_CREDENTIALS = struct.Struct("3i")
_SIOCGIFADDR = 0x8915
_ADDRESSES_TOLD = 64


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Reads ``unix:@name`` (abstract), ``unix:/path``, ``tcp:host:port`` or ``host:port``.

    Returns:
        The socket family, and the address as ``socket.connect`` wants it (a host name is looked up).

    Raises:
        ValueError: The text is none of these, or the host is unknown.
    """
    scheme, colon, rest = address.partition(":")
    if scheme == "unix" and rest:
        return socket.AF_UNIX, "\0" + rest[1:] if rest.startswith("@") else rest
    if scheme == "tcp":
        address = rest.removeprefix("//")
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{address!r} is no address; expected host:port or unix:/path")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host of {address!r} cannot be found: {error}") from None
    family, _, _, _, place = found[0]
    return family, (str(place[0]), int(place[1]))


def format_address(bound: socket.socket) -> str:
    """Writes the address of a bound socket as ``parse_address`` reads it."""
    name = bound.getsockname()
    if bound.family == socket.AF_UNIX:
        return "unix:@" + name[1:].decode() if isinstance(name, bytes) else f"unix:{name}"
    host = f"[{name[0]}]" if bound.family == socket.AF_INET6 else name[0]
    return f"tcp:{host}:{name[1]}"


def tune(connection: socket.socket) -> None:
    """Has TCP send small messages at once, and find out within half a minute that a host is silent."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def listen(address: str | None) -> socket.socket:
    """Opens a listening socket.

    Args:
        address: As ``parse_address`` reads it; None for an abstract Unix socket of a random name.

    Raises:
        BootstrapError: It cannot be listened on.
    """
    if address is None:
        address = f"unix:@flagcx-{secrets.token_hex(12)}"
    try:
        family, place = parse_address(address)
    except ValueError as error:
        raise BootstrapError(f"the store cannot listen: {error}") from None
    occupy_standard_streams()
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise BootstrapError(
            f"the store cannot listen on {address}: {error.strerror}; choose an address of this "
            f"host and a free port"
        ) from error
    return listener


def is_own_user(connection: socket.socket) -> bool:
    """Whether a Unix socket's other end runs as this user. (Over TCP the key alone decides.)"""
    if connection.family != socket.AF_UNIX:
        return True
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] == os.getuid()


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, one for each interface, the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                found.append(socket.inet_ntoa(reply[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def told_addresses(bound: str) -> list[str]:
    """Where other hosts may reach a server that listens on all of this host's interfaces."""
    port = bound.rpartition(":")[2]
    return [f"tcp:{address}:{port}" for address in own_addresses()[:_ADDRESSES_TOLD]]


def distance_from(own: list[str]) -> Callable[[str], int]:
    """A sort key for addresses: the more leading bits one shares with one of ``own``, the nearer it is."""

    def number(address: str) -> int:
        return int.from_bytes(socket.inet_aton(address), "big")

    def distance(address: str) -> int:
        host = number(address.split(":")[1])
        return min(((host ^ number(mine)).bit_length() for mine in own), default=32)

    return distance
