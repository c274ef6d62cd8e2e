"""Plans an all-reduce over a topology, and says how near each plan comes to the bound.

Deterministic: the same topology and GPUs give the same plan on every rank, with no clock involved; searches
are bounded by counts of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flagcx.errors import TopologyError
from flagcx.topology import bounds, forest, hierarchy, rings, traffic, trees
from flagcx.topology.bounds import Bound, bound
from flagcx.topology.forest import Tree
from flagcx.topology.graph import LinkKind, Topology
from flagcx.topology.hierarchy import Hierarchy
from flagcx.topology.rings import Ring
from flagcx.topology.routes import Edge, Routes, add_loads, bottleneck
from flagcx.topology.traffic import Traffic

#: A ring plan this near to the bound is not worth looking further for.
_GOOD = 0.98
#: Trees are taken over rings only for more than this: rings need no root, and are simpler to run.
_WORTH_TREES = 1.05
#: Most GPUs of one host whose rings and trees are packed.
_MOST_LOCAL = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned all-reduce. Bandwidths are algorithm bandwidth: message bytes over time, for a large message.

    Attributes:
        gpus: The GPUs that take part, as they were given.
        order: The one ring order to use where only one is wanted.
        rings: Rings that run together, each with its share of the message.
        forest: Trees that run together and come nearer to the bound; () where rings are as good.
        trees: Two trees for low latency that follow the links; () for one GPU.
        hierarchy: The plan over several hosts; None within one host.
        method: ``rings``, ``trees`` or ``hierarchy``: which of them has ``bandwidth_gb_per_s``.
        bandwidth_gb_per_s: Of the best method.
        bound_gb_per_s: No schedule on this graph has more (see ``flagcx.topology.bounds``).
        reachable_gb_per_s: No schedule has more whose messages take the hardware's routes, where that was
            found to be less than the bound; else the bound.
        exact: Whether no better single ring exists (exact search), as against a heuristic one.
        why: Why rings stay under 0.9 of the bound; "" where they do not.
    """

    gpus: tuple[int, ...]
    order: tuple[int, ...]
    rings: tuple[Ring, ...]
    forest: tuple[Tree, ...]
    trees: tuple[Tree, ...]
    hierarchy: Hierarchy | None
    method: str
    bandwidth_gb_per_s: float
    bound_gb_per_s: float
    reachable_gb_per_s: float
    exact: bool
    why: str

    @property
    def ratio(self) -> float:
        """Bandwidth over the bound, 0 to 1; 1 for one GPU."""
        return 1.0 if math.isinf(self.bound_gb_per_s) else self.bandwidth_gb_per_s / self.bound_gb_per_s

    @property
    def rings_gb_per_s(self) -> float:
        """What the rings have together."""
        return sum(ring.bandwidth_gb_per_s for ring in self.rings)


def make_plan(topology: Topology, gpus: Sequence[int] | None = None) -> Plan:
    """Plans an all-reduce.

    Args:
        topology: The machine or cluster.
        gpus: Indices of the GPUs that take part, each once; all by default.

    Raises:
        TopologyError: There is no GPU, one is unknown or named twice, or two cannot reach each other.

    Example:
        >>> from flagcx.topology import preset
        >>> plan = make_plan(preset("dgx-1v"))
        >>> len(plan.rings), plan.method, round(plan.bandwidth_gb_per_s, 1)
        (6, 'rings', 68.6)
    """
    chosen = _checked(topology, gpus)
    if len(chosen) == 1:
        ring = Ring(chosen, math.inf, 1.0, None)
        return Plan(chosen, chosen, (ring,), (), (), None, "rings", math.inf, math.inf, math.inf, True, "")
    routes = Routes(topology)
    best = bound(topology, chosen, routes=routes)
    hosts = _by_host(topology, chosen, routes)
    if len(hosts) == 1:
        return _plan_host(topology, chosen, routes, best)
    return _plan_cluster(topology, chosen, hosts, routes, best)


def plan_rings(topology: Topology, gpus: Sequence[int] | None = None) -> tuple[Ring, ...]:
    """The planned rings, which run together; see ``make_plan``."""
    return make_plan(topology, gpus).rings


def plan_trees(topology: Topology, gpus: Sequence[int] | None = None) -> tuple[Tree, ...]:
    """The planned pair of trees, each for half of the message; see ``make_plan``."""
    return make_plan(topology, gpus).trees


def best_order(topology: Topology, gpus: Sequence[int] | None = None) -> tuple[int, ...]:
    """The GPUs in the best ring order, from the first that was given; see ``make_plan``.

    Example:
        >>> from flagcx.topology import preset
        >>> best_order(preset("dgx-1v"))
        (0, 3, 2, 1, 5, 6, 7, 4)
    """
    return make_plan(topology, gpus).order


