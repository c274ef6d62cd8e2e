"""The directed links of a network, numbered as messages come to need them, and the routes of messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flagcx.topology.routes import Edge

_BANDWIDTH, _LATENCY = range(2)
Values = float | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """The routes of some messages, one after the other.

    Attributes:
        first: Where the links of each message begin in ``link``, int64 of shape (messages + 1,).
        link: Numbers of links.
        share: The part of the message that goes over each of them.
        latency_us: Of each message, one way.
    """

    first: np.ndarray
    link: np.ndarray
    share: np.ndarray
    latency_us: np.ndarray


class Links:
    """Links by number.

    Links that are alike, as those of one place in all hosts are, are added as one block; the ends of each are
    named when they are asked for. So a million links cost two numbers each.

    Example:
        >>> links = Links()
        >>> links.add(2, "network", lambda n: (f"nic{n}", "switch"), 50.0)
        0
        >>> links.name(1), links.bandwidth_gb_per_s.tolist()
        (('nic1', 'switch'), [50.0, 50.0])
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._names: list[Callable[[int], Edge]] = []
        self._kinds: list[str] = []
        self._values, self._count = np.zeros((2, 64)), 0

    def __len__(self) -> int:
        return self._count

    def add(
        self,
        count: int,
        kind: str,
        name: Callable[[int], Edge],
        bandwidth_gb_per_s: Values,
        latency_us: Values = 0.0,
    ) -> int:
        """Adds links of one kind.

        Args:
            count: How many, at least one.
            kind: Their kind.
            name: (number within the block) -> the ids of a link's ends.
            bandwidth_gb_per_s: 10^9 bytes a second; of each, or one for all.
            latency_us: One way.

        Returns:
            The number of the first; the others follow.
        """
        first, self._count = self._count, self._count + count
        self._starts.append(first)
        self._names.append(name)
        self._kinds.append(kind)
        if self._count > self._values.shape[1]:
            room = np.zeros((2, max(self._count, 2 * self._values.shape[1])))
            room[:, :first] = self._values[:, :first]
            self._values = room
        for row, value in enumerate((bandwidth_gb_per_s, latency_us)):
            self._values[row, first : self._count] = value
        return first

    def name(self, link: int) -> Edge:
        """The ids of the ends of a link."""
        block = bisect_right(self._starts, link) - 1
        return self._names[block](int(link) - self._starts[block])

    def kind(self, link: int) -> str:
        """The kind of a link."""
        return self._kinds[bisect_right(self._starts, link) - 1]

    @property
    def bandwidth_gb_per_s(self) -> np.ndarray:
        """Of each link, float64 of shape (links,); not to be written to."""
        return self._values[_BANDWIDTH, : self._count]

    @property
    def latency_us(self) -> np.ndarray:
        """Of each link, one way."""
        return self._values[_LATENCY, : self._count]
