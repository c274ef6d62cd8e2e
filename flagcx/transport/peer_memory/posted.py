"""Which messages that were started both ranks are ready for, as a rank reads it in its own memory."""

from __future__ import annotations

import ctypes

from flagcx.kernels.peer import MOST_RANKS
from flagcx.transport.device_messages import Message

_Words = ctypes.c_uint32 * MOST_RANKS


class PostedCounts(ctypes.Structure):
    """Counts of messages between this rank and each other.

    Attributes:
        posted: Sends of each peer to this rank that it has begun, or is ready for; and receives from it.
        pairs: ``Pair`` of the first channel with each: chunks sent, sends, chunks taken, receives.
    """

    _fields_ = (("posted", _Words * 2), ("pairs", ctypes.c_uint32 * 4 * MOST_RANKS))

    def matched(self, message: Message) -> bool:
        """Whether the peer is ready for this rank's next message to it, or from it."""
        made = self.pairs[message.peer][1 if message.sends else 3]
        begun = self.posted[1 if message.sends else 0][message.peer]
        return 0 < (begun - made) % (1 << 32) < 1 << 31
