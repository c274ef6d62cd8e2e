"""The links that a message from one GPU to another loads, and by how much.

A route is the one that the hardware takes, whatever a planner would like: NVLink where it joins the two GPUs
(spread over all NVSwitches they share), else PCIe within a host, else from the sender's NIC over the network
to the receiver's. A planner chooses the pairs; this module gives their routes.

Hosts whose GPUs share NVSwitches (the trays of an NVL72) are one *domain*; every other host is one by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from flagcx.errors import TopologyError
from flagcx.topology import paths
from flagcx.topology.graph import Device, DeviceKind, Graph

#: A directed use of a link: (id it leaves, id it enters).
Edge = tuple[str, str]
#: Edges a message takes, each with the part of the message that goes over it.
Route = tuple[tuple[Edge, float], ...]


class Routes:
    """Routes between the GPUs of a topology, found once for each shape of domain.

    Args:
        topology: The machine or cluster.

    Example:
        >>> from flagcx.topology import preset
        >>> Routes(preset("8xa100-pcie")).route(0, 1)
        ((('gpu0', 'gpu1'), 1.0),)
    """

    def __init__(self, topology: Graph) -> None:
        self.topology = topology
        self._domains, switches = _domains(topology)
        self._members: dict[int, list[Device]] = {}
        for host in topology.hosts:
            self._members.setdefault(self._domains.get(host, host), []).extend(topology.devices(host=host))
        for device in topology.devices(host=-1):
            self._members.setdefault(switches.get(device.id, -1), []).append(device)
        self._position = {
            device.id: position
            for members in self._members.values()
            for position, device in enumerate(members)
        }
        self._shape_of: dict[int, _Shape] = {}
        self._shapes: dict[tuple, _Shape] = {}
        self._network: dict[tuple[str, str], list[str] | None] = {}
        self._nics: dict[int, tuple[str, ...]] = {}

    def route(self, a: int, b: int) -> Route:
        """The edges a message from GPU ``a`` to GPU ``b`` takes.

        Args:
            a: Index of the sender.
            b: Index of the receiver.

        Raises:
            TopologyError: A GPU is unknown, or no path joins the two.
        """
        first, second = self.topology.gpu(a), self.topology.gpu(b)
        domain = self.domain(a)
        if domain != self.domain(b):
            return self._between_hosts(first, second)
        names = self._members[domain]
        steps = self.shape(domain).route(self._position[first.id], self._position[second.id])
        if steps is None and first.host != second.host:
            return self._between_hosts(first, second)
        if steps is None:
            raise TopologyError(
                f"no path from {first.id} to {second.id} in {self.topology!r}: neither NVLink nor PCIe"
            )
        return tuple(((names[u].id, names[v].id), share) for u, v, share in steps)

    def domain(self, gpu: int) -> int:
        """The domain of a GPU: the number of the first of its hosts."""
        host = self.topology.gpu(gpu).host
        return self._domains.get(host, host)

    def members(self, domain: int) -> list[str]:
        """Ids of a domain's devices, by position."""
        return [device.id for device in self._members[domain]]

    def nic(self, gpu: int) -> str | None:
        """Id of the NIC that a GPU sends to other hosts through, or None."""
        domain = self.domain(gpu)
        position = self.shape(domain).nic(self._position[self.topology.gpu(gpu).id])
        return None if position is None else self._members[domain][position].id

    def to_nic(self, gpu: int) -> list[str]:
        """The ids on the path from a GPU to its NIC, both included; the GPU alone where it has none."""
        device, nic = self.topology.gpu(gpu), self.nic(gpu)
        if nic is None:
            return [device.id]
        domain = self.domain(gpu)
        members = self._members[domain]
        steps = self.shape(domain).route(self._position[device.id], self._position[nic]) or []
        return [device.id, *(members[v].id for _, v, _ in steps)]

    def leaves(self, domain: int) -> tuple[str, ...]:
        """Ids of the switches that the NICs of a domain's GPUs hang on."""
        return tuple(sorted({id for nic in self.nics(domain) for id in self.topology.network_links_of(nic)}))

    def nics(self, domain: int) -> tuple[str, ...]:
        """Ids of the NICs that the GPUs of a domain use."""
        if domain not in self._nics:
            gpus = [device.index for device in self._members[domain] if device.kind is DeviceKind.GPU]
            self._nics[domain] = tuple(sorted({nic for gpu in gpus if (nic := self.nic(gpu)) is not None}))
        return self._nics[domain]

    def shape(self, domain: int) -> _Shape:
        """The shape of a domain; equal domains share one."""
        found = self._shape_of.get(domain)
        if found is None:
            members = self._members[domain]
            key = _fingerprint(self.topology, members, self._position)
            if key not in self._shapes:
                self._shapes[key] = _Shape(self.topology, members)
            found = self._shape_of[domain] = self._shapes[key]
        return found

    def shape_key(self, gpus: Sequence[int]) -> tuple:
        """Equal for GPUs of one domain and the corresponding GPUs of an equal domain."""
        return id(self.shape(self.domain(gpus[0]))), *self.positions(gpus)

    def positions(self, gpus: Sequence[int]) -> tuple[int, ...]:
        """Where GPUs stand in their domain's devices: equal for corresponding GPUs of equal domains."""
        return tuple(self._position[self.topology.gpu(gpu).id] for gpu in gpus)

    def _between_hosts(self, first: Device, second: Device) -> Route:
        near, far = self.nic(first.index), self.nic(second.index)
        if near is None or far is None:
            lonely = first if near is None else second
            raise TopologyError(
                f"{lonely.id} has no NIC that is joined to the network, so no path to another host"
            )
        middle = self._over_network(near, far)
        if middle is None:
            raise TopologyError(f"no switch joins {near} and {far}, so {first.id} cannot reach {second.id}")
        out, back = self.to_nic(first.index), self.to_nic(second.index)
        path = [*out[:-1], *middle, *reversed(back[:-1])]
        return tuple(((u, v), 1.0) for u, v in itertools.pairwise(path))

    def _over_network(self, a: str, b: str) -> list[str] | None:
        """The path between two NICs; the part between two switches is found once."""
        shared = [id for id in self.topology.network_links_of(a) if id in self.topology.links_of(b)]
        if shared:
            return [a, shared[0], b]
        for first in self.topology.network_links_of(a):
            for second in self.topology.network_links_of(b):
                if (first, second) not in self._network:
                    self._network[first, second] = paths.network_path(self.topology, first, second)
                if (path := self._network[first, second]) is not None:
                    return [a, *path, b]
        return None


