"""The loads that messages between GPUs put on links: of a plan, and of every pair of GPUs as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flagcx.topology import paths
from flagcx.topology.graph import Graph, LinkKind
from flagcx.topology.routes import Edge, Route, Routes

#: Cost of a hop where bandwidth does not decide, by the class of its path: sockets weigh most.
_HOP_COST = {
    "NV": 0.0,
    "XGMI": 0.0,
    "PIX": 1.0,
    "PXB": 1.5,
    "PHB": 3.0,
    "NODE": 4.0,
    "SYS": 20.0,
    "NET": 400.0,
}
_FAR_NUMA = 0.01


@dataclass(frozen=True, slots=True)
class LoadedLink:
    """One direction of a link, and its load.

    Attributes:
        a: Id it leaves.
        b: Id it enters.
        kind: Its kind.
        bandwidth_gb_per_s: Its bandwidth.
        load: How many times the message (or a ring's hop) goes over it.
    """

    a: str
    b: str
    kind: LinkKind
    bandwidth_gb_per_s: float
    load: float

    def __str__(self) -> str:
        link = f"{self.kind.value}, {self.bandwidth_gb_per_s:g} GB/s, loaded {self.load:.3g} x"
        return f"{self.a} -> {self.b} ({link})"

    @property
    def rate_gb_per_s(self) -> float:
        """GB/s that each message gets whose load is 1."""
        return self.bandwidth_gb_per_s / self.load


def ring_hops(order: Sequence[int]) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs of a ring; none for one GPU."""
    return list(pairwise([*order, order[0]])) if len(order) > 1 else []


def add_loads(
    loads: dict[Edge, float], routes: Routes, hops: Iterable[tuple[int, int]], weight: float = 1.0
) -> None:
    """Adds the load of messages of ``weight`` over the given hops to ``loads``."""
    for a, b in hops:
        for edge, share in routes.route(a, b):
            loads[edge] = loads.get(edge, 0.0) + weight * share


def bottleneck(topology: Graph, loads: Mapping[Edge, float]) -> LoadedLink:
    """The edge whose bandwidth over load is least; the first of equals."""
    edge = min(loads, key=lambda edge: topology.links_of(edge[0])[edge[1]].bandwidth_gb_per_s / loads[edge])
    link = topology.links_of(edge[0])[edge[1]]
    return LoadedLink(*edge, link.kind, link.bandwidth_gb_per_s, loads[edge])


@dataclass(frozen=True, eq=False, slots=True)
class PairLoads:
    """The links that a message between any two of some GPUs loads.

    Attributes:
        gpus: Indices of the GPUs; positions in all arrays follow this order.
        edges: The directed links that any of their messages takes; of links that every message loads alike
            (as the NVSwitches of one board) only the first.
        capacity: GB/s of each edge, float64 of shape (edges,).
        load: Part of a message from i to j on each edge, float64 of shape (n, n, edges).
        hop_cost: Cost of a hop beyond bandwidth, float64 of shape (n, n).
        fabric: Whether a hop goes over NVLink (or xGMI) alone, bool of shape (n, n).
    """

    gpus: tuple[int, ...]
    edges: tuple[Edge, ...]
    capacity: np.ndarray
    load: np.ndarray
    hop_cost: np.ndarray
    fabric: np.ndarray

    def ring(self, order: Sequence[int]) -> np.ndarray:
        """The loads of a ring over positions ``order``, summed over its hops: float64 of shape (edges,)."""
        stops = np.asarray(order)
        return self.load[stops, np.roll(stops, -1)].sum(axis=0)


def pair_loads(topology: Graph, gpus: Sequence[int], routes: Routes) -> PairLoads:
    """Collects the loads of every pair of GPUs.

    Args:
        topology: The machine.
        gpus: Indices of its GPUs.
        routes: The routes of that machine.

    Raises:
        TopologyError: Two of the GPUs are not joined.
    """
    count = len(gpus)
    found = {(i, j): routes.route(gpus[i], gpus[j]) for i in range(count) for j in range(count) if i != j}
    edges = _distinct(topology, found)
    place = {edge: position for position, edge in enumerate(edges)}
    load = np.zeros((count, count, len(edges)))
    cost = np.zeros((count, count))
    fabric = np.zeros((count, count), dtype=bool)
    numa = [node.index if (node := paths.numa_node(topology, gpu)) else 0 for gpu in gpus]
    for (i, j), route in found.items():
        for edge, share in route:
            if edge in place:
                load[i, j, place[edge]] += share
        word = paths.path_class(topology, topology.gpu(gpus[i]).id, topology.gpu(gpus[j]).id)
        fabric[i, j] = word.startswith(("NV", "XGMI"))
        cost[i, j] = _HOP_COST[word.rstrip("0123456789")]
        if not fabric[i, j]:
            cost[i, j] += _FAR_NUMA * abs(numa[i] - numa[j])
    capacity = np.array([topology.links_of(a)[b].bandwidth_gb_per_s for a, b in edges])
    return PairLoads(tuple(gpus), edges, capacity, load, cost, fabric)


def _distinct(topology: Graph, routes: Mapping[tuple[int, int], Route]) -> tuple[Edge, ...]:
    """The edges of some routes; of those whose load over capacity is the same for every route the first."""
    loads: dict[Edge, list[tuple[tuple[int, int], float]]] = {}
    for pair, route in routes.items():
        for edge, share in route:
            loads.setdefault(edge, []).append((pair, share))
    first: dict[tuple, Edge] = {}
    for (a, b), used in loads.items():
        capacity = topology.links_of(a)[b].bandwidth_gb_per_s
        alike = {share: float(f"{share / capacity:.9g}") for _, share in used}
        first.setdefault(tuple((pair, alike[share]) for pair, share in used), (a, b))
    return tuple(first.values())
