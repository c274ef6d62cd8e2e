"""What a slot carries from one step to the next, such that a step can be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.device import settle_on_device


@dataclass(slots=True)
class Regions:
    """The cut of the index range into one region a rank, kept from call to call.

    Attributes:
        bounds: Where each region begins, and where the last one ends; None before the first call.
        age: Calls so far.
    """

    bounds: np.ndarray | None = None
    age: int = 0


class Carried:
    """An array, and what it was before the last step: each step reads one of two and writes the other.

    So taking a step back costs no copy, and a good step none either.

    Attributes:
        now: The array after the last step; a step that is under way writes it.
        before: The array before that step.
    """

    __slots__ = ("before", "now")

    def __init__(self, now: Any, before: Any) -> None:
        self.now, self.before = now, before

    def turn(self) -> None:
        """Exchanges the two, at the begin of a step, or to take it back."""
        self.now, self.before = self.before, self.now

    def part(self, places: slice) -> Carried:
        """Some elements of both."""
        return Carried(self.now[places], self.before[places])

    def settle(self, spoilt: Any, same: bool) -> None:
        """Takes the step back on the GPU if a flag there says so; nothing waits.

        Args:
            spoilt: One int32 on the GPU, not 0 for a step to be taken back.
            same: Whether both arrays shall have the same content afterwards, as a graph that is replayed
                needs it, whose steps always read the same of the two.
        """
        assert on_device(self.now)
        settle_on_device(self.now, self.before, spoilt, same)