class _Shape:
    """Routes by position, the same in all hosts of one build; found in the first of them."""

    def __init__(self, topology: Graph, members: Sequence[Device]) -> None:
        self._topology, self._members = topology, members
        self._position = {device.id: position for position, device in enumerate(members)}
        self._routes: dict[tuple[int, int], list[tuple[int, int, float]] | None] = {}
        self._nics: dict[int, int | None] = {}

    def route(self, a: int, b: int) -> list[tuple[int, int, float]] | None:
        """(From, to, part of the message) for each link of the route; None where there is none."""
        low, high = min(a, b), max(a, b)
        if (low, high) not in self._routes:
            place = self._position
            path = _local_route(self._topology, self._members[low].id, self._members[high].id)
            steps = None if path is None else [(place[u], place[v], share) for (u, v), share in path]
            self._routes[low, high] = steps
        steps = self._routes[low, high]
        if steps is None or a < b:
            return steps
        return [(v, u, share) for u, v, share in reversed(steps)]

    def nic(self, gpu: int) -> int | None:
        """The NIC that a GPU sends to other hosts through."""
        if gpu not in self._nics:
            here, topology = self._members[gpu], self._topology
            joined = [
                nic
                for nic in paths.nearest(topology, here.id, DeviceKind.NIC)
                if topology.network_links_of(nic.id)
            ]
            nic = paths.shared_out(topology, here, joined).id if joined else None
            self._nics[gpu] = None if nic is None else self._position[nic]
        return self._nics[gpu]


def _local_route(topology: Graph, a: str, b: str) -> Route | None:
    if direct := paths.fabric_links(topology, a, b):
        widths = [min(link.bandwidth_gb_per_s for link in links) for links in direct]
        steps: list[tuple[Edge, float]] = []
        for links, width in zip(direct, widths, strict=True):
            ends = [a]
            for link in links:
                ends.append(link.other(ends[-1]))
            steps += [(edge, width / sum(widths)) for edge in itertools.pairwise(ends)]
        return tuple(steps)
    path = paths.pcie_path(topology, a, b)
    return None if path is None else tuple((edge, 1.0) for edge in itertools.pairwise(path))


def _domains(topology: Graph) -> tuple[dict[int, int], dict[str, int]]:
    """The domain of each host that shares NVSwitches with others, and of each such NVSwitch by id."""
    domains: dict[int, int] = {}
    shared = [switch for switch in topology.devices(DeviceKind.NVSWITCH) if switch.host < 0]
    hosts_of = {
        switch.id: {topology.device(id).host for id in topology.links_of(switch.id)} - {-1}
        for switch in shared
    }
    for hosts in hosts_of.values():
        joined = {domains.get(host, host) for host in hosts}
        least = min(joined, default=0)
        domains |= {host: least for host in hosts}
        domains |= {host: least for host, domain in domains.items() if domain in joined}
    return domains, {id: min((domains[host] for host in hosts), default=-1) for id, hosts in hosts_of.items()}


def _fingerprint(topology: Graph, members: Sequence[Device], position: Mapping[str, int]) -> tuple:
    """Equal for hosts of one build: devices and links, by position."""
    # Kinds by their address: there is one object of each, and an enum's own hash takes long.
    parts: list[object] = []
    for place, device in enumerate(members):
        parts.append(id(device.kind))
        outside = topology.network_links_of(device.id)
        parts.append("joined" if outside else "within")
        for end, link in topology.links_of(device.id).items():
            if end not in outside and (other := position[end]) > place:
                parts += other, id(link.kind), link.bandwidth_gb_per_s, link.latency_us, link.count
    return tuple(parts)
