"""A machine or a cluster as a graph: its devices and the links between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING

from flagcx.errors import TopologyError

if TYPE_CHECKING:
    import networkx


class DeviceKind(str, Enum):
    """The kinds of nodes of the graph."""

    GPU = "gpu"
    """Computes and holds data: an end of every transfer."""
    NVSWITCH = "nvswitch"
    """Joins the NVLinks of several GPUs. It forwards; reduction in the switch is not planned with."""
    PCIE_SWITCH = "pcie_switch"
    """A PCIe bridge or switch: shared by all that hangs below it."""
    HOST_BRIDGE = "host_bridge"
    """A PCIe root of a CPU, where the source tells roots apart."""
    CPU = "cpu"
    """A NUMA node: a socket, or a part of one. Its index is -1 where the source does not say which."""
    NIC = "nic"
    """A network card, with one or more ports."""
    NETWORK_SWITCH = "network_switch"
    """A switch of the network between hosts."""
    PCI_DEVICE = "pci_device"
    """A PCI function of another or of unknown class."""


class LinkKind(str, Enum):
    """The kinds of links."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    C2C = "c2c"
    PCIE = "pcie"
    SOCKET = "socket"
    NETWORK = "network"

    @property
    def is_gpu_fabric(self) -> bool:
        """Whether it belongs to the fast fabric between GPUs: NVLink, or AMD's xGMI."""
        return self in (LinkKind.NVLINK, LinkKind.XGMI)


@dataclass(frozen=True, slots=True)
class Port:
    """One port of a NIC.

    Attributes:
        name: As the system calls it (``mlx5_0``, ``eth0``).
        speed_gb_per_s: Line rate in one direction; 0 where it is unknown.
        attributes: Further facts from the source, as (name, text) pairs.
    """

    name: str
    speed_gb_per_s: float
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """A node of the graph.

    Attributes:
        id: Unique in its topology: ``gpu0``, ``cpu1``, ``pci:0000:0c:00.0``; ``host3/cpu0`` on further hosts.
        kind: Its kind.
        index: Its number among the devices of its kind; for a GPU the key in ``topology["nvlink_peers"]``.
        host: Number of the host it is in; -1 for a switch between hosts.
        name: For people: a model, an interface name; "" where unknown.
        pci_bus_id: ``0000:0c:00.0``, or "".
        attributes: Further facts from the source, as (name, text) pairs.
        ports: A NIC's ports.
    """

    id: str
    kind: DeviceKind
    index: int
    host: int = 0
    name: str = ""
    pci_bus_id: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    ports: tuple[Port, ...] = ()

    def attribute(self, name: str, default: str = "") -> str:
        """One of ``attributes`` by name, or ``default``."""
        return next((value for key, value in self.attributes if key == name), default)


@dataclass(frozen=True, slots=True)
class Link:
    """An edge of the graph: full duplex, the same in both directions.

    Attributes:
        a: Id of one end.
        b: Id of the other end.
        kind: Its kind.
        bandwidth_gb_per_s: In each direction, 10^9 bytes per second.
        latency_us: One way.
        count: How many physical links are bonded (NVLink); 1 otherwise.
        assumed: Whether the bandwidth is a guess, because the source did not name it.
    """

    a: str
    b: str
    kind: LinkKind
    bandwidth_gb_per_s: float
    latency_us: float
    count: int = 1
    assumed: bool = False

    def other(self, end: str) -> str:
        """The id of the end that is not ``end``."""
        return self.b if end == self.a else self.a


