"""Packs rings or trees into links: how much of the message each carries, so that together they carry most.

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
#: How many columns a dive looks at before it takes the best of them.
_TRIES = 4
Key = TypeVar("Key", bound=Hashable)
#: Prices of the links -> the cheapest column: what it is, and what one unit of it loads.
Pricer = Callable[[np.ndarray], "tuple[Key, np.ndarray]"]


@dataclass(frozen=True, slots=True)
class Packing(Generic[Key]):
    """What was packed.

    Attributes:
        columns: (ring or tree, its weight), heaviest first.
        value: The sum of the weights.
        limit: No packing has more: the best that the prices prove.
        seen: Every column that was asked for on the way, with what one unit of it loads.
    """

    columns: tuple[tuple[Key, float], ...]
    value: float
    limit: float
    seen: dict[Key, np.ndarray]


def pack(
    capacity: np.ndarray,
    cheapest: Pricer[Key],
    *,
    rounds: int = 300,
    gap: float = 1e-3,
    seen: dict[Key, np.ndarray] | None = None,
    enough: float | None = None,
) -> Packing[Key]:
    """The greatest sum of weights whose loads fit the capacities.

    Args:
        capacity: Of each link, float64 of shape (links,), above 0.
        cheapest: Gives the column of least cost at the prices it is passed, one price a link, none negative.
        rounds: Most columns to ask for; the work, and so the result, is the same on every machine.
        gap: Relative distance from the proven limit at which to stop.
        seen: Columns known already; they are tried first, and new ones are added.
        enough: Stop at this value, or as soon as it is proven out of reach.

    Returns:
        A packing that fits; optimal but for ``gap`` unless it stopped early.
    """
    scale = float(capacity.max())
    state, limit = _Simplex.start(capacity / scale), np.inf
    seen = {} if seen is None else seen
    pool = _Pool(seen)
    target = np.inf if enough is None else enough / scale
    lean = 1e-4 * capacity.min() / capacity
    for _ in range(rounds * 20):
        prices = state.prices()
        slack = int(prices.argmin())
        if prices[slack] < -_SMALL:
            state.enter(None, np.eye(len(prices))[slack], 0.0)
            continue
        if state.value() >= target:
            break
        prices = np.maximum(prices, 0.0) + lean * max(1e-3, float(prices.max()))
        known = pool.below(prices, 1 - 1e-6)
        if known is not None:
            state.enter(known, seen[known], 1.0)
            continue
        key, load = cheapest(prices)
        pool.add(key, load)
        rounds -= 1
        limit = min(limit, float(prices @ capacity) / scale / max(float(prices @ load), 1e-12))
        done = float(prices @ load) >= 1 - 1e-7 or state.value() >= limit * (1 - gap)
        if done or rounds <= 0 or (enough is not None and limit < target):
            break
        state.enter(key, load, 1.0)
    columns = _fitting(state, capacity, scale)
    return Packing(columns, sum(weight for _, weight in columns), limit * scale, seen)


def dive(
    packing: Packing[Key],
    capacity: np.ndarray,
    cheapest: Pricer[Key],
    *,
    rounds: int,
    keep: float,
    most: int,
) -> Packing[Key]:
    """Fewer columns with nearly the same value: each ring or tree costs launches and a piece of the message.

    Fills one column as far as its links allow, packs what is left, and goes on so; a column is only filled
    where the rest still packs to the value that is to be kept.

    Args:
        packing: What was packed.
        capacity: Of each link.
        cheapest: As ``pack`` takes it.
        rounds: Most new columns to ask for in all.
        keep: The part of the value that must be kept, 0 to 1.
        most: How many columns there may be.

    Returns:
        The packing of fewer columns, or the given one where that has no more of them.
    """
    wanted, room = keep * packing.value, capacity.astype(float).copy()
    floor = 1e-5 * float(capacity.min())
    taken: dict[Key, float] = {}
    rest, work = packing, [rounds]
    while len(taken) < most and wanted > 1e-3 * packing.value:
        found = _fill(rest, cheapest, room, wanted, floor, work)
        if found is None:
            break
        key, weight, rest = found
        taken[key] = taken.get(key, 0.0) + weight
        wanted -= weight
        room = np.maximum(room - weight * packing.seen[key], floor)
    for key, weight in rest.columns:
        if (key in taken or len(taken) < most) and wanted > 1e-3 * packing.value:
            taken[key] = taken.get(key, 0.0) + weight
            wanted -= weight
    total = sum((packing.seen[key] * weight for key, weight in taken.items()), np.zeros(len(capacity)))
    over = max(1.0, float((total / capacity).max(initial=0.0)))
    columns: tuple[tuple[Key, float], ...] = tuple((key, weight / over) for key, weight in taken.items())
    value = sum(weight for _, weight in columns)
    if len(packing.columns) <= len(columns) and packing.value >= value:
        return packing
    return Packing(columns, value, packing.limit, packing.seen)


def _fill(
    rest: Packing[Key], cheapest: Pricer[Key], room: np.ndarray, wanted: float, floor: float, work: list[int]
) -> tuple[Key, float, Packing[Key]] | None:
    """The first of the heaviest columns that can be filled with the rest still reaching ``wanted``."""
    for key, _ in rest.columns[:_TRIES]:
        load = rest.seen[key]
        used = load > 0
        weight = float((room[used] / load[used]).min())
        if weight <= 100 * floor or work[0] <= 0:
            continue
        before = len(rest.seen)
        after = pack(
            np.maximum(room - weight * load, floor),
            cheapest,
            rounds=min(60, work[0]),
            seen=rest.seen,
            enough=max(wanted - weight, floor),
        )
        work[0] -= len(rest.seen) - before
        if weight + after.value >= wanted * (1 - 1e-3):
            return key, weight, after
    return None


class _Pool(Generic[Key]):
    """Columns seen so far, as one array, to look through before a new one is asked for."""

    def __init__(self, seen: dict[Key, np.ndarray]) -> None:
        self.seen = seen
        self.keys = list(seen)
        self.table = np.array([seen[key] for key in self.keys]) if seen else None

    def below(self, prices: np.ndarray, cost: float) -> Key | None:
        """The cheapest known column, where it costs less than ``cost``."""
        if self.table is None:
            return None
        costs = self.table @ prices
        place = int(costs.argmin())
        return self.keys[place] if costs[place] < cost else None

    def add(self, key: Key, load: np.ndarray) -> None:
        if key not in self.seen:
            self.seen[key] = load
            self.keys.append(key)
            self.table = load[None] if self.table is None else np.vstack([self.table, load])


def _fitting(state: _Simplex, capacity: np.ndarray, scale: float) -> tuple[tuple[Any, float], ...]:
    """The basis's columns, scaled down by what the perturbation let them overshoot."""
    weights: dict[Any, float] = {}
    total = np.zeros(len(capacity))
    for key, load, amount in zip(state.keys, state.loads, state.amounts, strict=True):
        if key is not None and amount > 1e-6:
            weights[key] = weights.get(key, 0.0) + float(amount) * scale
            total += load * amount * scale
    over = max(1.0, float((total / capacity).max(initial=0.0)))
    ordered = sorted(weights.items(), key=lambda item: (-round(item[1], 9), repr(item[0])))
    return tuple((key, weight / over) for key, weight in ordered)


@dataclass(slots=True)
class _Simplex:
    """The revised simplex method: a basis, its inverse, and the amounts of its columns."""

    inverse: np.ndarray
    amounts: np.ndarray
    gains: np.ndarray
    keys: list
    loads: list

    @classmethod
    def start(cls, capacity: np.ndarray) -> _Simplex:
        """All slack. A small, fixed perturbation keeps equal links from tying, which could cycle."""
        count = len(capacity)
        amounts = capacity * (1 + 1e-7 * (1 + np.arange(count) % 97))
        return cls(np.eye(count), amounts, np.zeros(count), [None] * count, [None] * count)

    def prices(self) -> np.ndarray:
        return self.gains @ self.inverse

    def value(self) -> float:
        return float(self.gains @ self.amounts)

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
        self.keys[row], self.loads[row] = key, load
