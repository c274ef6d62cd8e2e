"""Selects the elements of an array to send: a threshold from a sample, and the elements that reach it.

Magnitudes are compared as patterns of bits. For numbers that is the same order, and NaN, which no comparison
orders, is the largest: it is sent, so that a training loop that looks for it finds it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.codec import Scratch, namespace

_TILE = 1 << 17
_MANTISSA = MappingProxyType({4: (np.uint32, 0x7FFFFFFF), 8: (np.uint64, 0x7FFFFFFFFFFFFFFF)})
_FOUND_IN_SAMPLE = 128  # so that thresholds are a tenth off, and seldom more than twice that
_LEAST_SAMPLE, _MOST_SAMPLE = 4096, 1 << 20
_CROWD, _CHANCE = 4, 0.005  # times the density at which a threshold is worthless, and what chance may add


def magnitudes(x: Any) -> Any:
    """The bits of each number without its sign, as unsigned numbers."""
    kind, mask = _MANTISSA[x.dtype.itemsize]
    return x.view(kind) & kind(mask)


def sample(x: Any, size: int, seed: int, add: Any = None) -> Any:
    """Numbers from all over an array, or a sum: one from each of ``size`` equal parts, drawn at random."""
    if x.size <= size:
        return x if add is None else x + add
    step = x.size / size
    drawn = (np.arange(size) + np.random.default_rng(seed).random(size)) * step
    places = namespace(x).asarray(np.minimum(drawn.astype(np.int64), x.size - 1))
    return x[places] if add is None else x[places] + add[places]


def estimate_threshold(x: Any, density: float, seed: int, add: Any = None) -> int:
    """The bits of the magnitude that about ``density`` of the numbers of ``x + add`` reach, by a sample.

    Returns:
        At least 1, so that zeros never reach it.
    """
    size = min(max(int(_FOUND_IN_SAMPLE / density), _LEAST_SAMPLE), _MOST_SAMPLE)
    found = magnitudes(sample(x, size, seed, add))
    if on_device(found):
        found = found.get()
    if not found.size:
        return 1
    place = max(found.size - max(round(found.size * density), 1), 0)
    return max(int(np.partition(found, place)[place]), 1)


def is_crowded(x: Any, threshold: int, density: float, seed: int, add: Any = None) -> bool:
    """Whether far more than ``density`` of the numbers of ``x + add`` reach a threshold, by a small sample.

    Then it is not worth while to find all of them.
    """
    found = magnitudes(sample(x, _LEAST_SAMPLE, seed, add))
    return int((found >= threshold).sum()) > (_CROWD * density + _CHANCE) * found.size


def density_of(x: Any, seed: int) -> float:
    """The share of an array's numbers that is not zero, estimated by a sample."""
    if not x.size:
        return 0.0
    found = magnitudes(sample(x, _LEAST_SAMPLE, seed))
    return int((found != 0).sum()) / found.size


def select(x: Any, threshold: int, scratch: Scratch, add: Any = None, out: Any = None) -> Any:
    """The places of all numbers whose magnitude reaches a threshold, in order.

    Args:
        x: Array of one dimension, float32 or float64.
        threshold: Bits of a magnitude, at least 1.
        scratch: For intermediate results.
        add: Array that is added to ``x`` first, in the same pass.
        out: Array for that sum.

    Returns:
        Indices: int32 where they fit, else int64.
    """
    kind: Any
    kind, mask = _MANTISSA[x.dtype.itemsize]
    index = np.int32 if x.size < 1 << 31 else np.int64
    if on_device(x):
        if add is not None:
            x = namespace(x).add(x, add, out=out)
        return namespace(x).flatnonzero(magnitudes(x) >= kind(threshold)).astype(index)
    found = []
    bits = scratch.get(f"bits {x.dtype.itemsize}", _TILE, kind, x)
    flags = scratch.get("flags", _TILE, np.bool_, x)
    for start in range(0, x.size, _TILE):
        tile = x[start : start + _TILE]
        if add is not None:
            tile = np.add(tile, add[start : start + _TILE], out=out[start : start + _TILE])
        np.bitwise_and(tile.view(kind), kind(mask), out=bits[: tile.size])
        np.greater_equal(bits[: tile.size], kind(threshold), out=flags[: tile.size])
        places = np.flatnonzero(flags[: tile.size])
        if places.size:
            found.append((places + start).astype(index))
    return np.concatenate(found) if found else np.empty(0, index)


def largest(values: Any, keep: int) -> Any:
    """The places of the ``keep`` numbers of largest magnitude, in order; of equal ones the first."""
    xp = namespace(values)
    if keep >= values.size:
        return xp.arange(values.size)
    if keep <= 0:
        return xp.arange(0)
    found = magnitudes(values)
    least = xp.partition(found, values.size - keep)[values.size - keep]
    above = found > least
    ties = xp.flatnonzero(found == least)[: keep - int(above.sum())]
    above[ties] = True
    return xp.flatnonzero(above)
