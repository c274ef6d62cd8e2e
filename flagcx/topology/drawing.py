"""The place of each device of a machine in its picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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


class Drawing:
    """The place of every device: GPUs in ring order from the left, each with the devices near it.

    Args:
        topology: The machine.
        plan: Its plan, or None to order the GPUs by index.

    Attributes:
        place: (x, y) by device id; devices that are not drawn are missing.
        width: Of the whole.
        hidden: The parts that are not drawn, in words.
        hosts: The hosts that are drawn.
        bars: (left, right, label) of a row of NVSwitches that is drawn as one bar.
    """

    def __init__(self, topology: Graph, plan: Plan | None) -> None:
        self.topology, self.plan = topology, plan
        self.place: dict[str, tuple[float, float]] = {}
        self.width = 0.0
        self.hidden: list[str] = []
        self.bars: list[tuple[float, float, str]] = []
        self.hosts = self._drawn_hosts()
        for host in self.hosts:
            self._host(host)
        self._network()
        if len(self.hosts) < len(topology.hosts):
            self.hidden.append(f"{len(topology.hosts) - len(self.hosts)} more hosts")

    def _drawn_hosts(self) -> tuple[int, ...]:
        """The first host, and further ones while their GPUs fit."""
        counts = [len(self.topology.devices(DeviceKind.GPU, host=host)) for host in self.topology.hosts]
        totals = itertools.accumulate(counts)
        return tuple(
            host
            for number, (host, total) in enumerate(zip(self.topology.hosts, totals, strict=True))
            if number == 0 or total <= _MOST_GPUS
        )

    def _host(self, host: int) -> None:
        devices = self.topology.devices(host=host)
        order = {gpu: position for position, gpu in enumerate(self.plan.order if self.plan else ())}
        gpus = [device for device in devices if device.kind is DeviceKind.GPU]
        gpus.sort(key=lambda gpu: (order.get(gpu.index, len(order)), gpu.index))
        nics = [device for device in devices if device.kind is DeviceKind.NIC]
        placeless = [nic for nic in nics if self._placeless(nic)]
        if placeless:
            self.hidden.append(f"{len(placeless)} interfaces without a PCI place")
        nearest = [(self._near(nic, gpus), nic) for nic in nics if nic not in placeless]
        for position, gpu in enumerate(gpus):
            self._leaf(gpu, 1.0)
            for near, nic in nearest:
                if near == position:
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
        """The position of the GPU after which a NIC stands: the last below the same parent, if any."""
        parents = {id for id, link in self.topology.links_of(nic.id).items() if link.kind is LinkKind.PCIE}
        found = [position for position, gpu in enumerate(gpus) if parents & self._ancestors(gpu)]
        return max(found, default=None)

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
        for cpu in (device for device in devices if device.kind is DeviceKind.CPU):
            if self._children(cpu):
                self._above(cpu)
            else:
                self._leaf(cpu, 1.0)
        self._nvswitches([device for device in devices if device.kind is DeviceKind.NVSWITCH])
        self._move_apart(devices)

    def _nvswitches(self, planes: Sequence[Device]) -> None:
        """One bar where every GPU is joined to every NVSwitch alike, else a box for each."""
        if not planes:
            return
        joined = [{id for id in self.topology.links_of(plane.id) if id in self.place} for plane in planes]
        xs = {id: self.place[id][0] for id in joined[0]}
        if xs and all(one == joined[0] for one in joined):
            around = self.topology.links_of(min(xs, key=xs.__getitem__))
            total = sum(around[plane.id].bandwidth_gb_per_s for plane in planes)
            many = f"{len(planes)} NVSwitches" if len(planes) > 1 else "NVSwitch"
            label = f"{many}: {total:g} GB/s each way for each GPU"
            self.bars.append((min(xs.values()), max(xs.values()), label))
            return
        own = [x for x, y in self.place.values() if y == ROW[DeviceKind.GPU]] or [0.0, 1.0]
        self._spread(planes, min(own), max(own), ROW[DeviceKind.NVSWITCH])

    def _spread(self, devices: Sequence[Device], left: float, right: float, height: float) -> None:
        """Stands devices evenly in a row."""
        for number, device in enumerate(devices):
            self.place[device.id] = (left + (number + 0.5) / len(devices) * (right - left), height)

    def _children(self, device: Device) -> list[tuple[float, float]]:
        around = self.topology.links_of(device.id).items()
        below = [self.place[id] for id, link in around if link.kind is LinkKind.PCIE and id in self.place]
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
