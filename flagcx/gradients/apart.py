"""Finds gradients that share memory: each of them would be reduced again by the other's call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from flagcx.arguments import extent_of, near_pairs, on_device, place_of, share_elements
from flagcx.errors import ArgumentError


def check_apart(names: Sequence[Hashable], arrays: Sequence[Any]) -> None:
    """Raises ArgumentError where two arrays have elements in common.

    Args:
        names: Their names.
        arrays: NumPy or CuPy arrays.

    Example:
        >>> import numpy as np
        >>> x = np.zeros(10)
        >>> check_apart("ab", [x[::2], x[1::2]])
    """
    for pair in near_pairs(arrays):
        if _share(*(arrays[number] for number in pair)):
            first, second = sorted(pair)
            raise ArgumentError(
                f"the gradients {names[first]!r} and {names[second]!r} share memory, and would be "
                f"reduced twice; give each array one name"
            )


def _share(x: Any, y: Any) -> bool:
    """Whether two arrays whose extents overlap have elements in common."""
    if on_device(x) != on_device(y) or (on_device(x) and x.device.id != y.device.id):
        return False
    if on_device(x):  # arrays with gaps may lie in each other's
        whole = all(end - start == a.nbytes for a in (x, y) for start, end in [extent_of(a)])
        return whole or place_of(x) == place_of(y)
    return share_elements(x, y, if_hard=False)
