"""Plans the all-reduce that runs on GPUs along their links, and says how near it comes to the bound.

Calls follow one ring order: rings, chains and trees are laid along it, and ``algorithm="ring|ring"`` goes
round it both ways at once. Where links join every GPU to every other, as in a mesh of xGMI, a ring leaves
most of them idle; there ``algorithm="two_shot"`` lets every GPU exchange with every other at once.

A mesh with links between some pairs alone, and four times as many inside a module as outside it (8xmi250x),
has neither: one order uses two links of each GPU, and reaches 41 of the bound's 147 GB/s. RCCL's rings, of
two orders both ways, come to 82; 22 trees at once to the bound. A call runs two schedules at once at most.
Deterministic: the same topology and GPUs give the same plan on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

from flagcx.topology import speeds
from flagcx.topology.bounds import bound, nvls_bound
from flagcx.topology.graph import Graph, LinkKind
from flagcx.topology.loads import LoadedLink, add_loads, bottleneck, ring_hops
from flagcx.topology.orders import chosen, hop_factor, host_chains, ring_limits
from flagcx.topology.routes import Edge, Routes

#: Both ways round, or an exchange, are taken for more than this.
_WORTH_BOTH = 1.01
#: A plan that reaches this part of the bound needs no reason.
_NEAR = 0.9


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring order and its part of the message.

    Attributes:
        order: GPU indices; each sends to the next, the last to the first.
        bandwidth_gb_per_s: Algorithm bandwidth of its part, with all rings of the plan running.
        share: The part of the message it carries, 0 to 1.
        bottleneck: The link that limits it; None for a ring of one.
    """

    order: tuple[int, ...]
    bandwidth_gb_per_s: float
    share: float
    bottleneck: LoadedLink | None


class Exchange(NamedTuple):
    """Every GPU sends to every other at once: its parts of the message, and then its part of the sum.

    Attributes:
        bandwidth_gb_per_s: Algorithm bandwidth.
        bottleneck: The link that limits it.
    """

    bandwidth_gb_per_s: float
    bottleneck: LoadedLink


class PcieCase(NamedTuple):
    """What a plan comes to with one generation of PCIe; GB/s of algorithm bandwidth."""

    generation: int
    bandwidth_gb_per_s: float
    bound_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned all-reduce. Bandwidths are algorithm bandwidth: message bytes over time, for a large message.

    Attributes:
        gpus: The GPUs that take part, as they were given.
        rings: The ring along the planned order, or that and its reverse where both together are faster.
            Chains and trees follow the order also where an exchange is planned.
        bound_gb_per_s: No schedule on this graph has more whose switches neither add up nor multicast (see
            ``flagcx.topology.bounds``).
        exact: Whether no better single ring exists (exact search), as against a heuristic one.
        why: Why the rings stay under 0.9 of the bound; "" where they do not.
        nvls_bound_gb_per_s: The bound where NVSwitches add up and multicast; None where they can't.
        pcie_range: Where the generation of PCIe is not known and decides: what it comes to with generation 3
            and with generation 5.
        exchange: What is planned instead of the rings, where it is faster.
    """

    gpus: tuple[int, ...]
    rings: tuple[Ring, ...]
    bound_gb_per_s: float
    exact: bool
    why: str
    nvls_bound_gb_per_s: float | None = None
    pcie_range: tuple[PcieCase, PcieCase] | None = None
    exchange: Exchange | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """The ring order, from the first GPU that was given."""
        return self.rings[0].order

    @property
    def method(self) -> str:
        """The ``algorithm=`` that has this bandwidth: ``ring``, ``ring|ring`` (both ways), ``two_shot``."""
        if self.exchange is not None:
            return "two_shot"
        return "|".join("ring" for _ in self.rings)

    @property
    def bandwidth_gb_per_s(self) -> float:
        """Of the rings together, or of the exchange."""
        if self.exchange is not None:
            return self.exchange.bandwidth_gb_per_s
        return sum(ring.bandwidth_gb_per_s for ring in self.rings)

    @property
    def ratio(self) -> float:
        """Bandwidth over the bound, 0 to 1; 1 for one GPU."""
        return 1.0 if math.isinf(self.bound_gb_per_s) else self.bandwidth_gb_per_s / self.bound_gb_per_s


def make_plan(topology: Graph, gpus: Sequence[int] | None = None) -> Plan:
    """Plans an all-reduce.

    Args:
        topology: The machine or cluster.
        gpus: Indices of the GPUs that take part, each once; all by default.

    Raises:
        TopologyError: There is no GPU, one is unknown or named twice, or two cannot reach each other.

    Example:
        >>> from flagcx.topology import preset
        >>> plan = make_plan(preset("dgx-1v"))
        >>> plan.order, plan.method, round(plan.bandwidth_gb_per_s, 1)
        ((0, 3, 2, 1, 5, 6, 7, 4), 'ring|ring', 45.7)
    """
    members = chosen(topology, gpus)
    if len(members) == 1:
        return Plan(members, (Ring(members, math.inf, 1.0, None),), math.inf, True, "")
    routes = Routes(topology)
    chains, exact = host_chains(topology, members, routes)
    order = tuple(gpu for chain in chains for gpu in chain)
    rings = _rings(topology, order, routes)
    limit = bound(topology, members, routes=routes).bandwidth_gb_per_s
    plan = Plan(members, rings, limit, exact, "", nvls_bound(topology, members))
    exchange = _exchange(topology, members, routes) if len(chains) == 1 else None
    if exchange is not None and exchange.bandwidth_gb_per_s > _WORTH_BOTH * plan.bandwidth_gb_per_s:
        plan = replace(plan, exchange=exchange)
    else:
        plan = replace(plan, pcie_range=_pcie_range(topology, rings, limit))
    return plan if plan.ratio >= _NEAR else replace(plan, why=_why(plan))


def plan_rings(topology: Graph, gpus: Sequence[int] | None = None) -> tuple[Ring, ...]:
    """The planned rings, which run together; see ``make_plan``."""
    return make_plan(topology, gpus).rings


def _rings(topology: Graph, order: tuple[int, ...], routes: Routes) -> tuple[Ring, ...]:
    factor = hop_factor(len(order))
    (one,) = ring_limits(topology, [order], routes)
    orders = order, (order[0], *order[:0:-1])
    both = ring_limits(topology, orders, routes)
    rate = min(limit.rate_gb_per_s for limit in both)  # each carries half of the message
    if 2 * rate <= _WORTH_BOTH * one.rate_gb_per_s:
        return (Ring(order, one.rate_gb_per_s * factor, 1.0, one),)
    return tuple(Ring(o, rate * factor, 0.5, limit) for o, limit in zip(orders, both, strict=True))


def _exchange(topology: Graph, gpus: Sequence[int], routes: Routes) -> Exchange | None:
    """An exchange of all with all, where the GPUs' own fabric joins every two; None elsewhere."""
    pairs = list(permutations(gpus, 2))
    ends = [(topology.gpu(a).id, topology.gpu(b).id) for a, b in pairs]
    if not all((link := topology.link(a, b)) is not None and link.kind.is_gpu_fabric for a, b in ends):
        return None
    loads: dict[Edge, float] = {}
    add_loads(loads, routes, pairs, 2 / len(gpus))
    limit = bottleneck(topology, loads)
    return Exchange(limit.rate_gb_per_s, limit)


