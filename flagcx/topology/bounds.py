"""The best bandwidth that any all-reduce can have on a topology.

Cut the GPUs into k groups. Before any group has the whole sum of a piece of the message, each other group
must have sent something for that piece; after it, each other group must still receive it: 2 (k - 1)
passages between groups for every byte. Each leaves one group and enters another, so with cut(X) the
bandwidth between group X and the rest

    algorithm bandwidth  <=  sum of cut(X) over the groups / (2 (k - 1))        for every way to cut

and the least such value is the bound. It holds for every schedule in which switches only forward (neither
add nor multiply packets); ``nvls_bound`` is that of NVSwitches that do both. For one group against the rest
of a symmetric machine it is the bound of
ForestColl (arXiv 2402.06787); for a ring of equal links, the known 2 (n - 1) / n. The least partition is
found with least cuts, by Cunningham's greedy algorithm inside Dinkelbach's iteration.

Source: Cunningham, "Optimal attack and reinforcement of a network", JACM 32 (1985), for the partition;
ForestColl, arXiv 2402.06787, sections 3 and 5, for cuts with switches; Patarasuk and Yuan (2009) for the
count of passages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from types import MappingProxyType

from flagcx.topology.graph import DeviceKind, Graph
from flagcx.topology.routes import Routes
from flagcx.topology.speeds import whole

_NVLS_FROM_SM = 90
#: Up to so many GPUs the least partition is found; above, natural ones (GPUs, hosts, leaves) are tried.
EXACT_UP_TO = 32
_TOLERANCE = 1e-9
#: Groups of GPUs of a host, by place, and the sum of their cuts.
Split = tuple[list[list[int]], float]


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound, and the groups that set it.

    Attributes:
        bandwidth_gb_per_s: No all-reduce of a large message does better (message bytes over time) whose
            switches only forward.
        groups: The groups of GPUs between which it runs out of bandwidth.
        exact: Whether this is the least bound over all partitions; otherwise a valid bound, and perhaps
            not the least.
    """

    bandwidth_gb_per_s: float
    groups: tuple[tuple[int, ...], ...]
    exact: bool


def bound(topology: Graph, gpus: Sequence[int] | None = None, *, routes: Routes | None = None) -> Bound:
    """The best algorithm bandwidth of a large all-reduce over some GPUs.

    Args:
        topology: The machine or cluster.
        gpus: Indices of the GPUs that take part; all by default.
        routes: Routes found already, to save finding them again.

    Returns:
        The bound; infinite for one GPU, which sends nothing.

    Raises:
        TopologyError: A GPU is unknown or cannot be reached.

    Example:
        >>> from flagcx.topology import preset
        >>> bound(preset("dgx-2")).bandwidth_gb_per_s        # 16 GPUs, each with 120 GB/s
        64.0
    """
    gpus = [gpu.index for gpu in topology.gpus] if gpus is None else list(gpus)
    if len(gpus) < 2:
        return Bound(math.inf, (tuple(gpus),), True)
    routes = routes or Routes(topology)
    if len(gpus) > EXACT_UP_TO:
        return _natural(topology, gpus, routes)
    links = usable_links(topology, gpus, routes)
    names = {topology.gpu(gpu).id: gpu for gpu in gpus}
    value, groups = least_partition(links, list(names))
    return Bound(value, tuple(tuple(sorted(names[id] for id in group)) for group in groups), True)


def nvls_bound(topology: Graph, gpus: Sequence[int]) -> float | None:
    """The best algorithm bandwidth where NVSwitches add up and multicast (NVLS), as from Hopper on.

    For every byte of the message each GPU still sends once, its own data or a sum, and receives once: so no
    more than the links of one GPU carry each way. GPUs that each read the sums of an n-th part from the
    switches and multicast them come to n / (n + 1) of that.

    Args:
        topology: The machine or cluster.
        gpus: Indices of the GPUs that take part.

    Returns:
        GB/s, or None where not all of the GPUs share NVSwitches, or one is older than Hopper.

    Example:
        >>> from flagcx.topology import preset
        >>> round(nvls_bound(preset("dgx-h200"), range(8)), 1), nvls_bound(preset("dgx-a100"), range(8))
        (370.8, None)
    """
    shared: set[str] | None = None
    for gpu in gpus:
        device = topology.gpu(gpu)
        if (whole(device.attribute("gpu.sm")) or 0) < _NVLS_FROM_SM:
            return None
        own = set(topology.nvswitches_of(device.id))
        shared = own if shared is None else shared & own
    if not shared or len(gpus) < 2:
        return None
    return min(
        sum(topology.links_of(topology.gpu(gpu).id)[id].bandwidth_gb_per_s for id in shared) for gpu in gpus
    )


