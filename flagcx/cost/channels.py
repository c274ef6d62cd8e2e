"""How NCCL cuts a message from send to recv among channels, and how long these take for their parts.

A channel is a block of threads at either end. The sender's copies its part, chunk by chunk, over the link
into memory of the receiver's GPU; the receiver's copies each chunk from there into recvbuf. So a part takes
as long as a channel copies it, and a little longer, while the receiver waits for the first data.

::

    message   |---------- part ----------|---------- part ----------|   two channels
    sends      chunk chunk chunk chunk     chunk chunk chunk chunk
    receives         chunk chunk chunk chunk     chunk chunk chunk chunk

The channels of a message depend on its length and on the number of ranks, not on how many messages are under
way: all channels together are enough for one message to each rank. A rank that sends to one peer alone uses
few of them, and reaches less than its links carry. Several messages to one peer follow each other in the
same channels. A message so short that it has one channel was measured to take no longer than its copy.

Source: NCCL's ``src/enqueue.cc`` (2.19 and later), ``addP2pToPlan`` and ``scheduleP2pTasksToPlan``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcx.errors import ArgumentError

#: Bytes that a channel passes on at a time over NVLink.
_CHUNK_NBYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels that messages are cut among.

    Attributes:
        gb_per_s: 10^9 bytes that a channel copies a second.
        reach: The part of a link's bandwidth that all channels together get out of it, 0 to 1.
        most: Channels of a rank, a power of two; also the most that a message has.
        start_nbytes: Bytes of a part that the receiving end waits for before it has something to copy, where
            a message has several.
        least_part_nbytes: A message is cut into parts no shorter than this.
        most_part_nbytes: Longer parts are cut further, as long as there are channels.

    Example:
        >>> Channels(gb_per_s=20.0).count(np.array([1e3, 1e6, 1e8, 1e9]), ranks=2).tolist()
        [1, 16, 16, 32]
    """

    gb_per_s: float
    reach: float = 1.0
    most: int = 32
    start_nbytes: int = 256 << 10
    least_part_nbytes: int = _CHUNK_NBYTES // 8
    most_part_nbytes: int = _CHUNK_NBYTES * 32

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name}={getattr(self, name)!r}; expected a number above 0")

    def between_hosts(self) -> Channels:
        """The channels where the ranks are on several hosts, which cut messages into the shortest parts."""
        return replace(self, least_part_nbytes=_CHUNK_NBYTES // 2, most_part_nbytes=_CHUNK_NBYTES)

    def count(self, nbytes: np.ndarray, ranks: int) -> np.ndarray:
        """How many channels each message has.

        Args:
            nbytes: Bytes of each, of any shape.
            ranks: Number of ranks of the communicator.

        Returns:
            int64 of the shape of ``nbytes``.
        """
        first = self.most
        while first > 1 and first * ranks > self.most:
            first //= 2
        nbytes = np.asarray(nbytes, np.float64)
        found = np.clip(np.ceil(nbytes / self.least_part_nbytes), 1, first).astype(np.int64)
        doubled = found * 2
        while (more := (nbytes > found * self.most_part_nbytes) & (doubled <= self.most)).any():
            found = np.where(more, doubled, found)
            doubled = found * 2
        return found

    def time_us(
        self, nbytes: np.ndarray, wire_us: np.ndarray, ranks: int, pair: np.ndarray | None = None
    ) -> np.ndarray:
        """How long each message takes.

        Args:
            nbytes: Bytes of each.
            wire_us: How long its links need for it at their bandwidth.
            ranks: Number of ranks of the communicator.
            pair: A number for each message; those of one number share channels, one after the other. None
                where each has its own.

        Returns:
            float64 of the shape of ``nbytes``: the time of the slower of links and channels, and the start.
        """
        count = self.count(nbytes, ranks)
        part = nbytes / count
        speed = self.gb_per_s * 1000
        copied = part if pair is None else np.bincount(pair, part)[pair]
        start = np.where(count > 1, np.minimum(part, self.start_nbytes), 0.0)
        return np.maximum(wire_us / self.reach, copied / speed) + start / speed
