"""Two algorithms within one operation, each on a part of the message, where one alone leaves links idle.

A mix has a name as an algorithm has: ``ring|double_binary_tree`` cuts the message in halves, and
``ring 3/4|two_shot`` gives the ring three quarters. ``ring|ring`` goes round both ways at once: a ring sends
to one neighbour alone, and links carry as much in the other direction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from flagcx.algorithms import Algorithm, entries
from flagcx.errors import ArgumentError

_NAME = re.compile(r"([a-z_]+)(?: (\d{1,2})/(\d{1,2}))?\|([a-z_]+)")
BOTH_WAYS = (Algorithm.RING, Algorithm.CHAIN)
"""Algorithms that send in one direction of their order: beside itself, one goes the other way."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Two algorithms beside each other.

    Attributes:
        first: Name of the one.
        second: Name of the other.
        share: The part of the message that the first has.
    """

    first: str
    second: str
    share: Fraction = Fraction(1, 2)

    @property
    def name(self) -> str:
        """The mix as the name of an algorithm."""
        share = "" if self.share == Fraction(1, 2) else f" {self.share}"
        return f"{self.first}{share}|{self.second}"


def mix_of(collective: str, algorithm: str) -> Mix | None:
    """The mix that a name stands for; None where it is the name of an algorithm.

    Args:
        collective: Name of the collective.
        algorithm: A name. One that the user registered is never a mix.

    Raises:
        ArgumentError: The name is no mix of two, or the mix has no use.

    Example:
        >>> mix_of("allreduce", "ring 3/4|two_shot")
        Mix(first='ring', second='two_shot', share=Fraction(3, 4))
        >>> mix_of("allreduce", "ring") is None
        True
    """
    name = str(algorithm)
    if "|" not in name or any(str(known.algorithm) == name for known in entries(collective)):
        return None
    return _parse(name)


@lru_cache(maxsize=256)
def _parse(name: str) -> Mix:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ArgumentError(
            f"algorithm={name!r} is no mix of two; expected two names such as 'ring|double_binary_tree', or "
            f"with the first one's part of the message 'ring 3/4|two_shot'"
        )
    first, over, under, second = match.groups()
    share = Fraction(int(over), int(under) or 1) if over else Fraction(1, 2)
    if not 0 < share < 1:
        raise ArgumentError(
            f"algorithm={name!r} gives the first {share} of the message; expected a part between 0 and 1"
        )
    if first == second and first not in BOTH_WAYS:
        both = " and ".join(map(str, BOTH_WAYS))
        raise ArgumentError(
            f"algorithm={name!r} is {first} twice, which does the same as once; {both} alone have a "
            f"direction, and gain by going both ways"
        )
    return Mix(first, second, share)