def order_bandwidth(topology: Topology, order: Sequence[int], *, routes: Routes | None = None) -> float:
    """Algorithm bandwidth in GB/s of one ring in a given order, for a large all-reduce.

    Args:
        topology: The machine or cluster.
        order: GPU indices; each sends to the next, the last to the first.
        routes: Routes found already.

    Raises:
        TopologyError: A GPU is unknown or named twice, or two cannot reach each other.
    """
    chosen = _checked(topology, order)
    if len(chosen) == 1:
        return math.inf
    loads: dict[Edge, float] = {}
    add_loads(loads, routes or Routes(topology), zip(chosen, [*chosen[1:], chosen[0]], strict=True))
    narrow = bottleneck(topology, loads)
    return narrow.bandwidth_gb_per_s / narrow.load * rings.hop_factor(len(chosen))


def _checked(topology: Topology, gpus: Sequence[int] | None) -> tuple[int, ...]:
    chosen = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
    if not chosen:
        raise TopologyError(
            f"{topology!r} has no GPU to plan over" if gpus is None else "gpus is empty; name at least one"
        )
    if len(set(chosen)) != len(chosen):
        raise TopologyError(f"a GPU is named twice in {chosen[:16]}; each takes part once")
    for gpu in chosen:
        topology.gpu(gpu)
    return chosen


# -- one host


@dataclass(frozen=True, slots=True)
class _HostPlan:
    """What was found for one host, by position: the best single ring, rings and trees to run together."""

    single: tuple[int, ...]
    exact: bool
    rings: tuple[tuple[tuple[int, ...], float], ...]
    trees: tuple[tuple[forest.Edges, float], ...] = ()
    reachable: float = math.inf


def _search_host(topology: Topology, loads: Traffic, routes: Routes, best: Bound) -> _HostPlan:
    """Rings, and trees where rings stay clearly below the bound."""
    single, exact = rings.best_ring(loads)
    speed = rings.rate(loads, single)
    found: tuple[tuple[tuple[int, ...], float], ...] = ((tuple(single), speed),)
    factor = rings.hop_factor(len(loads.gpus))
    small = len(loads.gpus) <= _MOST_LOCAL
    if small and speed < _GOOD * min(
        _least_cut(topology, loads.gpus, routes)[0], best.bandwidth_gb_per_s / factor
    ):
        several, _ = rings.pack_rings(loads, single)
        if sum(rate for _, rate in several) > speed * (1 + 1e-6):
            found = tuple(several)
    ring_speed = sum(rate for _, rate in found) * factor
    if not small or ring_speed >= _GOOD * best.bandwidth_gb_per_s:
        return _HostPlan(tuple(single), exact, found)
    packed, limit = forest.pack_trees(loads)
    worth = sum(weight for _, weight in packed) > ring_speed * _WORTH_TREES
    return _HostPlan(tuple(single), exact, found, tuple(packed) if worth else (), limit)


def _plan_host(topology: Topology, gpus: tuple[int, ...], routes: Routes, best: Bound) -> Plan:
    loads = traffic.measure(topology, gpus, routes)
    found = _search_host(topology, loads, routes, best)
    planned = rings.finished(topology, loads, found.rings)
    pack = forest.finished(topology, loads, found.trees)
    ring_speed = sum(ring.bandwidth_gb_per_s for ring in planned)
    speed = max(ring_speed, sum(tree.bandwidth_gb_per_s for tree in pack))
    reachable = min(found.reachable, best.bandwidth_gb_per_s)
    order = tuple(gpus[stop] for stop in found.single)
    return Plan(
        gpus,
        order,
        planned,
        pack,
        trees.plan_pair(topology, [order], routes),
        None,
        "trees" if pack else "rings",
        speed,
        best.bandwidth_gb_per_s,
        max(reachable, speed),
        found.exact,
        _why(topology, gpus, ring_speed, reachable, best, routes),
    )


def _least_cut(topology: Topology, gpus: Sequence[int], routes: Routes) -> tuple[float, list[int]]:
    names = {topology.gpu(gpu).id: gpu for gpu in gpus}
    cut, side = bounds.least_cut(bounds.usable_links(topology, gpus, routes), list(names))
    return cut, sorted(names[id] for id in side)


def _why(
    topology: Topology, gpus: Sequence[int], speed: float, reachable: float, best: Bound, routes: Routes
) -> str:
    """What keeps rings under 0.9 of the bound, in words."""
    if speed >= 0.9 * best.bandwidth_gb_per_s:
        return ""
    cut, group = _least_cut(topology, gpus, routes)
    factor = rings.hop_factor(len(gpus))
    if cut * factor < 0.9 * best.bandwidth_gb_per_s:
        return (
            f"every ring crosses between GPUs {group} and the rest ({cut:g} GB/s) with {1 / factor:.2f} "
            "of the message each way; trees cross with 1"
        )
    if reachable < 0.9 * best.bandwidth_gb_per_s:
        return (
            "the bound counts PCIe beside the fast links, and messages between linked GPUs do not take it: "
            f"no schedule on the hardware's routes has more than {reachable:.1f} GB/s"
        )
    return "the links do not divide into rings that use all of each; trees use them more evenly"


# -- several hosts


