"""The place of each device of a machine in its picture."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flagcx.topology import paths
from flagcx.topology.graph import Device, DeviceKind, Graph, LinkKind
from flagcx.topology.plan import Plan

_MOST_GPUS, _MOST_HOSTS = 32, 4
#: Height of each kind of device.
ROW = {
    DeviceKind.NETWORK_SWITCH: 4.7,
    DeviceKind.CPU: 3.3,
    DeviceKind.HOST_BRIDGE: 2.8,
    DeviceKind.PCIE_SWITCH: 2.2,
    DeviceKind.PCI_DEVICE: 1.35,
    DeviceKind.NIC: 1.3,
    DeviceKind.GPU: 0.6,
    DeviceKind.NVSWITCH: -0.6,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Links that join many devices alike, drawn as one bar: the NVSwitches of a board, or the sockets.

    Attributes:
        kind: Of the links.
        left: Where it begins.
        right: Where it ends.
        height: Of its middle.
        label: Its text.
        ends: Ids of the devices that it joins.
    """

    kind: LinkKind
    left: float
    right: float
    height: float
    label: str
    ends: tuple[str, ...]


class Drawing:
    """The place of every device: NUMA nodes in order from the left, and in them the GPUs along the ring.

    GPUs stand in ring order where that passes the NUMA nodes in their order (the ring may be turned, or
    walked backwards); otherwise by NUMA node, PCIe and number.

    Args:
        topology: The machine.
        plan: Its plan, or None to order the GPUs by place.

    Attributes:
        place: (x, y) by device id; devices that are not drawn are missing.
        width: Of the whole.
        hidden: How many parts of each kind are not drawn, by the kind in words.
        hosts: The hosts that are drawn.
        bars: NVSwitches and links between sockets that are drawn as bars.
        trunks: (a, b, label): bars of ``bars`` that are joined, by position.
    """

    def __init__(self, topology: Graph, plan: Plan | None) -> None:
        self.topology, self.plan = topology, plan
        self.place: dict[str, tuple[float, float]] = {}
        self.width = 0.0
        self.hidden = Counter[str]()
        self.bars: list[Bar] = []
        self.trunks: list[tuple[int, int, str]] = []
        self._position = {device.id: place for place, device in enumerate(topology.devices())}
        self.hosts = self._drawn_hosts()
        for host in self.hosts:
            self._host(host)
        self._nvswitches([switch for switch in topology.devices(DeviceKind.NVSWITCH) if switch.host < 0])
        self._network()
        if len(self.hosts) < len(topology.hosts):
            self.hidden["more hosts"] += len(topology.hosts) - len(self.hosts)

    def _drawn_hosts(self) -> tuple[int, ...]:
        """The first host, and up to three further ones while their GPUs fit."""
        counts = [len(self.topology.devices(DeviceKind.GPU, host=host)) for host in self.topology.hosts]
        totals = itertools.accumulate(counts)
        return tuple(
            host
            for number, (host, total) in enumerate(zip(self.topology.hosts, totals, strict=True))
            if number == 0 or (total <= _MOST_GPUS and number < _MOST_HOSTS)
        )

    def _host(self, host: int) -> None:
        devices = self.topology.devices(host=host)
        gpus = self._row([device for device in devices if device.kind is DeviceKind.GPU])
        nics = [device for device in devices if device.kind is DeviceKind.NIC]
        placeless = [nic for nic in nics if self._placeless(nic)]
        if placeless:
            self.hidden["interfaces without a PCI place"] += len(placeless)
        nearest = [(self._near(nic, gpus), nic) for nic in nics if nic not in placeless]
        after = {
            position: [nic for near, nic in nearest if near == position] for position in range(len(gpus))
        }
        for nic in (nic for near, nic in nearest if near is None):
            after.setdefault(self._before(nic, gpus), []).append(nic)
        for position in range(-1, len(gpus)):
            if position >= 0:
                self._leaf(gpus[position], 1.0)
            for nic in after.get(position, ()):
                self._leaf(nic, 0.85)
        self._inner(devices)
        self.width += 0.6

    def _row(self, gpus: Sequence[Device]) -> list[Device]:
        """The GPUs of a host from the left to the right."""
        by_index = {gpu.index: gpu for gpu in gpus}
        ring = [by_index[index] for index in (self.plan.order if self.plan else ()) if index in by_index]
        rest = sorted((gpu for gpu in gpus if gpu not in ring), key=lambda gpu: gpu.index)
        node = {gpu.id: paths.nearest_cpu(self.topology, gpu.index) for gpu in gpus}

        def number(gpu: Device) -> int:
            found = node[gpu.id]
            return found.index if found else -1

        for forwards in (ring, ring[:1] + ring[:0:-1]):
            for turn in range(len(ring)):
                turned = forwards[turn:] + forwards[:turn]
                if all(number(a) <= number(b) for a, b in itertools.pairwise(turned)):
                    return turned + rest

        def place(gpu: Device) -> tuple:
            above = node[gpu.id]
            path = paths.pcie_path(self.topology, gpu.id, above.id) if above else None
            first = [self._position[id] for id in reversed(path or ())]
            return number(gpu), first[1:-1], gpu.index

        return sorted(gpus, key=place)

    def _placeless(self, nic: Device) -> bool:
        around = self.topology.links_of(nic.id)
        return (
            not nic.pci_bus_id
            and len(around) > 0
            and all(link.assumed for link in around.values())
            and all(self.topology.device(id).kind is DeviceKind.CPU for id in around)
        )

    def _near(self, nic: Device, gpus: Sequence[Device]) -> int | None:
        """The position of the GPU after which a NIC stands: the last of those with most of PCIe in common."""
        above = paths.nearest(self.topology, nic.id, DeviceKind.CPU)
        own = set(paths.pcie_path(self.topology, nic.id, above[0].id) or ()) if above else set()
        shared = [len(own & self._ancestors(gpu)) for gpu in gpus]
        most = max(shared, default=0)
        return max(place for place, count in enumerate(shared) if count == most) if most else None

    def _before(self, nic: Device, gpus: Sequence[Device]) -> int:
        """The position of the last GPU of a NUMA node before that of a NIC with no GPU near it, or -1."""
        above = paths.nearest(self.topology, nic.id, DeviceKind.CPU)
        own = above[0].index if above else len(gpus)
        nodes = [paths.nearest_cpu(self.topology, gpu.index) for gpu in gpus]
        return max((place for place, node in enumerate(nodes) if node and node.index <= own), default=-1)

    def _ancestors(self, gpu: Device) -> set[str]:
        node = paths.nearest_cpu(self.topology, gpu.index)
        return set(paths.pcie_path(self.topology, gpu.id, node.id) or ()) if node else set()

    def _leaf(self, device: Device, width: float) -> None:
        self.place[device.id] = (self.width + width / 2, ROW[device.kind])
        self.width += width

    def _inner(self, devices: Sequence[Device]) -> None:
        """Switches above the middle of the devices below them, then sockets; NVSwitches under all."""
        left = [d for d in devices if d.kind in (DeviceKind.PCIE_SWITCH, DeviceKind.HOST_BRIDGE)]
        while ready := [device for device in left if self._children(device)]:
            for device in ready:
                self._above(device)
            left = [device for device in left if device.id not in self.place]
        cpus = [device for device in devices if device.kind is DeviceKind.CPU]
        used = [cpu for cpu in cpus if self._children(cpu)]
        for cpu in used:
            self._above(cpu)
        for cpu in cpus if not used else ():
            self._leaf(cpu, 1.0)
        if used and len(used) < len(cpus):
            self.hidden["NUMA nodes without devices"] += len(cpus) - len(used)
        self._nvswitches([device for device in devices if device.kind is DeviceKind.NVSWITCH])
        self._move_apart(devices)
        self._sockets([device for device in devices if device.kind is DeviceKind.CPU])

    def _nvswitches(self, switches: Sequence[Device]) -> None:
        """One bar for each board whose GPUs are joined to all its NVSwitches alike, else a box for each."""
        boards: dict[frozenset[str], list[Device]] = {}
        for switch in switches:
            ends = {id for id in self.topology.links_of(switch.id) if id in self.place}
            gpus = {id for id in ends if self.topology.device(id).kind is DeviceKind.GPU}
            boards.setdefault(frozenset(gpus), []).append(switch)
        joined = [gpus for gpus in boards if gpus]
        if not joined:
            return
        if len({gpu for gpus in joined for gpu in gpus}) < sum(map(len, joined)):
            own = [x for x, y in self.place.values() if y == ROW[DeviceKind.GPU]]
            self._spread(switches, min(own), max(own), ROW[DeviceKind.NVSWITCH])
            return
        first = len(self.bars)
        for board in joined:
            self.bars.append(self._board(board, boards[board]))
        for a, b in itertools.combinations(range(len(joined)), 2):
            links = [
                link
                for one in boards[joined[a]]
                for other in boards[joined[b]]
                if (link := self.topology.link(one.id, other.id)) is not None
            ]
            if links:
                count, speed = (
                    sum(link.count for link in links),
                    sum(link.bandwidth_gb_per_s for link in links),
                )
                self.trunks.append((first + a, first + b, f"{count} NVLinks, {speed:g} GB/s"))

    def _board(self, gpus: frozenset[str], switches: Sequence[Device]) -> Bar:
        xs = {id: self.place[id][0] for id in gpus}
        around = self.topology.links_of(min(xs, key=xs.__getitem__))
        total = sum(around[switch.id].bandwidth_gb_per_s for switch in switches)
        count = sum(around[switch.id].count for switch in switches)
        many = f"{len(switches)} NVSwitches" if len(switches) > 1 else "NVSwitch"
        label = f"{many}: {count} NVLinks, {total:g} GB/s each way for each GPU"
        left, right = min(xs.values()), max(xs.values())
        return Bar(LinkKind.NVLINK, left, right, ROW[DeviceKind.NVSWITCH], label, tuple(sorted(gpus)))

    def _sockets(self, cpus: Sequence[Device]) -> None:
        """One bar for the links of more than three NUMA nodes that are all joined alike."""
        places = [cpu.id for cpu in cpus if cpu.id in self.place]
        links = [self.topology.link(a, b) for a, b in itertools.combinations(places, 2)]
        speeds = {link.bandwidth_gb_per_s for link in links if link is not None}
        if len(places) > 3 and None not in links and len(speeds) == 1:
            xs = [self.place[id][0] for id in places]
            label = f"between any two NUMA nodes: {next(iter(speeds)):g} GB/s each way"
            self.bars.append(
                Bar(LinkKind.SOCKET, min(xs), max(xs), ROW[DeviceKind.CPU] + 0.7, label, tuple(places))
            )

    def _spread(self, devices: Sequence[Device], left: float, right: float, height: float) -> None:
        """Stands devices evenly in a row."""
        for number, device in enumerate(devices):
            self.place[device.id] = (left + (number + 0.5) / len(devices) * (right - left), height)

    def _children(self, device: Device) -> list[tuple[float, float]]:
        around = self.topology.links_of(device.id).items()
        kinds = (LinkKind.PCIE, LinkKind.C2C)
        below = [self.place[id] for id, link in around if link.kind in kinds and id in self.place]
        return [(x, y) for x, y in below if y < ROW[device.kind] + 0.4]

    def _above(self, device: Device) -> None:
        below = self._children(device)
        height, highest = ROW[device.kind], max(y for _, y in below)
        if device.kind is DeviceKind.PCIE_SWITCH and highest >= height - 0.01:
            height = highest + 0.35
        self.place[device.id] = (sum(x for x, _ in below) / len(below), height)

    def _move_apart(self, devices: Sequence[Device]) -> None:
        """Moves boxes of one row apart where they would overlap."""
        rows: dict[float, list[str]] = {}
        for device in devices:
            if device.id in self.place and device.kind not in (DeviceKind.GPU, DeviceKind.NIC):
                rows.setdefault(self.place[device.id][1], []).append(device.id)
        for height, ids in rows.items():
            ids.sort(key=lambda id: self.place[id][0])
            for before, after in itertools.pairwise(ids):
                x = max(self.place[after][0], self.place[before][0] + 0.95)
                self.place[after] = (x, height)

    def _network(self) -> None:
        """Switches that a drawn NIC hangs on, and above them those that only such switches hang on."""
        for lift in (0.0, 0.7):
            row = [
                switch
                for switch in self.topology.devices(DeviceKind.NETWORK_SWITCH)
                if switch.id not in self.place
                and any(id in self.place for id in self.topology.links_of(switch.id))
            ]
            self._spread(row, 0.0, self.width, ROW[DeviceKind.NETWORK_SWITCH] + lift)
