"""Which arrays are worth fusing, and into how large messages: copies against messages."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flagcx.transport.base import Transport

_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_USUAL_CACHE_NBYTES = 8 << 20
_SHARES = 8  # of the cache: a message is written, added up and read beside the arrays that it is made from
_LEAST_NBYTES, _MOST_NBYTES = 512 << 10, 4 << 20
_LARGEST_ARRAY_NBYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Limits:
    """What is worth fusing.

    Attributes:
        array_nbytes: A larger array travels alone.
        message_nbytes: A message becomes no larger.
    """

    array_nbytes: int
    message_nbytes: int


def host_limits(transport: Transport) -> Limits:
    """What is worth fusing of NumPy arrays; the same on every rank.

    Where ranks share cores, or messages leave the host, each message costs far more than the copies into it
    and out of it.
    """
    if not transport.modelled or transport.size > (os.cpu_count() or 1):
        return Limits(512 << 10, _MOST_NBYTES)
    return limits_in_cache(transport.size, last_cache_nbytes())


def limits_in_cache(ranks: int, cache_nbytes: int) -> Limits:
    """What is worth fusing where every rank has a core, and copies are most of the time.

    The ranks' messages stay in the cache from the copy into them to the copy out of them: on two cores with
    8 MiB of it, packing, adding up and unpacking took twice as long in messages of 4 MiB as in those of
    512 KiB. Where the cache is large, long messages are better, since all ranks wait for the slowest in each:
    on 16 cores with 300 MiB, four ranks took a third less with 4 MiB. ``bench/fusion.py --message-kib 4096``
    measures it. An array for which the two copies take longer than a message of its own travels alone.

    Args:
        ranks: Number of ranks.
        cache_nbytes: Size of the last cache, which they share.

    Example:
        >>> limits_in_cache(2, 8 << 20)
        Limits(array_nbytes=32768, message_nbytes=524288)
    """
    share = min(max(cache_nbytes // (_SHARES * ranks), _LEAST_NBYTES), _MOST_NBYTES)
    message = 1 << share.bit_length() - 1
    return Limits(min(message // 16, _LARGEST_ARRAY_NBYTES), message)


def last_cache_nbytes(path: Path = _LAST_CACHE) -> int:
    """The size of this host's last cache; a usual one where the system does not tell it.

    Args:
        path: The file in which Linux tells it, such as ``8192K``.
    """
    with suppress(OSError, ValueError):
        text = path.read_text().strip()
        nbytes = int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0)
        return nbytes or _USUAL_CACHE_NBYTES
    return _USUAL_CACHE_NBYTES
