"""The secret by which the ranks of a job know each other, as users write it."""

from __future__ import annotations

_SHORTEST_KEY_NBYTES = 16
_A_KEY = "secrets.token_hex(16) makes one"


def read_key(text: str) -> bytes:
    """Reads a secret of the ranks of a job.

    Raises:
        ValueError: It is not hexadecimal, or too short; the text says so of "it", and does not quote it.

    Example:
        >>> len(read_key("00112233445566778899aabbccddeeff"))
        16
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"must be hexadecimal digits, two for each byte; {_A_KEY}") from None
    if len(key) < _SHORTEST_KEY_NBYTES:
        raise ValueError(
            f"has {len(key)} bytes, which can be guessed; expected at least {_SHORTEST_KEY_NBYTES}, of two "
            f"hexadecimal digits each; {_A_KEY}"
        )
    return key
