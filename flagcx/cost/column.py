"""A list of numbers that grows, and is read as an array in between."""

from __future__ import annotations

import numpy as np


class Column:
    """A list of numbers that grows, also as an array.

    Args:
        values: The list.
    """

    def __init__(self, values: list[float]) -> None:
        self._values, self._array = values, np.zeros(0)

    def array(self) -> np.ndarray:
        """The numbers, float64; not to be written to. It is made again only where the list has grown."""
        if len(self._array) != len(self._values):
            self._array = np.array(self._values, np.float64)
        return self._array
