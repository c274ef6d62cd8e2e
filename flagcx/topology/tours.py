"""Cheap tours over a small table of costs: exact by dynamic programming, or by local search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

#: Up to so many stops the cheapest tour is found exactly.
EXACT_UP_TO = 11


def cheapest_tour(cost: np.ndarray) -> list[int]:
    """A tour over all stops of least total cost, from stop 0.

    Args:
        cost: float64 of shape (n, n), cost[i, j] of going from i to j; not negative.

    Returns:
        The stops in order: the cheapest tour up to ``EXACT_UP_TO`` stops, a good one above.
    """
    count = len(cost)
    if count <= 2:
        return list(range(count))
    if count <= EXACT_UP_TO:
        return _held_karp(cost)
    starts = [nearest_neighbour(cost, first) for first in range(count)]
    rows = cost.tolist()

    def worth(order: list[int]) -> float:
        return round(sum(rows[a][b] for a, b in itertools.pairwise(order)) + rows[order[-1]][order[0]], 12)

    return improve(min(starts, key=worth), worth, trials=2000)


def tour_cost(cost: np.ndarray, order: Sequence[int]) -> float:
    """The cost of a closed tour."""
    stops = np.asarray(order)
    return float(cost[stops, np.roll(stops, -1)].sum())


def nearest_neighbour(cost: np.ndarray, first: int) -> list[int]:
    """A tour that always goes on to the cheapest stop left; the lower number of equals."""
    order, left = [first], [stop for stop in range(len(cost)) if stop != first]
    while left:
        following = min(left, key=lambda stop: (cost[order[-1], stop], stop))
        order.append(following)
        left.remove(following)
    start = order.index(0)
    return order[start:] + order[:start]


def improve(order: list[int], worth: Callable[[list[int]], Any], *, trials: int = 20_000) -> list[int]:
    """Local search: reverses and moves pieces of the tour while that lowers ``worth``.

    Args:
        order: A tour; its first stop stays first.
        worth: The value to lower: a number or a tuple.
        trials: Most tours to look at, so that the work is bounded and the same everywhere.
    """
    best, value = list(order), worth(order)
    while trials > 0:
        for candidate in _neighbours(best):
            trials -= 1
            found = worth(candidate)
            if found < value:
                best, value = candidate, found
                break
            if trials <= 0:
                break
        else:
            break
    return best


def _neighbours(order: list[int]):
    count = len(order)
    for i in range(1, count - 1):
        for j in range(i + 1, count):
            yield order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
    for length in (1, 2, 3):
        for i in range(1, count - length + 1):
            piece, rest = order[i : i + length], order[:i] + order[i + length :]
            for j in range(1, len(rest) + 1):
                if j != i:
                    yield rest[:j] + piece + rest[j:]


@lru_cache(maxsize=16)
def _layers(count: int) -> list[np.ndarray]:
    """Sets of the stops 1 to count-1 as bit masks, by size."""
    masks = np.arange(1 << (count - 1))
    sizes = np.array([bin(mask).count("1") for mask in range(1 << (count - 1))])
    return [masks[sizes == size] for size in range(count)]


def _held_karp(cost: np.ndarray) -> list[int]:
    """Least cost of visiting each set of stops and ending at each, by size of the set."""
    count = len(cost)
    inner, layers = cost[1:, 1:], _layers(count)
    best = np.full((1 << (count - 1), count - 1), np.inf)
    came = np.zeros(best.shape, dtype=np.int8)
    best[1 << np.arange(count - 1), np.arange(count - 1)] = cost[0, 1:]
    for masks in layers[2:]:
        for last in range(count - 1):
            with_last = masks[masks >> last & 1 == 1]
            totals = best[with_last ^ (1 << last)] + inner[:, last]
            choice = totals.argmin(axis=1)
            best[with_last, last] = totals[np.arange(len(with_last)), choice]
            came[with_last, last] = choice
    mask = (1 << (count - 1)) - 1
    last = int((best[mask] + cost[1:, 0]).argmin())
    order = []
    while mask:
        order.append(last + 1)
        mask, last = mask ^ (1 << last), int(came[mask, last])
    return [0, *reversed(order)]
