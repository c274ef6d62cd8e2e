"""Reads sizes as the command line takes them."""

from __future__ import annotations

import re

from flagcx.errors import ArgumentError

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?(?:[eE]\+?\d{1,2})?)\s*(?:([kKmMgGtT])(i?[bB])?|[bB])?\s*")
_POWERS = "kmgt"
_MOST = 1 << 60


def parse_nbytes(text: str) -> int:
    """Reads a size in bytes: ``4096``, ``1e6``, ``64MiB``, ``64M``, ``10MB``.

    K, M, G and T alone are powers of 1024, as nccl-tests reads them, and so are KiB and so on; KB, MB, GB and
    TB are powers of 1000.

    Raises:
        ArgumentError: It is no size, or no whole number of bytes.

    Example:
        >>> parse_nbytes("64MiB") == parse_nbytes("64M") == 64 << 20, parse_nbytes("10MB")
        (True, 10000000)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ArgumentError(
            f"{text!r} is not a size; write bytes as 4096, 1e6, 64KiB, 64M (MiB) or 10MB (10^6)"
        )
    number, letter, unit = match.groups()
    base = 1000 if unit and unit.lower() == "b" else 1024
    value = float(number) * (base ** (_POWERS.index(letter.lower()) + 1) if letter else 1)
    if value > _MOST or value != int(value):
        raise ArgumentError(f"{text!r} is {value:g} bytes; expected a whole number up to 2^60")
    return int(value)
