"""Ring orders: the best single ring, and several rings that share the links.

A ring of n ranks sends 2 (n - 1) / n of the message over each hop, so a ring whose hops run at r GB/s has
an algorithm bandwidth of r n / (2 (n - 1)). A link that k hops share gives each of them a k-th of its
bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flagcx.topology import packing, tours
from flagcx.topology.graph import Topology
from flagcx.topology.routes import Bottleneck
from flagcx.topology.traffic import Traffic

#: Up to so many GPUs the best single ring is searched exactly.
EXACT_UP_TO = 10
_MOST_RINGS = 16
_SEARCH_NODES = 60_000
_SAME = 1e-9
_FORBIDDEN = 1e6


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring all-reduce order and what it carries.

    Attributes:
        order: GPU indices; each sends to the next, the last to the first.
        bandwidth_gb_per_s: Algorithm bandwidth of its part, with all rings of the plan running.
        share: The part of the message it carries, 0 to 1.
        bottleneck: The link that limits it; None for a ring of one.
    """

    order: tuple[int, ...]
    bandwidth_gb_per_s: float
    share: float
    bottleneck: Bottleneck | None


def hop_factor(count: int) -> float:
    """What a ring's algorithm bandwidth is for each GB/s of its hops: n / (2 (n - 1))."""
    return count / (2 * (count - 1))


def rate(traffic: Traffic, order: Sequence[int]) -> float:
    """GB/s that each hop of one ring gets.

    Args:
        traffic: The loads.
        order: Positions in ``traffic.gpus``.
    """
    load = traffic.hops(order)
    used = load > 0
    return float((traffic.capacity[used] / load[used]).min())


def best_ring(traffic: Traffic) -> tuple[list[int], bool]:
    """The ring of the highest rate; among equals the one that crosses sockets and PCIe least.

    Args:
        traffic: The loads.

    Returns:
        Positions in ``traffic.gpus``, from 0; and whether no better one exists (exact search ended).
    """
    count = len(traffic.gpus)
    if count <= 2:
        return list(range(count)), True

    def worth(order: list[int]) -> tuple[float, float]:
        return -round(rate(traffic, order), 6), round(tours.tour_cost(traffic.hop_cost, order), 6)

    starts = [list(range(count)), tours.cheapest_tour(traffic.hop_cost)]
    widths = _inverse_widths(traffic)
    starts.append(tours.cheapest_tour(widths))
    best = min((tours.improve(start, worth, trials=3000) for start in starts), key=worth)
    if count > EXACT_UP_TO:
        return _forward(best), False
    search = _Search(traffic, best, *worth(best))
    search.run([0], np.zeros(len(traffic.capacity)), 0.0)
    return _forward(search.best), search.left > 0


def _forward(order: list[int]) -> list[int]:
    """Of a ring and its reverse, equal by symmetry, the one that starts upwards."""
    return order if len(order) < 3 or order[1] < order[-1] else [order[0], *reversed(order[1:])]


def _inverse_widths(traffic: Traffic) -> np.ndarray:
    with np.errstate(divide="ignore"):
        width = np.where(traffic.load > 0, traffic.capacity / np.maximum(traffic.load, 1e-12), np.inf).min(
            axis=2
        )
    return np.where(np.isfinite(width), 1.0 / np.maximum(width, 1e-12), 0.0)


@dataclass(slots=True)
class _Search:
    """Depth-first search with bounds: rate never rises as a ring grows, nor does its cost fall."""

    traffic: Traffic
    best: list[int]
    negative_rate: float
    cost: float
    left: int = _SEARCH_NODES
    least_step: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        costs = self.traffic.hop_cost + np.where(np.eye(len(self.traffic.gpus), dtype=bool), np.inf, 0.0)
        self.least_step = costs.min(axis=1)

    def run(self, order: list[int], load: np.ndarray, cost: float) -> None:
        traffic, here = self.traffic, order[-1]
        remaining = [stop for stop in range(len(traffic.gpus)) if stop not in order]
        if not remaining:
            self.finish(order, load + traffic.load[here, 0], cost + traffic.hop_cost[here, 0])
            return
        to_go = float(self.least_step[remaining].sum())
        for stop in sorted(remaining, key=lambda stop: (traffic.hop_cost[here, stop], stop)):
            self.left -= 1
            if self.left <= 0:
                return
            grown = load + traffic.load[here, stop]
            price = cost + float(traffic.hop_cost[here, stop])
            if self.can_win(grown, price + to_go):
                self.run([*order, stop], grown, price)

    def can_win(self, load: np.ndarray, cost: float) -> bool:
        used = load > 0
        negative = -round(float((self.traffic.capacity[used] / load[used]).min()), 6)
        return (negative, round(cost, 6)) < (self.negative_rate, self.cost)

    def finish(self, order: list[int], load: np.ndarray, cost: float) -> None:
        if self.can_win(load, cost):
            used = load > 0
            self.negative_rate = -round(float((self.traffic.capacity[used] / load[used]).min()), 6)
            self.cost, self.best = round(cost, 6), order


# -- several rings


def pack_rings(traffic: Traffic, first: Sequence[int]) -> tuple[list[tuple[tuple[int, ...], float]], float]:
    """Rings with rates that share the links, for the most bandwidth together.

    Args:
        traffic: The loads.
        first: The best single ring. Where it runs over NVLink alone, so do all.

    Returns:
        (positions, GB/s of each hop) for each ring, and the most that any set of rings could have.
    """
    only_fabric = _all_fabric(traffic, first)
    penalty = np.where(traffic.fabric, 0.0, _FORBIDDEN) if only_fabric else np.zeros_like(traffic.hop_cost)

    def cheapest(prices: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        cost = traffic.load @ np.maximum(prices, 0.0) + penalty + 1e-9 * traffic.hop_cost
        order = tuple(tours.cheapest_tour(cost))
        return order, traffic.hops(order)

    rounds = 300 if len(traffic.gpus) <= tours.EXACT_UP_TO else 60
    found = packing.pack(traffic.capacity, cheapest, rounds=rounds)
    found = packing.dive(found, traffic.capacity, cheapest, rounds=rounds, keep=0.98, most=_MOST_RINGS)
    return list(found.columns), found.limit


def _all_fabric(traffic: Traffic, order: Sequence[int]) -> bool:
    stops = np.asarray(order)
    return bool(traffic.fabric[stops, np.roll(stops, -1)].all())


def finished(
    topology: Topology, traffic: Traffic, rings: Sequence[tuple[Sequence[int], float]]
) -> tuple[Ring, ...]:
    """Rings by position and hop rate as ``Ring``s, with the bottleneck each meets in shared links."""
    count = len(traffic.gpus)
    total = sum(speed for _, speed in rings)
    loads = sum((traffic.hops(order) * speed for order, speed in rings), np.zeros(len(traffic.capacity)))
    result = []
    for order, speed in rings:
        used = traffic.hops(order) > 0
        edge = int(np.where(used, traffic.capacity / np.maximum(loads, 1e-12), np.inf).argmin())
        a, b = traffic.edges[edge]
        link = topology.links_of(a)[b]
        narrow = Bottleneck(a, b, link.kind, link.bandwidth_gb_per_s, float(loads[edge] / max(speed, 1e-12)))
        named = tuple(traffic.gpus[stop] for stop in order)
        result.append(Ring(named, speed * hop_factor(count), speed / total, narrow))
    return tuple(result)
