"""The bandwidth that NCCL's own all-reduce is taken to reach, for the model in ``flagcx.cost.nccl``.

NCCL runs several rings or trees at once, its channels. They are taken to share the links as well as can be:

- one host: the best packing of rings;
- several hosts, rings: one ring over all hosts for each GPU of a host, so that every NIC works;
- many hosts of one build: those of two places in the network stand for all, since each link carries as much;
- several hosts, two levels: within a host either rings scatter and gather or trees reduce and broadcast,
  whichever is faster, and along each rail (the GPUs of one place in every host) an all-reduce.

The phases of two levels are taken to be pipelined, so that each link carries the messages of all
phases at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcx.topology import tours
from flagcx.topology.graph import Graph, LinkKind
from flagcx.topology.loads import LoadedLink, PairLoads, add_loads, bottleneck, pair_loads, ring_hops
from flagcx.topology.orders import chosen, hop_factor, host_chains, ring_limits, ring_rate
from flagcx.topology.packing import pack
from flagcx.topology.routes import Edge, Routes

#: Most GPUs of one host whose rings and trees are packed.
_MOST_LOCAL = 64
#: Trees are taken over rings only for more than this.
_WORTH_TREES = 1.05
_FORBIDDEN = 1e6
#: From so many hosts of one build on, a few of them are looked at.
_MANY_HOSTS = 9
#: Rings (by order) or trees (by pairs) that run together, each with its share of the message.
Shares = tuple[tuple[tuple, float], ...]


@dataclass(frozen=True, slots=True)
class NcclBandwidth:
    """Algorithm bandwidth (message bytes over time) of a large all-reduce by NCCL itself.

    Attributes:
        rings_gb_per_s: Of its rings together.
        rings_limit: Kind of the link that limits the rings; None for one GPU.
        levels_gb_per_s: Of two levels; 0 on one host, and where hosts differ too much for rails.
        levels_limit: Kind of the link that limits the two levels, or None.
    """

    rings_gb_per_s: float
    rings_limit: LinkKind | None
    levels_gb_per_s: float = 0.0
    levels_limit: LinkKind | None = None


def nccl_bandwidth(topology: Graph, gpus: Sequence[int] | None = None) -> NcclBandwidth:
    """The bandwidth that NCCL is taken to reach.

    Args:
        topology: The machine or cluster.
        gpus: Indices of the GPUs that take part, each once; all by default.

    Raises:
        TopologyError: There is no GPU, one is unknown or named twice, or two cannot reach each other.

    Example:
        >>> from flagcx.topology import preset
        >>> round(nccl_bandwidth(preset("dgx-1v")).rings_gb_per_s, 1)
        68.6
    """
    members = chosen(topology, gpus)
    if len(members) == 1:
        return NcclBandwidth(math.inf, None)
    routes = Routes(topology)
    hosts = len({routes.domain(gpu) for gpu in members})
    chains, _ = host_chains(topology, _few(members, routes), routes)
    if len(chains) == 1:
        loads = pair_loads(topology, members, routes)
        rings = _pack_rings(loads, [members.index(gpu) for gpu in chains[0]])
        used = sum(loads.ring(order) * rate for order, rate in rings)
        full = used / loads.capacity >= 0.999 * (used / loads.capacity).max()
        a, b = loads.edges[int(np.where(full, loads.capacity, 0.0).argmax())]
        speed = sum(rate for _, rate in rings) * hop_factor(len(members))
        return NcclBandwidth(speed, topology.links_of(a)[b].kind)
    speed, limit = _flat_rings(topology, chains, routes)
    speed *= hop_factor(len(members))
    levels = max(_levels(topology, chains, routes, hosts), key=lambda link: link.rate_gb_per_s, default=None)
    if levels is None:
        return NcclBandwidth(speed, limit)
    return NcclBandwidth(speed, limit, levels.rate_gb_per_s, levels.kind)


def _few(gpus: Sequence[int], routes: Routes) -> Sequence[int]:
    """The GPUs of the first and last two hosts, where there are many hosts of one build; else all."""
    hosts: dict[int, list[int]] = {}
    for gpu in gpus:
        hosts.setdefault(routes.domain(gpu), []).append(gpu)
    if len(hosts) < _MANY_HOSTS or len({routes.shape_key(own) for own in hosts.values()}) > 1:
        return gpus
    ends = [*list(hosts)[:2], *list(hosts)[-2:]]
    return [gpu for host in ends for gpu in hosts[host]]


# -- one host


def _pack_rings(loads: PairLoads, first: Sequence[int]) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Rings over positions with the GB/s of each hop; one where that carries as much as several.

    Args:
        loads: The loads.
        first: The best single ring. Where it runs over NVLink alone, all rings must.
    """
    single = ((tuple(first), ring_rate(loads, first)),)
    if len(first) > _MOST_LOCAL:
        return single
    stops = np.asarray(first)
    only_fabric = loads.fabric[stops, np.roll(stops, -1)].all()
    penalty = np.where(loads.fabric | ~only_fabric, 0.0, _FORBIDDEN) + 1e-9 * loads.hop_cost

    def cheapest(prices: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        order = tuple(tours.cheapest_tour(loads.load @ prices + penalty))
        return order, loads.ring(order)

    rounds = 300 if len(first) <= tours.EXACT_UP_TO else 60
    several = pack(loads.capacity, cheapest, rounds=rounds)
    return several.columns if several.value > single[0][1] * (1 + 1e-6) else single


def _pack_trees(loads: PairLoads) -> tuple[tuple[tuple[tuple[int, int], ...], float], ...]:
    """Spanning trees, as pairs of positions, with GB/s: a message goes up each tree and down again."""
    import networkx  # takes longer to import than the rest of the package

    both = loads.load + loads.load.transpose(1, 0, 2)

    def cheapest(prices: np.ndarray) -> tuple[tuple[tuple[int, int], ...], np.ndarray]:
        costs = networkx.from_numpy_array(both @ prices + 1e-9 * loads.hop_cost + 1e-12)
        edges = tuple(sorted(networkx.minimum_spanning_edges(costs, data=False)))
        ends = np.asarray(edges)
        return edges, both[ends[:, 0], ends[:, 1]].sum(axis=0)

    return pack(loads.capacity, cheapest).columns


# -- several hosts


def _flat_rings(topology: Graph, chains: Sequence[Sequence[int]], routes: Routes) -> tuple[float, LinkKind]:
    """GB/s of a hop of one ring over all hosts for each place in a host, together, and what limits the first.

    Ring k enters a host at its k-th GPU and leaves it at the one before, along the host's chain; every
    other host is walked backwards, so that both ends of each network hop stand at the same place and so on
    the same rail.
    """
    rings = []
    for turn in range(min(map(len, chains))):
        order: list[int] = []
        for position, chain in enumerate(chains):
            turned = [*chain[turn % len(chain) :], *chain[: turn % len(chain)]]
            order += turned if position % 2 == 0 else turned[::-1]
        rings.append(order)
    limits = ring_limits(topology, rings, routes)
    return sum(limit.rate_gb_per_s for limit in limits), limits[0].kind


def _levels(
    topology: Graph, chains: Sequence[tuple[int, ...]], routes: Routes, hosts: int
) -> list[LoadedLink]:
    """The links that limit two levels: with rings and with trees within the hosts, where possible."""
    rings, trees = _local_shares(topology, chains, routes)
    found = []
    width = len(chains[0])
    if all(len(chain) == width for chain in chains):
        hops = [(ring_hops(order), 2 * (width - 1) / width * share) for order, share in rings]
        found.append(_with_rails(topology, hops, _rails(chains, routes), routes, hosts))
    roots = [sorted(_by_nic(sorted(chain, reverse=True), routes).items()) for chain in chains]
    if trees and all(len(one) == len(roots[0]) for one in roots):
        hops = [([hop for a, b in pairs for hop in ((a, b), (b, a))], share) for pairs, share in trees]
        rails = list(zip(*([gpu for _, gpu in one] for one in roots), strict=True))
        found.append(_with_rails(topology, hops, rails, routes, hosts))
    return found


def _local_shares(
    topology: Graph, chains: Sequence[tuple[int, ...]], routes: Routes
) -> tuple[Shares, Shares]:
    """Rings and trees of all hosts with their shares; no trees unless they pay on every host."""
    shapes: dict[tuple, tuple[Shares, Shares]] = {}
    rings: list[tuple[tuple, float]] = []
    trees: list[tuple[tuple, float]] = []
    everywhere = True
    for chain in chains:
        key = routes.shape_key(chain)
        if key not in shapes:
            shapes[key] = _search_host(topology, chain, routes)
        own_rings, own_trees = shapes[key]
        rings += [(tuple(chain[i] for i in order), share) for order, share in own_rings]
        trees += [(tuple((chain[i], chain[j]) for i, j in pairs), share) for pairs, share in own_trees]
        everywhere = everywhere and bool(own_trees)
    return tuple(rings), tuple(trees) if everywhere else ()


def _search_host(topology: Graph, chain: Sequence[int], routes: Routes) -> tuple[Shares, Shares]:
    if len(chain) == 1:
        return (), ()
    loads = pair_loads(topology, chain, routes)
    rings = _pack_rings(loads, range(len(chain)))
    speed = sum(rate for _, rate in rings)
    trees = _pack_trees(loads) if len(chain) <= _MOST_LOCAL else ()
    weight = sum(rate for _, rate in trees)
    if weight <= speed * hop_factor(len(chain)) * _WORTH_TREES:
        trees = ()
    return tuple((o, rate / speed) for o, rate in rings), tuple((t, rate / weight) for t, rate in trees)


def _with_rails(
    topology: Graph,
    local: Sequence[tuple[Sequence[tuple[int, int]], float]],
    rails: Sequence[Sequence[int]],
    routes: Routes,
    hosts: int,
) -> LoadedLink:
    """The link that limits hops within the hosts and an evenly shared ring all-reduce along each rail."""
    loads: dict[Edge, float] = {}
    for hops, weight in local:
        add_loads(loads, routes, hops, weight)
    for rail in rails:
        add_loads(loads, routes, ring_hops(rail), 2 * (hosts - 1) / hosts / len(rails))
    return bottleneck(topology, loads)


def _rails(chains: Sequence[tuple[int, ...]], routes: Routes) -> list[tuple[int, ...]]:
    """GPUs of the same place in their hosts: by their NIC where that tells them apart, else by order."""
    names = [_by_nic(chain, routes) for chain in chains]
    if all(found.keys() == names[0].keys() and len(found) == len(chains[0]) for found in names):
        return [tuple(found[name] for found in names) for name in sorted(names[0])]
    return list(zip(*chains, strict=True))


def _by_nic(chain: Sequence[int], routes: Routes) -> dict[str, int]:
    """The last GPU of a chain that uses each NIC, by the NIC's name in its host."""
    return {(routes.nic(gpu) or "").rsplit("/", 1)[-1]: gpu for gpu in chain}