def _pcie_range(topology: Graph, rings: Sequence[Ring], limit: float) -> tuple[PcieCase, PcieCase] | None:
    """The rings and the bound with PCIe 3 and 5, where no link's generation is known and that matters."""
    pcie = [link for link in topology.links if link.kind is LinkKind.PCIE]
    if not pcie or not all(link.assumed for link in pcie):
        return None
    cases = []
    for generation, gt in ((3, 8.0), (5, 32.0)):
        speed = speeds.pcie_gb_per_s(gt)
        links = [
            replace(link, bandwidth_gb_per_s=speed)
            if link.kind is LinkKind.PCIE and link.bandwidth_gb_per_s < speeds.UNBOUND_GB_PER_S
            else link
            for link in topology.links
        ]
        other = Graph(topology.devices(), links)
        routes, orders = Routes(other), [ring.order for ring in rings]
        rate = min(link.rate_gb_per_s for link in ring_limits(other, orders, routes))
        carried = rate * len(rings) * hop_factor(len(rings[0].order))
        cases.append(
            PcieCase(generation, carried, bound(other, rings[0].order, routes=routes).bandwidth_gb_per_s)
        )
    slow, fast = cases
    return (slow, fast) if slow[1:] != fast[1:] else None


def _why(plan: Plan) -> str:
    """The reason why the plan stays under the bound, in words."""
    if plan.exchange is not None:
        return f"all wait for {plan.exchange.bottleneck}; in the bound all links share the work"
    ring, count = plan.rings[0], len(plan.gpus)
    return (
        f"each hop of a ring carries {2 * (count - 1) / count:.2f} of the ring's part of the message, and "
        f"all wait for {ring.bottleneck}; in the bound all links share the work"
    )


def crossings(topology: Graph, order: Sequence[int], kind: LinkKind) -> int:
    """How many hops of a ring order go over a link of a kind.

    Args:
        topology: The machine.
        order: GPU indices in ring order.
        kind: ``SOCKET`` for hops between NUMA nodes, ``PCIE`` for hops that NVLink does not carry,
            ``NETWORK`` for hops between hosts.
    """
    routes = Routes(topology)
    return sum(
        any(topology.links_of(u)[v].kind is kind for (u, v), _ in routes.route(a, b))
        for a, b in ring_hops(order)
    )
