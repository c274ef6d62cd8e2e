"""The order in which ranks stand in a ring: the best over one host, and hosts after one another.

A ring of n ranks sends 2 (n - 1) / n of the message over each hop, so a ring whose hops run at r GB/s has
an algorithm bandwidth of r n / (2 (n - 1)). A link that k hops share gives each of them a k-th of its
bandwidth.

Deterministic: the same topology and GPUs give the same order on every rank, with no clock involved; searches
are bounded by counts of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from flagcx.errors import TopologyError
from flagcx.topology import tours
from flagcx.topology.graph import Graph
from flagcx.topology.loads import LoadedLink, PairLoads, add_loads, bottleneck, pair_loads, ring_hops
from flagcx.topology.routes import Edge, Routes

#: Up to so many GPUs of a host the best ring is searched exactly.
EXACT_UP_TO = 10
_SEARCH_NODES = 60_000


def best_order(topology: Graph, gpus: Sequence[int] | None = None) -> tuple[int, ...]:
    """The GPUs in the best ring order, from the first that was given; see ``make_plan``.

    Args:
        topology: The machine or cluster.
        gpus: Indices of the GPUs that take part, each once; all by default.

    Raises:
        TopologyError: There is no GPU, one is unknown or named twice, or two cannot reach each other.

    Example:
        >>> from flagcx.topology import preset
        >>> best_order(preset("dgx-1v"))
        (0, 3, 2, 1, 5, 6, 7, 4)
    """
    chains, _ = host_chains(topology, chosen(topology, gpus), Routes(topology))
    return tuple(gpu for chain in chains for gpu in chain)


def order_bandwidth(topology: Graph, order: Sequence[int], *, routes: Routes | None = None) -> float:
    """Algorithm bandwidth in GB/s of one ring in a given order, for a large all-reduce.

    Args:
        topology: The machine or cluster.
        order: GPU indices; each sends to the next, the last to the first.
        routes: Routes found already.

    Raises:
        TopologyError: A GPU is unknown or named twice, or two cannot reach each other.
    """
    gpus = chosen(topology, order)
    if len(gpus) == 1:
        return math.inf
    (limit,) = ring_limits(topology, [gpus], routes or Routes(topology))
    return limit.rate_gb_per_s * hop_factor(len(gpus))


def ring_limits(topology: Graph, rings: Sequence[Sequence[int]], routes: Routes) -> list[LoadedLink]:
    """For each of several rings that run together, the link that it waits for; loads are of all rings."""
    own: list[dict[Edge, float]] = [{} for _ in rings]
    total: dict[Edge, float] = {}
    for order, loads in zip(rings, own, strict=True):
        add_loads(loads, routes, ring_hops(order))
        for edge, load in loads.items():
            total[edge] = total.get(edge, 0.0) + load
    return [bottleneck(topology, {edge: total[edge] for edge in loads}) for loads in own]


def hop_factor(count: int) -> float:
    """Algorithm bandwidth of a ring for each GB/s of its hops: n / (2 (n - 1))."""
    return count / (2 * (count - 1))


def chosen(topology: Graph, gpus: Sequence[int] | None) -> tuple[int, ...]:
    """The GPUs that take part, checked; all where none are named."""
    found = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
    if not found:
        raise TopologyError(
            f"{topology!r} has no GPU to plan over" if gpus is None else "gpus is empty; name at least one"
        )
    if len(set(found)) != len(found):
        raise TopologyError(f"a GPU is named twice in {found[:16]}; each takes part once")
    for gpu in found:
        topology.gpu(gpu)
    return found


def host_chains(topology: Graph, gpus: Sequence[int], routes: Routes) -> tuple[list[tuple[int, ...]], bool]:
    """Each host's (or NVLink domain's) GPUs in the order of its best ring, one search for each shape.

    Returns:
        The chains, those of hosts below the same switches next to each other; and whether no host has a
        better ring (the searches were exact and ended).

    Raises:
        TopologyError: Two hosts, or two GPUs of a host, are not joined.
    """
    hosts: dict[int, list[int]] = {}
    for gpu in gpus:
        hosts.setdefault(routes.domain(gpu), []).append(gpu)
    if len(hosts) > 1:
        first: dict[tuple[str, ...], int] = {}
        for host in sorted(hosts):
            first.setdefault(routes.leaves(host), host)
        hosts = {host: hosts[host] for host in sorted(hosts, key=lambda h: (first[routes.leaves(h)], h))}
    found: dict[tuple, tuple[list[int], bool]] = {}
    chains, exact = [], True
    for members in hosts.values():
        key = routes.shape_key(members)
        if key not in found:
            found[key] = ([0], True)
            if len(members) > 1:
                found[key] = search_ring(pair_loads(topology, members, routes))
        order, ended = found[key]
        chains.append(tuple(members[stop] for stop in order))
        exact = exact and ended
    for one, other in pairwise(chains):
        routes.route(one[0], other[0])  # raises where the two hosts are not joined
    return chains, exact


def ring_rate(loads: PairLoads, order: Sequence[int]) -> float:
    """GB/s that each hop of one ring over positions ``order`` gets."""
    return _rate(loads, loads.ring(order))


def _rate(loads: PairLoads, load: np.ndarray) -> float:
    used = load > 0
    return float((loads.capacity[used] / load[used]).min())


def search_ring(loads: PairLoads) -> tuple[list[int], bool]:
    """The ring of the highest rate; among equals the one that crosses sockets and PCIe least.

    Returns:
        Positions in ``loads.gpus``, from 0; and whether no better one exists (the exact search ended).
    """
    count = len(loads.gpus)
    if count <= 2:
        return list(range(count)), True

    def worth(order: list[int]) -> tuple[float, float]:
        return -round(ring_rate(loads, order), 6), round(tours.tour_cost(loads.hop_cost, order), 6)

    if worth(list(range(count))) <= _best_worth(loads):
        return list(range(count)), True
    starts = [
        list(range(count)), tours.cheapest_tour(loads.hop_cost), tours.cheapest_tour(_inverse_widths(loads))
    ]  # fmt: skip
    best = min((tours.improve(start, worth, trials=3000) for start in starts), key=worth)
    if count > EXACT_UP_TO:
        return _forward(best), False
    found, ended = _search(loads, best, worth(best))
    return _forward(found), ended


def _best_worth(loads: PairLoads) -> tuple[float, float]:
    """A negative rate and a cost that no ring is below: each GPU has its best hop, all links to itself."""
    other = ~np.eye(len(loads.gpus), dtype=bool)
    with np.errstate(divide="ignore"):
        alone = np.where(loads.load > 0, loads.capacity / loads.load, np.inf).min(axis=2)
    alone = np.where(other, alone, 0.0)
    rate = min(alone.max(axis=1).min(), alone.max(axis=0).min())
    cost = np.where(other, loads.hop_cost, np.inf).min(axis=1).sum()
    return -round(float(rate), 6), round(float(cost), 6)


def _search(loads: PairLoads, best: list[int], worth: tuple[float, float]) -> tuple[list[int], bool]:
    """Depth-first search with bounds: rate never rises as a ring grows, nor does its cost fall.

    Args:
        loads: The loads.
        best: The best ring so far.
        worth: Its negative rate and its cost; both are to be low.

    Returns:
        The best ring, and whether all were looked at within ``_SEARCH_NODES`` steps.
    """
    count, left = len(loads.gpus), _SEARCH_NODES
    least_step = (loads.hop_cost + np.where(np.eye(count, dtype=bool), np.inf, 0.0)).min(axis=1)

    def run(order: list[int], load: np.ndarray, cost: float) -> None:
        nonlocal best, worth, left
        here = order[-1]
        remaining = [stop for stop in range(count) if stop not in order]
        following = sorted(remaining, key=lambda stop: (loads.hop_cost[here, stop], stop))
        for stop in following or [0]:  # the last hop goes back to the start
            left -= bool(remaining)
            if left <= 0:
                return
            grown = load + loads.load[here, stop]
            price = cost + float(loads.hop_cost[here, stop])
            to_go = float(least_step[remaining].sum())
            reached = -round(_rate(loads, grown), 6), round(price + to_go, 6)
            if reached < worth and remaining:
                run([*order, stop], grown, price)
            elif reached < worth:
                worth, best = reached, order

    run([0], np.zeros(len(loads.capacity)), 0.0)
    return best, left > 0


def _forward(order: list[int]) -> list[int]:
    """Of a ring and its reverse, equal by symmetry, the one that starts upwards."""
    return order if len(order) < 3 or order[1] < order[-1] else [order[0], *reversed(order[1:])]


def _inverse_widths(loads: PairLoads) -> np.ndarray:
    with np.errstate(divide="ignore"):
        width = np.where(loads.load > 0, loads.capacity / np.maximum(loads.load, 1e-12), np.inf).min(axis=2)
    return np.where(np.isfinite(width), 1.0 / np.maximum(width, 1e-12), 0.0)