def usable_links(topology: Graph, gpus: Sequence[int], routes: Routes) -> dict[frozenset[str], float]:
    """The links that messages between the GPUs can take at all, with their bandwidth.

    Switches that join the same devices, as the NVSwitches of a board do, are one: their links are added up.
    """
    used = {
        frozenset(edge): topology.links_of(edge[0])[edge[1]].bandwidth_gb_per_s
        for a, b in combinations(gpus, 2)
        for edge, _ in routes.route(a, b)
    }
    return _merged(used, [topology.gpu(gpu).id for gpu in gpus])


def _merged(links: Mapping[frozenset[str], float], terminals: Sequence[str]) -> dict[frozenset[str], float]:
    """The links with forwarding nodes put together that have the same neighbours, in one proportion.

    On whichever side of a cut the neighbours are, such nodes stand on the same side, so no cut changes.
    """
    around: dict[str, dict[str, float]] = {}
    for ends, bandwidth in links.items():
        for a, b in permutations(ends, 2):
            around.setdefault(a, {})[b] = bandwidth
    first: dict[tuple, str] = {}
    merged: dict[frozenset[str], float] = dict(links)
    for node in sorted(around.keys() - set(terminals)):
        near = around[node]
        if any(neighbour in first.values() for neighbour in near):
            continue  # its neighbours may be put together themselves
        total = sum(near.values())
        alike = tuple((id, float(f"{near[id] / total:.9g}")) for id in sorted(near))
        kept = first.setdefault(alike, node)
        if kept != node:
            for id, bandwidth in near.items():
                del merged[frozenset((node, id))]
                merged[frozenset((kept, id))] += bandwidth
    return merged


def least_partition(
    links: Mapping[frozenset[str], float], terminals: Sequence[str]
) -> tuple[float, list[list[str]]]:
    """The least of sum of cut(X) / (2 (k - 1)) over partitions of the terminals to k >= 2 groups.

    Args:
        links: Bandwidth of each undirected link, by its two ends.
        terminals: At least two nodes; all others only forward.

    Returns:
        The value and the groups.
    """
    groups = [[terminal] for terminal in terminals]
    value = _value(links, terminals, groups)
    while True:
        candidate = _most_negative(links, terminals, value)
        if len(candidate) < 2:
            return value, groups
        better = _value(links, terminals, candidate)
        if better >= value * (1 - _TOLERANCE):
            return value, groups
        value, groups = better, candidate


def _value(
    links: Mapping[frozenset[str], float], terminals: Sequence[str], groups: Sequence[Sequence[str]]
) -> float:
    return sum(_cut(links, terminals, group) for group in groups) / (2 * (len(groups) - 1))


def _cut(links: Mapping[frozenset[str], float], terminals: Sequence[str], group: Sequence[str]) -> float:
    """The least bandwidth between a group and the other terminals."""
    outside = set(terminals).difference(group)
    return _min_cut(links, 1.0, [("source", name) for name in group] + [("sink", name) for name in outside])[
        0
    ]


def _most_negative(
    links: Mapping[frozenset[str], float], terminals: Sequence[str], price: float
) -> list[list[str]]:
    """The partition with the least sum of (cut(X) / 2 - price): Cunningham's greedy, one flow a terminal."""
    reward: dict[str, float] = {}
    groups: list[list[str]] = []
    for position, terminal in enumerate(terminals):
        fixed = [("source", terminal), *(("sink", other) for other in terminals[position + 1 :])]
        priced = {("source" if gain > 0 else "sink", other): abs(gain) for other, gain in reward.items()}
        value, side = _min_cut(links, 0.5, fixed, priced)
        reward[terminal] = value - sum(gain for gain in reward.values() if gain > 0) - price
        touched = [group for group in groups if side.intersection(group)]
        groups = [group for group in groups if group not in touched]
        groups.append([*(member for group in touched for member in group), terminal])
    return groups


