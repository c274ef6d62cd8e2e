"""Finds gradients that share memory: each of them would be reduced again by the other's call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from flagcx.arguments import on_device
from flagcx.errors import ArgumentError

_MOST_WORK = 10_000


def check_apart(names: Sequence[Hashable], arrays: Sequence[Any]) -> None:
    """Raises ArgumentError where two arrays have elements in common.

    Args:
        names: Their names.
        arrays: NumPy or CuPy arrays.

    Example:
        >>> x = np.zeros(10)
        >>> check_apart("ab", [x[::2], x[1::2]])
    """
    extents = sorted((_extent(array), number) for number, array in enumerate(arrays) if array.size)
    before: list[tuple[tuple[int, int, int], int]] = []
    for extent, number in extents:
        place, start, _ = extent
        before = [one for one in before if one[0][0] == place and one[0][2] > start]
        for _, other in before:
            if _share(arrays[other], arrays[number]):
                first, second = sorted((other, number))
                raise ArgumentError(
                    f"the gradients {names[first]!r} and {names[second]!r} share memory, and would be "
                    f"reduced twice; give each array one name"
                )
        before.append((extent, number))


def _place(array: Any) -> int:
    """The memory that an array is in: -1 on the host, else the GPU's number."""
    return int(array.device.id) if on_device(array) else -1


def _extent(array: Any) -> tuple[int, int, int]:
    """The memory, the first byte and the byte after the last one of an array."""
    low = array.data.ptr if on_device(array) else array.__array_interface__["data"][0]
    high = low + array.itemsize
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return _place(array), low, high


def _share(x: Any, y: Any) -> bool:
    """Whether two arrays whose extents overlap have elements in common."""
    if on_device(x):  # arrays with gaps may lie in each other's
        whole = all(_extent(a)[2] - _extent(a)[1] == a.nbytes for a in (x, y))
        return whole or (x.data.ptr, x.shape, x.strides) == (y.data.ptr, y.shape, y.strides)
    try:
        return np.shares_memory(x, y, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
