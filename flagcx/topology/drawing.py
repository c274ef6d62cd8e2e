"""Where each device of a machine stands in its picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from flagcx.topology import paths
from flagcx.topology.graph import Device, DeviceKind, Graph, LinkKind
from flagcx.topology.plan import Plan

_MOST_GPUS = 32
#: Height of each kind of device.
ROW = {
    DeviceKind.NETWORK_SWITCH: 4.4,
    DeviceKind.CPU: 3.3,
    DeviceKind.HOST_BRIDGE: 2.8,
    DeviceKind.PCIE_SWITCH: 2.2,
    DeviceKind.PCI_DEVICE: 1.35,
    DeviceKind.NIC: 1.3,
    DeviceKind.GPU: 0.6,
    DeviceKind.NVSWITCH: -0.6,
}


@dataclass(slots=True)
class Drawing:
    """Where every device goes: GPUs in ring order from the left, each with what hangs near it."""

    topology: Graph
    plan: Plan | None
    place: dict[str, tuple[float, float]] = field(default_factory=dict)
    width: float = 0.0
    hidden: list[str] = field(default_factory=list)
    hosts: tuple[int, ...] = ()
    bars: list[tuple[float, float, str]] = field(default_factory=list)
    barred: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hosts = self._drawn_hosts()
        for host in self.hosts:
            self._host(host)
        self._switches()
        if len(self.hosts) < len(self.topology.hosts):
            self.hidden.append(f"{len(self.topology.hosts) - len(self.hosts)} more hosts")

    def _drawn_hosts(self) -> tuple[int, ...]:
        counts: dict[int, int] = {}
        for gpu in self.topology.gpus:
            counts[gpu.host] = counts.get(gpu.host, 0) + 1
        total = 0
        hosts: list[int] = []
        for host in self.topology.hosts:
            total += counts.get(host, 0)
            if hosts and total > _MOST_GPUS:
                break
            hosts.append(host)
        return tuple(hosts)

    def _host(self, host: int) -> None:
        devices = [device for device in self.topology.devices() if device.host == host]
        ring = self.plan.rings[0].order if self.plan else ()
        order = {gpu: position for position, gpu in enumerate(ring)}
        gpus = [device for device in devices if device.kind is DeviceKind.GPU]
        gpus.sort(key=lambda gpu: (order.get(gpu.index, len(order)), gpu.index))
        nics = [device for device in devices if device.kind is DeviceKind.NIC]
        placeless = [nic for nic in nics if self._placeless(nic)]
        if placeless:
            self.hidden.append(f"{len(placeless)} interfaces without a PCI place")
        nics = [nic for nic in nics if nic not in placeless]
        rank = {gpu.id: position for position, gpu in enumerate(gpus)}
        nearest = [(self._near(nic, gpus), nic) for nic in nics]
        for gpu in gpus:
            self._leaf(gpu, 1.0)
            for near, nic in nearest:
                if near == rank[gpu.id]:
                    self._leaf(nic, 0.85)
        for near, nic in nearest:
            if near is None:
                self._leaf(nic, 0.85)
        self._inner(devices)
        self.width += 0.6

    def _placeless(self, nic: Device) -> bool:
        around = self.topology.links_of(nic.id)
        return (
            not nic.pci_bus_id
            and len(around) > 0
            and all(link.assumed for link in around.values())
            and all(self.topology.device(id).kind is DeviceKind.CPU for id in around)
        )

    def _near(self, nic: Device, gpus: Sequence[Device]) -> int | None:
        """Behind which GPU a NIC stands: the last of those below the same parent, if any."""
        parents = {id for id, link in self.topology.links_of(nic.id).items() if link.kind is LinkKind.PCIE}
        found = [position for position, gpu in enumerate(gpus) if parents & self._ancestors(gpu)]
        return max(found, default=None)

    def _ancestors(self, gpu: Device) -> set[str]:
        node = paths.numa_node(self.topology, gpu.index)
        way = paths.pcie_path(self.topology, gpu.id, node.id) if node else None
        return set(way or ())

    def _leaf(self, device: Device, width: float) -> None:
        self.place[device.id] = (self.width + width / 2, ROW[device.kind])
        self.width += width

    def _inner(self, devices: Sequence[Device]) -> None:
        """Switches above the middle of what hangs below them, then sockets; NVSwitches under all."""
        left = [d for d in devices if d.kind in (DeviceKind.PCIE_SWITCH, DeviceKind.HOST_BRIDGE)]
        while left:
            ready = [device for device in left if self._children(device)]
            if not ready:
                break
            for device in ready:
                self._above(device)
            left = [device for device in left if device.id not in self.place]
        for cpu in (device for device in devices if device.kind is DeviceKind.CPU):
            if self._children(cpu):
                self._above(cpu)
            else:
                self._leaf(cpu, 1.0)
        self._nvswitches([device for device in devices if device.kind is DeviceKind.NVSWITCH])
        self._spread(devices)

    def _nvswitches(self, planes: Sequence[Device]) -> None:
        """One bar where every GPU is joined to every NVSwitch alike, else a box for each."""
        if not planes:
            return
        joined = [
            frozenset(id for id in self.topology.links_of(plane.id) if id in self.place) for plane in planes
        ]
        xs = [self.place[id][0] for id in joined[0]]
        if xs and len(set(joined)) == 1:
            first = min(joined[0], key=lambda id: self.place[id][0])
            total = sum(self.topology.links_of(first)[plane.id].bandwidth_gb_per_s for plane in planes)
            many = f"{len(planes)} NVSwitches" if len(planes) > 1 else "NVSwitch"
            self.bars.append((min(xs), max(xs), f"{many}: {total:g} GB/s each way for each GPU"))
            self.barred |= {plane.id for plane in planes}
            return
        own = [x for x, y in self.place.values() if y == ROW[DeviceKind.GPU]] or [0.0, 1.0]
        for number, plane in enumerate(planes):
            share = (number + 0.5) / len(planes)
            self.place[plane.id] = (min(own) + share * (max(own) - min(own)), ROW[plane.kind])

    def _children(self, device: Device) -> list[tuple[float, float]]:
        own = ROW[device.kind]
        around = self.topology.links_of(device.id).items()
        return [
            self.place[id]
            for id, link in around
            if link.kind is LinkKind.PCIE and id in self.place and self.place[id][1] < own + 0.4
        ]

    def _above(self, device: Device) -> None:
        below = self._children(device)
        height = ROW[device.kind]
        if device.kind is DeviceKind.PCIE_SWITCH and max(y for _, y in below) >= height - 0.01:
            height = max(y for _, y in below) + 0.35
        self.place[device.id] = (sum(x for x, _ in below) / len(below), height)

    def _spread(self, devices: Sequence[Device]) -> None:
        """Moves boxes of one row apart where they would overlap."""
        rows: dict[float, list[str]] = {}
        for device in devices:
            if device.id in self.place and device.kind not in (DeviceKind.GPU, DeviceKind.NIC):
                rows.setdefault(self.place[device.id][1], []).append(device.id)
        for height, ids in rows.items():
            ids.sort(key=lambda id: self.place[id][0])
            for before, after in itertools.pairwise(ids):
                least = self.place[before][0] + 0.95
                if self.place[after][0] < least:
                    self.place[after] = (least, height)

    def _switches(self) -> None:
        switches = self.topology.devices(DeviceKind.NETWORK_SWITCH)
        drawn = [
            device for device in switches if any(id in self.place for id in self.topology.links_of(device.id))
        ]
        for number, device in enumerate(drawn):
            share = (number + 0.5) / len(drawn)
            self.place[device.id] = (share * self.width, ROW[device.kind])
        upper = [
            d
            for d in switches
            if d not in drawn and any(i in self.place for i in self.topology.links_of(d.id))
        ]
        for number, device in enumerate(upper):
            self.place[device.id] = ((number + 0.5) / len(upper) * self.width, ROW[device.kind] + 0.7)