class Graph:
    """Devices and the links between them: read-only data, with look-ups and nothing else.

    Args:
        devices: All nodes; ids are unique.
        links: All edges; at most one between two devices.
        name: A short name for people: a preset's or a file's.
        notes: Facts that the source lacks, and the assumptions made in their place.

    Raises:
        TopologyError: The parts do not make a graph.
    """

    def __init__(
        self, devices: Iterable[Device], links: Iterable[Link], *, name: str = "", notes: Sequence[str] = ()
    ) -> None:
        self._devices: dict[str, Device] = {}
        for device in devices:
            if device.id in self._devices:
                raise TopologyError(f"two devices are called {device.id!r}; ids must be unique")
            self._devices[device.id] = device
        self._adjacency: dict[str, dict[str, Link]] = {id: {} for id in self._devices}
        self._network: dict[str, dict[str, Link]] = {}
        for link in links:
            near, far = self._ends(link)
            near[link.b] = far[link.a] = link
            if link.kind is LinkKind.NETWORK:
                self._network.setdefault(link.a, {})[link.b] = link
                self._network.setdefault(link.b, {})[link.a] = link
        self._switches_of: dict[str, dict[str, Link]] = {}
        self._name = name
        self._notes = tuple(notes)
        numbers = [device.index for device in self.devices(DeviceKind.GPU)]
        if len(set(numbers)) != len(numbers):
            raise TopologyError(f"two GPUs have the same index; got the indices {sorted(numbers)}")

    def _ends(self, link: Link) -> tuple[dict[str, Link], dict[str, Link]]:
        """The links so far of both ends of a new one, which is checked."""
        try:
            near, far = self._adjacency[link.a], self._adjacency[link.b]
        except KeyError as end:
            raise TopologyError(
                f"the link {link.a} - {link.b} ends at {end}, which is not a device"
            ) from None
        if near is far or link.b in near:
            raise TopologyError(
                f"a second link (or a loop) between {link.a} and {link.b}; bond them into one"
            )
        if not 0 < link.bandwidth_gb_per_s < math.inf:
            raise TopologyError(
                f"the link {link.a} - {link.b} has a bandwidth of {link.bandwidth_gb_per_s!r} GB/s; "
                "expected a finite number above 0"
            )
        return near, far

    # -- devices and links

    @property
    def name(self) -> str:
        """A short name for people."""
        return self._name

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts that the source lacks, and the assumptions made in their place."""
        return self._notes

    def devices(self, kind: DeviceKind | None = None, *, host: int | None = None) -> list[Device]:
        """All devices, or those of one kind or one host or both, in the order they were given."""
        found = self._devices.values() if host is None else self._by_host.get(host, ())
        return list(found) if kind is None else [device for device in found if device.kind is kind]

    @cached_property
    def _by_host(self) -> dict[int, list[Device]]:
        found: dict[int, list[Device]] = {}
        for device in self._devices.values():
            found.setdefault(device.host, []).append(device)
        return found

    def device(self, id: str) -> Device:
        """A device by id.

        Raises:
            TopologyError: There is none of that id.
        """
        try:
            return self._devices[id]
        except KeyError:
            known = ", ".join(list(self._devices)[:12])
            raise TopologyError(f"no device {id!r} in {self!r}; there are {known}") from None

    @cached_property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs by index."""
        return tuple(sorted(self.devices(DeviceKind.GPU), key=lambda device: device.index))

    @cached_property
    def _gpu_by_index(self) -> dict[int, Device]:
        return {device.index: device for device in self.gpus}

    def gpu(self, index: int) -> Device:
        """A GPU by its index.

        Raises:
            TopologyError: There is none of that index.
        """
        try:
            return self._gpu_by_index[index]
        except KeyError:
            raise TopologyError(no_gpu(index, list(self._gpu_by_index), repr(self))) from None

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """Numbers of the hosts, ascending."""
        return tuple(sorted({device.host for device in self._devices.values() if device.host >= 0}))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Every link once, in the order of its first end."""
        return tuple(
            link for id, around in self._adjacency.items() for link in around.values() if link.a == id
        )

    def links_of(self, id: str) -> Mapping[str, Link]:
        """The links of a device, by the id at their other end."""
        return self._adjacency[id]

    def nvswitches_of(self, id: str) -> Mapping[str, Link]:
        """The links of a device to NVSwitches, by the id of the switch."""
        found = self._switches_of.get(id)
        if found is None:
            found = {
                other: link
                for other, link in self._adjacency[id].items()
                if link.kind.is_gpu_fabric and self._devices[other].kind is DeviceKind.NVSWITCH
            }
            self._switches_of[id] = found
        return found

    def network_links_of(self, id: str) -> Mapping[str, Link]:
        """The links of a NIC or switch to the network between hosts, by the id at their other end."""
        return self._network.get(id, {})

    def link(self, a: str, b: str) -> Link | None:
        """The link between two devices, or None."""
        return self._adjacency[a].get(b)

    def connected(self, a: str, b: str) -> bool:
        """Whether links lead from one device to the other, over whatever devices."""
        return self._part_of[a] == self._part_of[b]

    @cached_property
    def _part_of(self) -> dict[str, str]:
        """For each device the first of those that links join it to."""
        part: dict[str, str] = {}
        for first in self._devices:
            found = [] if first in part else [first]
            while found:
                here = found.pop()
                part[here] = first
                found += [there for there in self._adjacency[here] if there not in part]
        return part

    @cached_property
    def graph(self) -> networkx.Graph:
        """The same as a frozen networkx graph: nodes carry ``device``, edges ``link`` and its fields."""
        import networkx

        graph = networkx.Graph(name=self.name)
        for device in self._devices.values():
            graph.add_node(device.id, device=device, kind=device.kind.value)
        for link in self.links:
            speed = {"bandwidth_gb_per_s": link.bandwidth_gb_per_s, "latency_us": link.latency_us}
            graph.add_edge(link.a, link.b, link=link, kind=link.kind.value, **speed)
        return networkx.freeze(graph)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self._devices == other._devices and set(self._undirected()) == set(other._undirected())

    def __hash__(self) -> int:
        return hash((frozenset(self._devices.values()), frozenset(self._undirected())))

    def _undirected(self) -> Iterator[Link]:
        """The links, each with its ends in one order."""
        for link in self.links:
            a, b = sorted((link.a, link.b))
            yield replace(link, a=a, b=b)

    def __reduce__(self) -> tuple:
        make = partial(type(self), name=self.name, notes=self.notes)
        return make, (tuple(self._devices.values()), self.links)

    def __repr__(self) -> str:
        words = {
            DeviceKind.GPU: ("GPU", "GPUs"),
            DeviceKind.NVSWITCH: ("NVSwitch", "NVSwitches"),
            DeviceKind.CPU: ("NUMA node", "NUMA nodes"),
            DeviceKind.NIC: ("NIC", "NICs"),
        }
        shown = [f"{len(self.hosts)} hosts"] if len(self.hosts) > 1 else []
        for kind, (one, many) in words.items():
            if count := sum(kind is not DeviceKind.CPU or device.index >= 0 for device in self.devices(kind)):
                shown.append(f"{count} {one if count == 1 else many}")
        return f"<Topology {self.name + ': ' if self.name else ''}{', '.join(shown) or 'empty'}>"


def no_gpu(index: object, known: Sequence[int], machine: str) -> str:
    """The message of an error about a GPU that a machine lacks."""
    if not known:
        return (
            f"no GPU {index!r} in {machine}, which has no GPU at all; fc.preset('dgx-a100') is one that has"
        )
    shown = f"{list(known[:16])}{' and more' if len(known) > 16 else ''}"
    return f"no GPU {index!r} in {machine}; its GPUs are {shown}"
