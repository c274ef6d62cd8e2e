"""The links that messages between GPUs of a topology take, for many messages at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from flagcx.cost.links import Flows, Links
from flagcx.errors import TopologyError
from flagcx.topology import DeviceKind, Topology
from flagcx.topology.routes import Edge, Routes

_SAME, _ACROSS = -3, -4
"""How messages between hosts go: over the leaf that both ends are on, or over the switch above two leaves."""


class TopologyRoutes:
    """Routes of many messages at once; those within a host are found once for all hosts of the same shape.

    Args:
        topology: A machine or cluster.
        gpus: The GPU of each rank.

    Attributes:
        links: The links that messages came to need so far.
    """

    def __init__(self, topology: Topology, gpus: Sequence[int]) -> None:
        self.topology, self.routes, self.gpus = topology, Routes(topology), gpus
        self.links = Links()
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
        self._nics, self._nic_names = self._find_nics()

    def _add(self, edges: Sequence[Edge]) -> int:
        """Adds links of one kind, and gives the number of the first."""
        links = [self.topology.links_of(a)[b] for a, b in edges]
        speed = np.array([link.bandwidth_gb_per_s for link in links])
        latency = np.array([link.latency_us for link in links])
        return self.links.add(len(edges), links[0].kind.value, edges.__getitem__, speed, latency)

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
        """The latencies of a route's links; parallel links count once."""
        if not len(link):
            return np.zeros(len(first) - 1)
        return np.add.reduceat(self.links.latency_us[link] * share, first[:-1])

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
            found = self._columns[shape, u, v] = np.full(len(self.members), -1, np.int64)
            hosts = np.flatnonzero(self.shape_of_host == shape)
            found[hosts] = self._add_alike(hosts, u, v) + np.arange(len(hosts))
        return found

    def _add_alike(self, hosts: np.ndarray, u: int, v: int) -> int:
        """Adds one link in each of several hosts of a shape, where they are alike."""

        def ends(number: int) -> Edge:
            names = self.members[hosts[number]]
            return names[u], names[v]

        a, b = ends(0)
        link = self.topology.links_of(a)[b]
        facts = (link.bandwidth_gb_per_s, link.latency_us)
        return self.links.add(len(hosts), link.kind.value, ends, *facts)

    # -- between hosts

    def _number(self, edge: Edge) -> int:
        """The number of a link between two switches, or of a NIC that hangs on several."""
        if edge not in self._numbers:
            self._numbers[edge] = self._add([edge])
        return self._numbers[edge]

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
                columns += [np.full(len(rows), self._number(edge)) for edge in pairwise(middle)]
                columns.append(self._ends(peers, middle[-1], False))
            columns += [
                self._column(other, v, u)[self.host[peers]] for u, v in reversed(list(pairwise(into)))
            ]
            yield rows, np.stack(columns, axis=1), 1.0

    @cached_property
    def _leaves(self) -> list[str]:
        """The switch of each number of ``_places`` where there is one alone; else "", as for no NIC."""
        return [*(switches[0] if len(switches) == 1 else "" for switches in self._known_places), ""]

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
        known, nics = self._end_links[leaving], self._nics[ranks]
        fresh = np.unique(nics[known[nics] < 0])
        if len(fresh):
            ends = [(self._nic_names[nic], self._leaves[self._places[nic]]) for nic in fresh.tolist()]
            edges = ends if leaving else [(leaf, nic) for nic, leaf in ends]
            known[fresh] = self._add(edges) + np.arange(len(fresh))
        return known[nics]

    def _risen(self, ranks: np.ndarray, leaving: bool) -> np.ndarray:
        """The number of the link between each rank's leaf and the switch above it."""
        known, places = self._risen_links[leaving], self._switches[ranks]
        for place in np.unique(places[known[places] < 0]).tolist():
            leaf = self._leaves[place]
            above = self._above(leaf)[0]
            known[place] = self._number((leaf, above) if leaving else (above, leaf))
        return known[places]

    @cached_property
    def _end_links(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(self._nic_names), -1), np.full(len(self._nic_names), -1)

    @cached_property
    def _risen_links(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(self._leaves), -1), np.full(len(self._leaves), -1)

    @cached_property
    def _switches(self) -> np.ndarray:
        """For each rank a number for the switches that its NIC is linked to; -1 without a NIC."""
        return np.where(self._nics < 0, -1, np.append(self._places, -1)[self._nics])

    @cached_property
    def _places(self) -> np.ndarray:
        """For each NIC a number for the switches that it is linked to."""
        known: dict[tuple[str, ...], int] = {}
        return np.array([known.setdefault(self._above(nic), len(known)) for nic in self._nic_names], np.int64)

    @cached_property
    def _known_places(self) -> list[tuple[str, ...]]:
        """The switches of each such number."""
        first = np.unique(self._places, return_index=True)[1].tolist()
        return [self._above(self._nic_names[nic]) for nic in first]

    def _find_nics(self) -> tuple[np.ndarray, list[str]]:
        """For each rank the number of its NIC, or -1; and the ids of the NICs."""
        place = np.full(len(self.gpus), -1, np.int64)
        for rows, (shape, gpu) in _groups(np.arange(len(self.gpus)), self.shape, self.position):
            nic = self.shapes[shape].nic(gpu)
            place[rows] = -1 if nic is None else nic
        width = max(map(len, self.members))
        codes, number = np.unique((self.host * width + place)[place >= 0], return_inverse=True)
        place[place >= 0] = number.ravel()
        return place, [self.members[code // width][code % width] for code in codes.tolist()]

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
        near, far = (self._switches_of(rank) for rank in (a, b))
        if len(near) != 1 or len(far) != 1:
            return None
        if near == far:
            return (near[0],)
        common = set(self._above(near[0])) & set(self._above(far[0]))
        direct = self.topology.link(near[0], far[0])
        return None if len(common) != 1 or direct is not None else (near[0], common.pop(), far[0])

    def _switches_of(self, rank: int) -> tuple[str, ...]:
        """The switches that the NIC of a rank is linked to; none where it has no NIC."""
        place = int(self._switches[rank])
        return self._known_places[place] if place >= 0 else ()

    def _above(self, id: str) -> tuple[str, ...]:
        """The switches of the network that a NIC or a switch is linked to."""
        around = self.topology.network_links_of(id)
        return tuple(o for o in around if self.topology.device(o).kind is DeviceKind.NETWORK_SWITCH)

    def _ends(self, ranks: np.ndarray, switch: str, leaving: bool) -> np.ndarray:
        """The number of the link between each rank's NIC and one of the switches that it hangs on."""
        if self._leaves[self._switches[ranks[0]]] == switch:
            return self._end(ranks, leaving)
        nics = [self._nic_names[nic] for nic in self._nics[ranks].tolist()]
        return np.array([self._number((nic, switch) if leaving else (switch, nic)) for nic in nics], np.int64)


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
