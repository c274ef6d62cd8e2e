"""Trees for latency: a double binary tree laid over the planned order, host by host in a cluster.

Each of two trees carries half of the message, and no rank is inside both (but the root for odd n), so that
every rank sends about as much as it receives. Within a host ranks are chained; between hosts the trees are
binary, so that the depth grows with the logarithm of the hosts.

Source: Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(2009).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from flagcx.topology import routes as ways
from flagcx.topology.forest import Tree
from flagcx.topology.graph import Topology
from flagcx.topology.routes import Edge, Routes


def binary_parent(rank: int, count: int) -> int | None:
    """Parent of a rank in the binary tree in which odd ranks are leaves; None for rank 0, the root.

    Example:
        >>> [binary_parent(rank, 5) for rank in range(5)]
        [None, 2, 4, 2, 0]
    """
    if rank == 0:
        return None
    low = rank & -rank
    parent = (rank - low) | (low << 1)
    return parent if parent < count else rank - low


def double_binary(order: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The two trees over an order of ranks, as (child, parent) pairs.

    The second tree mirrors the first for an even count, and shifts it by one for an odd one.
    """
    count = len(order)
    mirror = (
        [count - 1 - rank for rank in range(count)]
        if count % 2 == 0
        else [(rank + 1) % count for rank in range(count)]
    )
    first = [(rank, parent) for rank in range(count) if (parent := binary_parent(rank, count)) is not None]
    second = [(mirror[child], mirror[parent]) for child, parent in first]
    return [[(order[child], order[parent]) for child, parent in tree] for tree in (first, second)]


def plan_pair(topology: Topology, chains: Sequence[Sequence[int]], routes: Routes) -> tuple[Tree, ...]:
    """Two trees that each carry half of the message, over one chain of GPUs a host.

    Args:
        topology: The machine or cluster.
        chains: For each host its GPUs in planned order; for one host, one chain.
        routes: The routes of that topology.

    Returns:
        Two trees, or none for a single GPU.
    """
    if len(chains) == 1:
        pairs = double_binary(chains[0]) if len(chains[0]) > 1 else []
    else:
        pairs = [
            _over_hosts(chains, tree, second) for second, tree in enumerate(double_binary(range(len(chains))))
        ]
    if not pairs:
        return ()
    loads: dict[Edge, float] = {}
    for pair in pairs:
        hops = [hop for child, parent in pair for hop in ((child, parent), (parent, child))]
        ways.add_loads(loads, routes, hops, 0.5)
    narrow = ways.bottleneck(topology, loads)
    speed = narrow.bandwidth_gb_per_s / narrow.load
    return tuple(replace(_tree(pair), bandwidth_gb_per_s=speed / 2, bottleneck=narrow) for pair in pairs)


def _over_hosts(
    chains: Sequence[Sequence[int]], tree: list[tuple[int, int]], second: int
) -> list[tuple[int, int]]:
    """A tree between the heads of the hosts' chains, with each chain below its head.

    The heads of the second tree stand half a chain further on, and so use another NIC where there is one.
    """
    turned = [
        [*chain[len(chain) // 2 :], *chain[: len(chain) // 2]] if second else list(chain) for chain in chains
    ]
    pairs = [(turned[child][0], turned[parent][0]) for child, parent in tree]
    return pairs + [(b, a) for chain in turned for a, b in itertools.pairwise(chain)]


def _tree(pairs: Sequence[tuple[int, int]]) -> Tree:
    below: dict[int, list[int]] = {}
    for child, parent in pairs:
        below.setdefault(parent, []).append(child)
    root = next(parent for parent in below if parent not in {child for child, _ in pairs})
    ordered, level = [], [root]
    while level:
        ordered += [(child, parent) for parent in level for child in below.get(parent, ())]
        level = [child for parent in level for child in below.get(parent, ())]
    return Tree(root, tuple(ordered), 0.0, 0.5, None)
