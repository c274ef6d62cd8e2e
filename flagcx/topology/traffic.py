"""The loads of one machine's GPU pairs as arrays, for searches that try thousands of orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcx.topology import paths
from flagcx.topology.graph import Topology
from flagcx.topology.routes import Edge, Routes

#: What a hop costs where bandwidth does not decide, by the class of its path: sockets weigh most.
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


@dataclass(frozen=True, eq=False, slots=True)
class Traffic:
    """What messages between some GPUs load.

    Attributes:
        gpus: Indices of the GPUs; positions in all arrays follow this order.
        edges: The directed links that any of their messages takes.
        capacity: GB/s of each edge, float64 of shape (edges,).
        load: Part of a message from i to j on each edge, float64 of shape (n, n, edges).
        hop_cost: What a hop costs beyond bandwidth, float64 of shape (n, n).
        fabric: Whether a hop goes over NVLink (or xGMI) alone, bool of shape (n, n).
    """

    gpus: tuple[int, ...]
    edges: tuple[Edge, ...]
    capacity: np.ndarray
    load: np.ndarray
    hop_cost: np.ndarray
    fabric: np.ndarray

    def hops(self, order: Sequence[int]) -> np.ndarray:
        """The loads of a ring over positions ``order``, summed over its hops: float64 of shape (edges,)."""
        stops = np.asarray(order)
        return self.load[stops, np.roll(stops, -1)].sum(axis=0)


def measure(topology: Topology, gpus: Sequence[int], routes: Routes) -> Traffic:
    """Collects the loads of every pair of GPUs.

    Args:
        topology: The machine.
        gpus: Indices of its GPUs.
        routes: The routes of that topology.

    Raises:
        TopologyError: Two of the GPUs are not joined.
    """
    count = len(gpus)
    found = {(i, j): routes.route(gpus[i], gpus[j]) for i in range(count) for j in range(count) if i != j}
    edges = tuple(dict.fromkeys(edge for route in found.values() for edge, _ in route))
    place = {edge: position for position, edge in enumerate(edges)}
    load = np.zeros((count, count, len(edges)))
    cost = np.zeros((count, count))
    fabric = np.zeros((count, count), dtype=bool)
    numa = [node.index if (node := paths.numa_node(topology, gpu)) else 0 for gpu in gpus]
    for (i, j), route in found.items():
        for edge, share in route:
            load[i, j, place[edge]] += share
        word = paths.path_class(topology, topology.gpu(gpus[i]).id, topology.gpu(gpus[j]).id)
        fabric[i, j] = word.startswith(("NV", "XGMI"))
        cost[i, j] = _HOP_COST[word.rstrip("0123456789")] + (
            _FAR_NUMA * abs(numa[i] - numa[j]) if not fabric[i, j] else 0.0
        )
    capacity = np.array([topology.links_of(a)[b].bandwidth_gb_per_s for a, b in edges])
    return Traffic(tuple(gpus), edges, capacity, load, cost, fabric)
