"""The place that a program gives to a rank in ``fc.init(rank=, size=, address=, key=)``."""

from __future__ import annotations

from typing import Any

from flagcx.arguments import check_integer, check_rank
from flagcx.bootstrap.key import read_key
from flagcx.errors import ArgumentError


def check_place(rank: Any, size: Any, address: Any, key: Any) -> tuple[int, int]:
    """Checks the place, and returns rank and size.

    Raises:
        ArgumentError: A part of it is missing, or is none.
    """
    if rank is None or size is None:
        raise ArgumentError(f"init(rank={rank}, size={size}): give both, and address where size is above 1")
    size = check_integer(size, "size", 1)
    rank = check_rank(rank, size, "rank")
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if (size > 1 or address) and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ArgumentError(
            f"address={address!r} is not where rank 0 can be met; expected host:port, such as 127.0.0.1:29400"
        )
    if not isinstance(key, str):
        raise ArgumentError(f"key must be a str of hexadecimal digits, got {type(key).__name__}")
    if key:
        try:
            read_key(key)
        except ValueError as error:
            raise ArgumentError(f"key= {error}") from None
    return rank, size