def _by_host(topology: Topology, gpus: Sequence[int], routes: Routes) -> dict[int, list[int]]:
    """GPUs by host; hosts below the same switches next to each other, otherwise by number."""
    found: dict[int, list[int]] = {}
    for gpu in gpus:
        found.setdefault(topology.gpu(gpu).host, []).append(gpu)
    if len(found) == 1:
        return found
    first_seen: dict[tuple[str, ...], int] = {}
    for host in sorted(found):
        first_seen.setdefault(routes.leaves(host), host)
    ordered = sorted(found, key=lambda host: (first_seen[routes.leaves(host)], host))
    return {host: found[host] for host in ordered}


@dataclass(slots=True)
class _HostPlans:
    """The plans of a cluster's hosts: one search for each shape, then the same by position."""

    chains: list[tuple[int, ...]] = field(default_factory=list)
    rings: list[tuple[hierarchy.SharedRing, ...]] = field(default_factory=list)
    trees: list[tuple[hierarchy.SharedTree, ...]] = field(default_factory=list)
    exact: bool = True

    def add(self, members: Sequence[int], found: _HostPlan) -> None:
        self.chains.append(tuple(members[stop] for stop in found.single))
        total = sum(rate for _, rate in found.rings)
        self.rings.append(
            tuple((tuple(members[stop] for stop in order), rate / total) for order, rate in found.rings)
        )
        weight = sum(rate for _, rate in found.trees)
        self.trees.append(
            tuple(
                (tuple((members[i], members[j]) for i, j in edges), rate / weight)
                for edges, rate in found.trees
            )
        )
        self.exact = self.exact and found.exact


def _plan_cluster(
    topology: Topology, gpus: tuple[int, ...], hosts: dict[int, list[int]], routes: Routes, best: Bound
) -> Plan:
    shapes: dict[tuple, _HostPlan] = {}
    local = _HostPlans()
    for host, members in hosts.items():
        key = (id(routes.shape(host)), routes.positions(members))
        if key not in shapes:
            shapes[key] = _search_shape(topology, members, routes)
        local.add(members, shapes[key])
    flat = hierarchy.plan_flat_rings(topology, local.chains, routes)
    levels = [hierarchy.plan_with_rings(topology, local.chains, local.rings, routes)]
    if all(local.trees):
        levels.append(hierarchy.plan_with_trees(topology, local.chains, local.trees, routes))
    two_level = max((plan for plan in levels if plan), key=lambda plan: plan.bandwidth_gb_per_s, default=None)
    ring_speed = sum(ring.bandwidth_gb_per_s for ring in flat)
    level_speed = two_level.bandwidth_gb_per_s if two_level else 0.0
    # Nearly equal bandwidth goes to the hierarchy: its steps grow with the hosts plus the GPUs of one, not
    # with their product.
    method = "hierarchy" if level_speed >= 0.95 * ring_speed else "rings"
    speed = level_speed if method == "hierarchy" else ring_speed
    pack, reachable = _cluster_trees(topology, gpus, routes, best, speed)
    if pack:
        method, speed = "trees", sum(tree.bandwidth_gb_per_s for tree in pack)
    why = ""
    if ring_speed < 0.9 * best.bandwidth_gb_per_s:
        why = (
            f"a ring over all sends 2 (n - 1) / n of the message over {flat[0].bottleneck}; "
            "levels and trees send less there"
        )
    return Plan(
        gpus,
        tuple(gpu for chain in local.chains for gpu in chain),
        flat,
        pack,
        trees.plan_pair(topology, local.chains, routes),
        two_level,
        method,
        speed,
        best.bandwidth_gb_per_s,
        max(reachable, speed),
        local.exact,
        why,
    )


def _cluster_trees(
    topology: Topology, gpus: tuple[int, ...], routes: Routes, best: Bound, speed: float
) -> tuple[tuple[Tree, ...], float]:
    """Trees over a small cluster as a whole, where levels stay clearly below the bound; and the reachable."""
    if len(gpus) > bounds.EXACT_UP_TO or speed * _WORTH_TREES >= best.bandwidth_gb_per_s:
        return (), best.bandwidth_gb_per_s
    loads = traffic.measure(topology, gpus, routes)
    packed, limit = forest.pack_trees(loads)
    reachable = min(limit, best.bandwidth_gb_per_s)
    if sum(weight for _, weight in packed) <= speed * _WORTH_TREES:
        return (), reachable
    return forest.finished(topology, loads, packed), reachable


def _search_shape(topology: Topology, members: Sequence[int], routes: Routes) -> _HostPlan:
    if len(members) == 1:
        return _HostPlan((0,), True, (((0,), 1.0),))
    loads = traffic.measure(topology, members, routes)
    return _search_host(topology, loads, routes, bound(topology, members, routes=routes))


def crossings(topology: Topology, order: Sequence[int], kind: LinkKind) -> int:
    """How many hops of a ring order go over a link of a kind.

    Args:
        topology: The machine.
        order: GPU indices in ring order.
        kind: ``SOCKET`` for hops between NUMA nodes, ``PCIE`` for hops that NVLink does not carry,
            ``NETWORK`` for hops between hosts.
    """
    routes = Routes(topology)
    hops = zip(order, [*order[1:], order[0]], strict=True) if len(order) > 1 else ()
    return sum(any(topology.links_of(u)[v].kind is kind for (u, v), _ in routes.route(a, b)) for a, b in hops)
