"""Messages that were begun together, and are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.transport.network.message import Message, Slot

Messages = Sequence[tuple[Message, np.ndarray]]
"""Messages, and the one-dimensional array that each brings, or goes to."""


class Flight:
    """Messages that were begun together and are under way.

    Args:
        sends: Messages that this rank sends.
        receives: Messages to this rank.
        tag: Their tag.
        what: The call that all ranks make, in words; empty for one of two ranks.
        stamp: What heads begin with; see ``stamp_of``.

    Attributes:
        requests: The engine's: the heads received, what is sent, and then what follows the heads.
        landed: Where the heads land that are received.
        sent: From where heads are sent.
        long: Whether data of some message follows its head.
        heads: The receives whose heads, which data follows, have not been checked.
        followed: For each request after the first ones, the rank that it waits for.
    """

    __slots__ = (
        "followed", "heads", "landed", "long", "receives", "requests", "sends", "sent", "stamp", "tag",
        "what",
    )  # fmt: skip

    def __init__(self, sends: Messages, receives: Messages, tag: int, what: str, stamp: bytes) -> None:
        self.sends, self.receives, self.tag, self.what, self.stamp = sends, receives, tag, what, stamp
        self.requests: list[Any] = []
        self.landed: list[Slot] = []
        self.sent: list[Slot] = []
        self.heads: list[int] = []
        self.long = False
        self.followed: list[tuple[int, bool]] = []

    @property
    def name(self) -> str:
        """What this rank is in, in words."""
        return self.what or "a send or receive"

    @property
    def after_first(self) -> int:
        """How many requests there are before those for what follows heads."""
        return len(self.receives) + sum(1 + len(message.rest) for message, _ in self.sends)

    def ends(self) -> list[tuple[int, bool]]:
        """For each request the rank at the other end, and whether it sends."""
        ends = [(message.peer, True) for message, _ in self.receives]
        ends += [(message.peer, False) for message, _ in self.sends for _ in range(1 + len(message.rest))]
        return ends + self.followed

    def check_short(self, rank: int, pending: Sequence[bool]) -> None:
        """Checks the short messages that have come; see ``Message.check``."""
        for (message, _), slot, absent in zip(self.receives, self.landed, pending, strict=False):
            if not (absent or message.long):
                message.check(rank, self.stamp, slot)