def _min_cut(
    links: Mapping[frozenset[str], float],
    factor: float,
    fixed: Sequence[tuple[str, str]],
    priced: Mapping[tuple[str, str], float] = MappingProxyType({}),
) -> tuple[float, set[str]]:
    """The least cut between ``source`` and ``sink``, and the nodes on the source's side.

    Each link counts ``factor`` times its bandwidth; no ``fixed`` edge is cut; ``priced`` edges have a cost.
    """
    import networkx  # takes longer to import than the rest of the package

    graph = networkx.Graph()
    graph.add_nodes_from(("source", "sink"))
    for ends, bandwidth in links.items():
        graph.add_edge(*sorted(ends), capacity=bandwidth * factor)
    graph.add_edges_from(fixed)
    for (terminal, node), cost in priced.items():
        graph.add_edge(terminal, node, capacity=cost)
    value, (side, _) = networkx.minimum_cut(graph, "source", "sink")
    return value, side


# -- large clusters


def _natural(topology: Graph, gpus: Sequence[int], routes: Routes) -> Bound:
    """The best of the natural partitions.

    They are: every GPU alone, the groups of each host's own least partition, every host (or NVLink domain)
    alone, and the hosts below each set of leaf switches together.
    """
    by_host: dict[int, list[int]] = {}
    for gpu in gpus:
        by_host.setdefault(routes.domain(gpu), []).append(gpu)
    shapes: dict[tuple, list[Split]] = {}
    for members in by_host.values():
        key = routes.shape_key(members)
        if key not in shapes:
            shapes[key] = _host_splits(topology, members, routes, len(by_host) > 1)
    hosts = [(members, shapes[routes.shape_key(members)]) for members in by_host.values()]
    partitions = _leaf_partition(topology, by_host, routes)
    for kind in range(len(hosts[0][1])):
        chosen = [(members, splits[min(kind, len(splits) - 1)]) for members, splits in hosts]
        groups = [tuple(members[place] for place in group) for members, split in chosen for group in split[0]]
        partitions.append((groups, sum(split[1] for _, split in chosen)))
    values = [(cut / (2 * (len(groups) - 1)), groups) for groups, cut in partitions if len(groups) > 1]
    value, groups = min(values, key=lambda entry: entry[0])
    return Bound(value, tuple(groups), False)


def _host_splits(topology: Graph, members: Sequence[int], routes: Routes, outside: bool) -> list[Split]:
    """Ways to split one host's GPUs, by place in ``members``."""
    links = usable_links(topology, members, routes)
    names = [topology.gpu(gpu).id for gpu in members]
    splits = [[[name] for name in names]]
    if 1 < len(members) <= EXACT_UP_TO:
        splits.append(least_partition(links, names)[1])
    terminals = names
    if outside:
        splits.append([names])
        links |= _outside_links(topology, members, routes)
        terminals = [*names, "outside"]
    cuts: dict[object, float] = {}

    def cut(group: Sequence[str]) -> float:
        """Found once for GPUs that have the same links."""
        near = {
            id: value for ends, value in links.items() for id in ends if group[0] in ends and id != group[0]
        }
        key = frozenset(near.items()) if len(group) == 1 else tuple(group)
        if key not in cuts:
            cuts[key] = _cut(links, terminals, group)
        return cuts[key]

    return [
        ([sorted(names.index(name) for name in group) for group in groups], sum(map(cut, groups)))
        for groups in splits
    ]


def _outside_links(topology: Graph, members: Sequence[int], routes: Routes) -> dict[frozenset[str], float]:
    """From each GPU to its NIC, and from the NICs to everything beyond the host."""
    links: dict[frozenset[str], float] = {}
    for gpu in members:
        path = routes.to_nic(gpu)
        if routes.nic(gpu) is not None:
            for a, b in pairwise(path):
                links[frozenset((a, b))] = topology.links_of(a)[b].bandwidth_gb_per_s
            network = topology.network_links_of(path[-1]).values()
            links[frozenset((path[-1], "outside"))] = sum(link.bandwidth_gb_per_s for link in network)
    return links


def _leaf_partition(
    topology: Graph, by_host: Mapping[int, Sequence[int]], routes: Routes
) -> list[tuple[list[tuple[int, ...]], float]]:
    """The hosts below each set of leaf switches as one group, where there are several such sets."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for host, members in by_host.items():
        groups.setdefault(routes.leaves(host), []).extend(members)
    if not 1 < len(groups) < len(by_host):
        return []
    around = [link for leaves in groups for leaf in leaves for link in topology.links_of(leaf).items()]
    cut = sum(
        link.bandwidth_gb_per_s
        for id, link in around
        if topology.device(id).kind is DeviceKind.NETWORK_SWITCH
    )
    return [([tuple(group) for group in groups.values()], cut)]
