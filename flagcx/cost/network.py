"""Networks: links with a latency and a bandwidth, shared by the messages that go over them at once.

A network numbers its directed links as messages come to need them, and finds for many messages at once which
links each takes. ``uniform`` joins every pair of ranks alike; ``over`` follows a topology.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from flagcx.cost.column import Column
from flagcx.errors import ArgumentError, TopologyError
from flagcx.topology import DeviceKind, LinkKind, Topology
from flagcx.topology.routes import Edge, Routes


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """The routes of some messages, one after the other.

    Attributes:
        first: Where the links of each message begin in ``link``, int64 of shape (messages + 1,).
        link: Numbers of links.
        share: The part of the message that goes over each of them.
        latency_us: Of each message, one way.
    """

    first: np.ndarray
    link: np.ndarray
    share: np.ndarray
    latency_us: np.ndarray


_SAME, _ACROSS = -3, -4
"""How messages between hosts go: over the leaf that both ends are on, or over the switch above two leaves."""


class Network:
    """Links between ranks.

    Args:
        size: Number of ranks.
        find: (source, target) -> Flows, for arrays of ranks. It numbers the links that it meets first.
        names: By link, the ids of its ends; ``find`` appends to it.
        kinds: By link, its kind.
        bandwidths: By link, 10^9 bytes a second.
    """

    def __init__(
        self,
        size: int,
        find: Callable[[np.ndarray, np.ndarray], Flows],
        names: list[Edge],
        kinds: list[str],
        bandwidths: list[float],
    ) -> None:
        self.size, self.find = size, find
        self.names, self.kinds, self._bandwidths = names, kinds, Column(bandwidths)

    @property
    def links(self) -> int:
        """How many links have been numbered."""
        return len(self.names)

    @property
    def bandwidth_gb_per_s(self) -> np.ndarray:
        """Of each link, float64 of shape (links,)."""
        return self._bandwidths.array()


def uniform(size: int, latency_us: float, bandwidth_gb_per_s: float, *, ports: bool = False) -> Network:
    """Every rank joined to every other alike.

    Args:
        size: Number of ranks.
        latency_us: One way.
        bandwidth_gb_per_s: In each direction.
        ports: Whether all that a rank sends shares one link, and all that it receives another, as below a
            switch; otherwise each pair of ranks has links of its own, and nothing is shared.

    Raises:
        ArgumentError: A number is out of range.
    """
    if size < 1 or latency_us < 0 or not bandwidth_gb_per_s > 0:
        raise ArgumentError(
            f"a network of {size} ranks with {latency_us} us and {bandwidth_gb_per_s} GB/s; expected at "
            "least one rank, no negative latency and a bandwidth above 0"
        )
    names: list[Edge] = []
    kinds: list[str] = []
    speeds: list[float] = []
    known: dict[int, int] = {}

    def number(codes: np.ndarray, name: Callable[[int], Edge]) -> np.ndarray:
        found, inverse = np.unique(codes, return_inverse=True)
        for code in found.tolist():
            if code not in known:
                known[code] = len(names)
                names.append(name(code))
                kinds.append("link")
                speeds.append(bandwidth_gb_per_s)
        return np.array([known[code] for code in found.tolist()], np.int64)[inverse.ravel()]

    def find(source: np.ndarray, target: np.ndarray) -> Flows:
        count = len(source)
        if ports:
            out = number(source, lambda r: (f"rank{r}", "switch"))
            back = number(target + size, lambda r: ("switch", f"rank{r - size}"))
            link = np.stack([out, back], axis=1).ravel()
        else:
            link = number(source * size + target, lambda c: (f"rank{c // size}", f"rank{c % size}"))
        width = 2 if ports else 1
        return Flows(
            np.arange(count + 1) * width, link, np.ones(len(link)), np.full(count, float(latency_us))
        )

    return Network(size, find, names, kinds, speeds)


def over(
    topology: Topology,
    gpus: Sequence[int] | None = None,
    *,
    efficiency: Mapping[LinkKind, float] | None = None,
    added_latency_us: Mapping[LinkKind, float] | None = None,
) -> Network:
    """The routes of messages in a topology; see ``flagcx.topology.routes``.

    Args:
        topology: A machine or cluster.
        gpus: The GPU of each rank; all by index by default.
        efficiency: The part of a link's bandwidth that a transfer reaches, by kind of link; 1 by default.
        added_latency_us: The time that a message over a link of that kind takes beyond the latency of its
            links; of several kinds the greatest counts.

    Raises:
        ArgumentError: An efficiency is not above 0.
        TopologyError: A GPU is unknown or named twice.
    """
    chosen = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
    if not chosen or len(set(chosen)) < len(chosen):
        raise TopologyError(f"{len(chosen)} ranks on the GPUs {chosen[:16]}; expected one GPU for each rank")
    factors = dict(efficiency or {})
    if any(not factor > 0 for factor in factors.values()):
        raise ArgumentError(f"efficiencies {factors}; expected numbers above 0")
    routes = _TopologyRoutes(topology, chosen, factors, dict(added_latency_us or {}))
    return Network(len(chosen), routes.find, routes.names, routes.kinds, routes.bandwidths)


class _TopologyRoutes:
    """Routes of many messages at once; those within a host are found once for all hosts of the same shape."""

    def __init__(self, topology, gpus, efficiency, added) -> None:
        self.topology, self.routes, self.gpus = topology, Routes(topology), gpus
        self.efficiency, self.added = efficiency, added
        self.names: list[Edge] = []
        self.kinds: list[str] = []
        self.bandwidths: list[float] = []
        self.latencies: list[float] = []
        self.extra: list[float] = []
        self._latency_column, self._extra_column = Column(self.latencies), Column(self.extra)
        self._numbers: dict[Edge, int] = {}
        self._columns: dict[tuple[int, int, int], np.ndarray] = {}
        self._middles: dict[tuple[int, int], tuple[str, ...]] = {}
        numbers: dict[int, int] = {}  # by domain: a host, or those that share NVSwitches
        self.host = np.array(
            [numbers.setdefault(self.routes.domain(g), len(numbers)) for g in gpus], np.int64
        )
        self.position = np.array(self.routes.positions(gpus), np.int64)
        self.members = [self.routes.members(domain) for domain in numbers]
        shapes = [self.routes.shape(domain) for domain in numbers]
        unique = {id(shape): shape for shape in shapes}
        self.shapes = list(unique.values())
        order = {key: number for number, key in enumerate(unique)}
        self.shape_of_host = np.array([order[id(shape)] for shape in shapes], np.int64)
        self.shape = self.shape_of_host[self.host]

    def number(self, edge: Edge) -> int:
        found = self._numbers.get(edge)
        if found is None:
            link = self.topology.links_of(edge[0])[edge[1]]
            found = self._numbers[edge] = len(self.names)
            self.names.append(edge)
            self.kinds.append(link.kind.value)
            self.bandwidths.append(link.bandwidth_gb_per_s * self.efficiency.get(link.kind, 1.0))
            self.latencies.append(link.latency_us)
            self.extra.append(self.added.get(link.kind, 0.0))
        return found

    def find(self, source: np.ndarray, target: np.ndarray) -> Flows:
        """The flows of messages: one table of links for each kind of route, put in the messages' order."""
        parts = [*self._inside(source, target), *self._between(source, target)]
        length = np.zeros(len(source), np.int64)
        for rows, links, _ in parts:
            length[rows] = links.shape[1]
        first = np.concatenate([[0], np.cumsum(length)])
        link, share = np.zeros(first[-1], np.int64), np.ones(first[-1])
        for rows, links, shares in parts:
            at = first[rows][:, None] + np.arange(links.shape[1])
            link[at], share[at] = links, shares
        return Flows(first, link, share, self._latency(first, link, share))

    def _latency(self, first: np.ndarray, link: np.ndarray, share: np.ndarray) -> np.ndarray:
        """The latencies of a route's links (parallel links count once), and the dearest kind's addition."""
        if not len(link):
            return np.zeros(len(first) - 1)
        along = np.add.reduceat(self._latency_column.array()[link] * share, first[:-1])
        return along + np.maximum.reduceat(self._extra_column.array()[link], first[:-1])

    # -- within hosts

    def _inside(self, source, target):
        here = np.flatnonzero(self.host[source] == self.host[target])
        for rows, (shape, a, b) in _groups(
            here, self.shape[source], self.position[source], self.position[target]
        ):
            steps = self.shapes[shape].route(a, b)
            if steps is None:
                lost = int(source[rows[0]]), int(target[rows[0]])
                raise TopologyError(f"no way from rank {lost[0]} to rank {lost[1]} in {self.topology!r}")
            hosts = self.host[source[rows]]
            links = np.stack([self._column(shape, u, v)[hosts] for u, v, _ in steps], axis=1)
            yield rows, links, np.array([part for _, _, part in steps])

    def _column(self, shape: int, u: int, v: int) -> np.ndarray:
        """The number of one link, given by position, in every host of a shape."""
        found = self._columns.get((shape, u, v))
        if found is None:
            found = np.full(len(self.members), -1, np.int64)
            for host in np.flatnonzero(self.shape_of_host == shape):
                names = self.members[host]
                found[host] = self.number((names[u], names[v]))
            self._columns[shape, u, v] = found
        return found

    # -- between hosts

    def _between(self, source, target):
        far = np.flatnonzero(self.host[source] != self.host[target])
        if not len(far):
            return
        near, back = self._switches[source], self._switches[target]
        above = self._above_leaf
        alone = (above[near] >= 0) & (above[near] == above[back])
        joint = np.where(alone, np.where(near == back, _SAME, _ACROSS), near)
        keys = (self.shape[source], self.position[source], joint, self.shape[target], self.position[target])
        for rows, (shape, a, way, other, b, _) in _groups(far, *keys, np.where(alone, joint, back)):
            ranks, peers = source[rows], target[rows]
            out, into = self._to_nic(shape, a), self._to_nic(other, b)
            columns = [self._column(shape, u, v)[self.host[ranks]] for u, v in pairwise(out)]
            if way < 0:
                columns.append(self._end(ranks, True))
                if way == _ACROSS:
                    columns += [self._risen(ranks, True), self._risen(peers, False)]
                columns.append(self._end(peers, False))
            else:
                first, last = int(ranks[0]), int(peers[0])
                places = int(self._switches[first]), int(self._switches[last])
                middle = self._middle(*places, first, last, len(out), len(into))
                columns.append(self._ends(ranks, middle[0], True))
                columns += [np.full(len(rows), self.number(edge)) for edge in pairwise(middle)]
                columns.append(self._ends(peers, middle[-1], False))
            columns += [
                self._column(other, v, u)[self.host[peers]] for u, v in reversed(list(pairwise(into)))
            ]
            yield rows, np.stack(columns, axis=1), 1.0

    @cached_property
    def _leaves(self) -> list[str]:
        """The switch of each number of ``_switches`` where there is one alone; else ""."""
        found = [""] * (int(self._switches.max()) + 2)
        for number, rank in zip(*np.unique(self._switches, return_index=True), strict=True):
            above = self._above(self._nics[rank])
            found[number] = above[0] if len(above) == 1 else ""
        return found

    @cached_property
    def _above_leaf(self) -> np.ndarray:
        """A number for the one switch above each leaf; of its own, and negative, where there is none such."""
        known: dict[str, int] = {}
        found = -2 - np.arange(len(self._leaves))
        for number, leaf in enumerate(self._leaves):
            above = self._above(leaf) if leaf else ()
            if len(above) == 1:
                found[number] = known.setdefault(above[0], len(known))
        return found

    def _end(self, ranks: np.ndarray, leaving: bool) -> np.ndarray:
        """The number of the link between each rank's NIC and its leaf."""
        known = self._end_links[leaving]
        for rank in np.unique(ranks[known[ranks] < 0]).tolist():
            nic, leaf = self._nics[rank], self._leaves[self._switches[rank]]
            known[rank] = self.number((nic, leaf) if leaving else (leaf, nic))
        return known[ranks]

    def _risen(self, ranks: np.ndarray, leaving: bool) -> np.ndarray:
        """The number of the link between each rank's leaf and the switch above it."""
        known, places = self._risen_links[leaving], self._switches[ranks]
        for place in np.unique(places[known[places] < 0]).tolist():
            leaf = self._leaves[place]
            above = self._above(leaf)[0]
            known[place] = self.number((leaf, above) if leaving else (above, leaf))
        return known[places]

    @cached_property
    def _end_links(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(self.gpus), -1), np.full(len(self.gpus), -1)

    @cached_property
    def _risen_links(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(self._leaves), -1), np.full(len(self._leaves), -1)

    @cached_property
    def _switches(self) -> np.ndarray:
        """For each rank a number for the switches that its NIC is linked to; -1 without a NIC."""
        known: dict[tuple[str, ...], int] = {}
        return np.array(
            [-1 if nic is None else known.setdefault(self._above(nic), len(known)) for nic in self._nics],
            np.int64,
        )

    @cached_property
    def _nics(self) -> list[str | None]:
        """The NIC of each rank, or None."""
        places = (
            self.shapes[shape].nic(int(at)) for shape, at in zip(self.shape, self.position, strict=True)
        )
        return [
            None if place is None else self.members[host][place]
            for host, place in zip(self.host, places, strict=True)
        ]

    def _to_nic(self, shape: int, gpu: int) -> tuple[int, ...]:
        """Positions on the route from a GPU to its NIC; the GPU's alone where it has none."""
        nic = self.shapes[shape].nic(gpu)
        steps = (self.shapes[shape].route(gpu, nic) or []) if nic is not None else []
        return gpu, *(v for _, v, _ in steps)

    def _middle(self, near: int, far: int, a: int, b: int, out: int, into: int) -> tuple[str, ...]:
        """The switches between two NICs; a and b are ranks whose NICs have the same switches as these."""
        if (near, far) not in self._middles:
            middle = self._meeting(a, b)
            if middle is None:
                edges = self.routes.route(self.gpus[a], self.gpus[b])
                ids = [edge[0] for edge, _ in edges] + [edges[-1][0][1]]
                middle = tuple(ids[out : len(ids) - into])
            self._middles[near, far] = middle
        return self._middles[near, far]

    def _meeting(self, a: int, b: int) -> tuple[str, ...] | None:
        """The switches between the NICs of two ranks where there is one shortest route, as in a fat tree."""
        near, far = (self._above(self._nics[rank]) for rank in (a, b))
        if len(near) != 1 or len(far) != 1:
            return None
        if near == far:
            return (near[0],)
        common = set(self._above(near[0])) & set(self._above(far[0]))
        direct = self.topology.link(near[0], far[0])
        return None if len(common) != 1 or direct is not None else (near[0], common.pop(), far[0])

    def _above(self, id: str | None) -> tuple[str, ...]:
        """The switches of the network that a NIC or a switch is linked to."""
        around = {} if id is None else self.topology.links_of(id)
        return tuple(
            other
            for other, link in around.items()
            if link.kind is LinkKind.NETWORK and self.topology.device(other).kind is DeviceKind.NETWORK_SWITCH
        )

    def _ends(self, ranks: np.ndarray, switch: str, leaving: bool) -> np.ndarray:
        nics = [self._nics[rank] for rank in ranks.tolist()]
        return np.array([self.number((nic, switch) if leaving else (switch, nic)) for nic in nics], np.int64)


def _groups(rows: np.ndarray, *keys: np.ndarray):
    """Rows with equal keys together: yields (rows, the keys)."""
    if not len(rows):
        return
    table = np.stack([key[rows] for key in keys])
    order = np.lexsort(table)
    rows, table = rows[order], table[:, order]
    starts = np.flatnonzero(np.any(table[:, 1:] != table[:, :-1], axis=0)) + 1
    for part, column in zip(np.split(rows, starts), np.split(table, starts, axis=1), strict=True):
        yield part, tuple(int(value) for value in column[:, 0])
