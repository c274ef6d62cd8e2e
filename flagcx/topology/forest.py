"""Spanning trees that together reach the bound where rings cannot.

An all-reduce along a tree reduces to its root and broadcasts back, so each link of the tree carries its
part of the message once in each direction. A ring must carry 2 (n - 1) / n of it over every hop, also over
the one slow link between two sockets, where a tree carries it once: on such machines a packing of trees has
nearly twice the bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcx.topology import packing
from flagcx.topology.graph import Topology
from flagcx.topology.routes import Bottleneck
from flagcx.topology.traffic import Traffic

_MOST_TREES = 16
_FORBIDDEN = 1e6
#: Positions joined by a tree, each pair in ascending order.
Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree to reduce along and broadcast back.

    Attributes:
        root: GPU index of the root.
        parents: (GPU, its parent) for every GPU but the root, parents before their children.
        bandwidth_gb_per_s: Algorithm bandwidth of its part, with all trees of the plan running.
        share: The part of the message it carries, 0 to 1.
        bottleneck: The link that limits it; None for a tree of one.
    """

    root: int
    parents: tuple[tuple[int, int], ...]
    bandwidth_gb_per_s: float
    share: float
    bottleneck: Bottleneck | None

    @property
    def depth(self) -> int:
        """Hops from the root to the farthest GPU."""
        levels = {self.root: 0}
        for child, parent in self.parents:
            levels[child] = levels[parent] + 1
        return max(levels.values())


def tree_load(traffic: Traffic, edges: Edges) -> np.ndarray:
    """What a tree loads, once up and once down: float64 of shape (edges,)."""
    ends = np.asarray(edges)
    return (traffic.load[ends[:, 0], ends[:, 1]] + traffic.load[ends[:, 1], ends[:, 0]]).sum(axis=0)


def pack_trees(traffic: Traffic) -> tuple[list[tuple[Edges, float]], float]:
    """Trees with weights that share the links, for the most bandwidth together.

    Args:
        traffic: The loads.

    Returns:
        (pairs of positions, GB/s) for each tree, and the most that any set of trees could have.
    """
    count = len(traffic.gpus)
    symmetric = traffic.load + traffic.load.transpose(1, 0, 2)

    def cheapest(prices: np.ndarray) -> tuple[Edges, np.ndarray]:
        cost = symmetric @ np.maximum(prices, 0.0) + 1e-9 * traffic.hop_cost
        edges = _least_tree(cost, count)
        return edges, tree_load(traffic, edges)

    found = packing.pack(traffic.capacity, cheapest)
    found = packing.dive(found, traffic.capacity, cheapest, rounds=400, keep=0.98, most=_MOST_TREES)
    return list(found.columns), found.limit


def _least_tree(cost: np.ndarray, count: int) -> Edges:
    """Prim's algorithm; the lower numbers of equals."""
    near, parent = cost[0].copy(), np.zeros(count, dtype=int)
    left = np.ones(count, dtype=bool)
    left[0] = False
    edges = []
    for _ in range(count - 1):
        stop = int(np.where(left, near, np.inf).argmin())
        edges.append((min(stop, int(parent[stop])), max(stop, int(parent[stop]))))
        left[stop] = False
        closer = left & (cost[stop] < near)
        near[closer], parent[closer] = cost[stop][closer], stop
    return tuple(sorted(edges))


def finished(topology: Topology, traffic: Traffic, trees: Sequence[tuple[Edges, float]]) -> tuple[Tree, ...]:
    """Trees by position and weight as ``Tree``s, rooted at their middle, with the bottleneck each meets."""
    total = sum(weight for _, weight in trees)
    loads = sum(
        (tree_load(traffic, edges) * weight for edges, weight in trees), np.zeros(len(traffic.capacity))
    )
    result = []
    for edges, weight in trees:
        used = tree_load(traffic, edges) > 0
        edge = int(np.where(used, traffic.capacity / np.maximum(loads, 1e-12), np.inf).argmin())
        a, b = traffic.edges[edge]
        link = topology.links_of(a)[b]
        narrow = Bottleneck(a, b, link.kind, link.bandwidth_gb_per_s, float(loads[edge] / max(weight, 1e-12)))
        root, parents = rooted([(traffic.gpus[i], traffic.gpus[j]) for i, j in edges])
        result.append(Tree(root, parents, weight, weight / total, narrow))
    return tuple(result)


def rooted(edges: Sequence[tuple[int, int]]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Roots a tree where it is least deep: (root, (child, parent) pairs from the root down)."""
    around: dict[int, list[int]] = {}
    for a, b in edges:
        around.setdefault(a, []).append(b)
        around.setdefault(b, []).append(a)
    hung = {node: _hang(around, node) for node in sorted(around)}
    root = min(hung, key=lambda node: (hung[node][1], node))
    return root, hung[root][0]


def _hang(around: dict[int, list[int]], root: int) -> tuple[tuple[tuple[int, int], ...], int]:
    parents: list[tuple[int, int]] = []
    level, depth, seen = [root], 0, {root}
    while level:
        following = []
        for node in level:
            for other in sorted(around[node]):
                if other not in seen:
                    seen.add(other)
                    parents.append((other, node))
                    following.append(other)
        level, depth = following, depth + bool(following)
    return tuple(parents), depth
