"""Memory for what a call needs beside the caller's arrays: one piece for all plans of a communicator.

Plans of one communicator run one after the other, so memory of their own would lie idle nearly always, and a
job that calls with ever new counts would have more of it with each.
"""

from __future__ import annotations

import numpy as np

_SPARE = 8


class Scratch:
    """Memory of the host that the plans of one communicator share. It grows and never shrinks.

    Attributes:
        memory: The memory, an array of uint8. A plan looks at it anew in each run, since it may have moved.
    """

    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def reserve(self, nbytes: int) -> None:
        """Sees to it that there are at least ``nbytes`` bytes; called while no plan runs."""
        if self.memory.size < nbytes:
            self.memory = self.memory[:0]  # the old memory goes before there is new
            self.memory = np.empty(nbytes + nbytes // _SPARE, np.uint8)
