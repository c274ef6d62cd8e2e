"""Packs rings or trees into links: how much of a message each carries, so that together they carry most.

A linear program with one column for each ring or tree there is, far too many to list. It is solved by
column generation: the simplex method keeps a price for each link, and asks for the ring or tree that is
cheapest at those prices; when none costs less than it brings, the packing is optimal.

Source: Dantzig and Wolfe (1960), column generation; for trees ForestColl (arXiv 2402.06787) packs the same
fractional spanning trees by edge splitting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

_SMALL = 1e-9
Key = TypeVar("Key", bound=Hashable)
#: Prices of the links -> the cheapest column: its name, and the load of one unit of it.
Pricer = Callable[[np.ndarray], "tuple[Key, np.ndarray]"]


@dataclass(frozen=True, slots=True)
class Packing(Generic[Key]):
    """Packed columns.

    Attributes:
        columns: (ring or tree, its weight), heaviest first.
        limit: No packing has a greater sum of weights: the least that the prices prove.
    """

    columns: tuple[tuple[Key, float], ...]
    limit: float

    @property
    def value(self) -> float:
        """The sum of the weights."""
        return sum(weight for _, weight in self.columns)


def pack(
    capacity: np.ndarray, cheapest: Pricer[Key], *, rounds: int = 300, gap: float = 2e-4
) -> Packing[Key]:
    """The greatest sum of weights whose loads fit the capacities.

    Args:
        capacity: Of each link, float64 of shape (links,), above 0.
        cheapest: Gives the column of least cost at the prices it is passed, one price a link, none negative.
        rounds: Most columns to ask for; the work, and so the result, is the same on every machine.
        gap: Relative distance from the proven limit at which to stop.

    Returns:
        A packing that fits; optimal but for ``gap`` unless ``rounds`` ran out.
    """
    scale = float(capacity.max())
    state, limit = _Simplex(capacity / scale), np.inf
    lean = 1e-4 * capacity.min() / capacity
    for _ in range(rounds * 20):
        prices = state.gains @ state.inverse
        slack = int(prices.argmin())
        if prices[slack] < -_SMALL:
            state.enter(None, np.eye(len(prices))[slack], 0.0)
            continue
        prices = np.maximum(prices, 0.0) + lean * max(1e-3, float(prices.max()))
        key, load = cheapest(prices)
        rounds -= 1
        cost = float(prices @ load)
        limit = min(limit, float(prices @ capacity) / scale / max(cost, 1e-12))
        if cost >= 1 - 1e-7 or state.gains @ state.amounts >= limit * (1 - gap) or rounds <= 0:
            break
        state.enter(key, load, 1.0)
    return Packing(state.fitting(capacity, scale), limit * scale)


class _Simplex:
    """The revised simplex method: a basis (at first all slack), its inverse, and its amounts."""

    def __init__(self, capacity: np.ndarray) -> None:
        count = len(capacity)
        self.inverse, self.gains = np.eye(count), np.zeros(count)
        # A small, fixed perturbation keeps equal links from tying, which could cycle.
        self.amounts = capacity * (1 + 1e-7 * (1 + np.arange(count) % 97))
        self.columns: list[tuple[Any, np.ndarray | None]] = [(None, None)] * count

    def enter(self, key: object, load: np.ndarray, gain: float) -> None:
        """Brings a column in for the one that runs out first."""
        column = self.inverse @ load
        ratios = np.full(len(column), np.inf)
        rising = column > _SMALL
        ratios[rising] = self.amounts[rising] / column[rising]
        row = int(ratios.argmin())
        step = float(ratios[row])
        self.amounts = np.maximum(self.amounts - step * column, 0.0)
        self.amounts[row] = step
        self.inverse[row] /= column[row]
        column[row] = 0.0
        self.inverse -= np.outer(column, self.inverse[row])
        self.gains[row] = gain
        self.columns[row] = key, load

    def fitting(self, capacity: np.ndarray, scale: float) -> tuple[tuple[Any, float], ...]:
        """The basis's columns, scaled down by as much as the perturbation let them overshoot."""
        weights: dict[Any, float] = {}
        total = np.zeros(len(capacity))
        for (key, load), amount in zip(self.columns, self.amounts, strict=True):
            if key is not None and amount > 1e-6:
                weights[key] = weights.get(key, 0.0) + float(amount) * scale
                total += load * amount * scale
        over = max(1.0, float((total / capacity).max(initial=0.0)))
        ordered = sorted(weights.items(), key=lambda item: (-round(item[1], 9), repr(item[0])))
        return tuple((key, weight / over) for key, weight in ordered)
