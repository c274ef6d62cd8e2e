"""Plans over several hosts: levels within and between hosts, and rings over all.

Within a host either rings scatter and gather, or trees reduce and broadcast:

- With rings, each of g GPUs reduces a g-th of the message, all-reduces that along its rail (the GPUs of the
  same place in each host), and gathers. Every NIC carries 2 (h - 1) / h of what its GPUs reduce.
- With trees, one GPU for each NIC is a root, reduces its part over the host's trees, all-reduces it with
  the roots of the other hosts and broadcasts back. That is for hosts whose rings cross a slow link.

The three phases are taken to be pipelined, so that each link is charged with what all of them send over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagcx.topology import routes as ways
from flagcx.topology.graph import Topology
from flagcx.topology.rings import Ring, hop_factor
from flagcx.topology.routes import Bottleneck, Edge, Routes

#: Pairs of GPUs that a tree joins, and the share of the message it carries.
SharedTree = tuple[tuple[tuple[int, int], ...], float]
#: GPUs in ring order, and the share of the message the ring carries.
SharedRing = tuple[tuple[int, ...], float]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """An all-reduce in two levels.

    Attributes:
        hosts: For each host its GPUs in ring order; hosts in the order of the inter-host rings.
        rails: GPUs of different hosts that all-reduce together, one of each host; the rails share the message
            evenly.
        local: ``rings`` (reduce-scatter and all-gather) or ``trees`` (reduce and broadcast) within a host.
        local_rings: For each host its rings with their shares; () with trees.
        local_trees: For each host its trees with their shares, to be rooted at the host's GPU of each rail;
            () with rings.
        bandwidth_gb_per_s: Algorithm bandwidth with the phases pipelined.
        bottleneck: The link that limits it.
    """

    hosts: tuple[tuple[int, ...], ...]
    rails: tuple[tuple[int, ...], ...]
    local: str
    local_rings: tuple[tuple[SharedRing, ...], ...]
    local_trees: tuple[tuple[SharedTree, ...], ...]
    bandwidth_gb_per_s: float
    bottleneck: Bottleneck


def plan_with_rings(
    topology: Topology,
    chains: Sequence[tuple[int, ...]],
    rings: Sequence[tuple[SharedRing, ...]],
    routes: Routes,
) -> Hierarchy | None:
    """The hierarchy with rings within the hosts.

    Args:
        topology: The cluster.
        chains: For each host its GPUs in ring order.
        rings: For each host its rings.
        routes: The routes of that topology.

    Returns:
        The plan, or None where the hosts do not have the same number of GPUs each.
    """
    width = len(chains[0])
    if any(len(chain) != width for chain in chains):
        return None
    loads: dict[Edge, float] = {}
    for host in rings if width > 1 else ():
        for order, share in host:
            ways.add_loads(loads, routes, _hops(order), 2 * (width - 1) / width * share)
    rails = _rails(chains, routes)
    narrow = _with_rails(topology, loads, rails, routes)
    speed = narrow.bandwidth_gb_per_s / narrow.load
    return Hierarchy(tuple(chains), rails, "rings", tuple(rings), (), speed, narrow)


def plan_with_trees(
    topology: Topology,
    chains: Sequence[tuple[int, ...]],
    trees: Sequence[tuple[SharedTree, ...]],
    routes: Routes,
) -> Hierarchy | None:
    """The hierarchy with trees within the hosts; see ``plan_with_rings``.

    Returns:
        The plan, or None where the hosts do not have the same number of NICs each.
    """
    loads: dict[Edge, float] = {}
    for host in trees:
        for pairs, share in host:
            both = [hop for a, b in pairs for hop in ((a, b), (b, a))]
            ways.add_loads(loads, routes, both, share)
    roots = []
    for chain in chains:
        first: dict[str, int] = {}
        for gpu in sorted(chain):
            first.setdefault(_local_name(routes.nic(gpu)), gpu)
        roots.append(tuple(first[name] for name in sorted(first)))
    if any(len(found) != len(roots[0]) for found in roots):
        return None
    rails = tuple(zip(*roots, strict=True))
    narrow = _with_rails(topology, loads, rails, routes)
    speed = narrow.bandwidth_gb_per_s / narrow.load
    return Hierarchy(tuple(chains), rails, "trees", (), tuple(trees), speed, narrow)


def _with_rails(
    topology: Topology, loads: dict[Edge, float], rails: Sequence[Sequence[int]], routes: Routes
) -> Bottleneck:
    """Adds an evenly shared ring all-reduce along each rail, and gives what limits the whole."""
    hosts = len(rails[0])
    for rail in rails:
        ways.add_loads(loads, routes, _hops(rail), 2 * (hosts - 1) / hosts / len(rails))
    return ways.bottleneck(topology, loads)


def plan_flat_rings(topology: Topology, chains: Sequence[Sequence[int]], routes: Routes) -> tuple[Ring, ...]:
    """One ring over all hosts for each place in a host, so that every NIC works.

    Ring k enters a host at its k-th GPU and leaves it at the one before, along the host's chain; every
    other host is walked backwards, so that both ends of each network hop stand at the same place and so on
    the same rail.

    Args:
        topology: The cluster.
        chains: For each host its GPUs in ring order.
        routes: The routes of that topology.
    """
    width = min(len(chain) for chain in chains)
    count = sum(len(chain) for chain in chains)
    orders = [_flat_order(chains, turn) for turn in range(width)]
    loads: dict[Edge, float] = {}
    own = []
    for order in orders:
        single: dict[Edge, float] = {}
        ways.add_loads(single, routes, _hops(order))
        own.append(single)
        for edge, load in single.items():
            loads[edge] = loads.get(edge, 0.0) + load
    speeds = []
    for order, single in zip(orders, own, strict=True):
        shared = {edge: loads[edge] for edge in single}
        narrow = ways.bottleneck(topology, shared)
        speeds.append((order, narrow.bandwidth_gb_per_s / narrow.load, narrow))
    total = sum(speed for _, speed, _ in speeds)
    return tuple(
        Ring(tuple(order), speed * hop_factor(count), speed / total, narrow)
        for order, speed, narrow in speeds
    )


def _flat_order(chains: Sequence[Sequence[int]], turn: int) -> list[int]:
    order: list[int] = []
    for position, chain in enumerate(chains):
        shift = turn % len(chain)
        turned = [*chain[shift:], *chain[:shift]]
        order += turned if position % 2 == 0 else turned[::-1]
    return order


def _rails(chains: Sequence[tuple[int, ...]], routes: Routes) -> tuple[tuple[int, ...], ...]:
    """GPUs of the same place in their hosts: by their NIC where that tells them apart, else by order."""
    names = [{_local_name(routes.nic(gpu)): gpu for gpu in chain} for chain in chains]
    if all(set(found) == set(names[0]) and len(found) == len(chains[0]) for found in names):
        return tuple(tuple(found[name] for found in names) for name in sorted(names[0]))
    return tuple(zip(*chains, strict=True))


def _local_name(nic: str | None) -> str:
    return (nic or "").rsplit("/", 1)[-1]


def _hops(order: Sequence[int]) -> list[tuple[int, int]]:
    return [] if len(order) < 2 else list(zip(order, [*order[1:], order[0]], strict=True))
