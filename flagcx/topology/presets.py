"""Machines that are known by name, written by us from what their makers publish, and clusters of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

from flagcx.errors import TopologyError
from flagcx.topology import speeds
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind, Port
from flagcx.topology.join import nic_speed, place_host
from flagcx.topology.topology import Topology

#: GB/s in one direction of InfiniBand HDR (200 Gbit/s), NDR (400) and EDR (100).
HDR, NDR, EDR = 25.0, 50.0, 12.5
_DGX1_NVLINKS = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip


def preset(name: str) -> Topology:
    """A machine by name.

    Args:
        name: One of ``preset_names()``.

    Raises:
        TopologyError: There is none of that name.

    Example:
        >>> preset("dgx-h100")
        <Topology dgx-h100: 8 GPUs, 4 NVSwitches, 2 NUMA nodes, 8 NICs>
    """
    makers = _makers()
    if name not in makers:
        raise TopologyError(f"no preset {name!r}; there are {', '.join(makers)}")
    return makers[name]()


def preset_names() -> tuple[str, ...]:
    """The names that ``preset`` knows."""
    return tuple(_makers())


def _makers() -> dict[str, Callable[[], Topology]]:
    return {
        "8xa100-pcie": a100_pcie_8,
        "dgx-1v": dgx_1v,
        "dgx-2": dgx_2,
        "dgx-a100": dgx_a100,
        "dgx-h100": dgx_h100,
        "dgx-h200": dgx_h200,
        "hgx-b200": hgx_b200,
        "4xpcie": workstation_4,
    }


def a100_pcie_8() -> Topology:
    """The article's machine: 8 x A100 80 GB PCIe, NVLink bridges in pairs, two sockets, one HDR NIC each."""
    build = _Machine("8xa100-pcie", sm=80, vendor="AuthenticAMD", gt=16.0)
    for socket in range(2):
        cpu = build.cpu(socket)
        for _ in range(2):
            switch = build.switch(cpu)
            build.gpu(switch), build.gpu(switch)
        build.nic(cpu, HDR)
    for first in range(0, 8, 2):
        build.nvlink(first, first + 1, 12)
    return build.done()


def dgx_1v() -> Topology:
    """DGX-1 with 8 x V100: a hybrid cube mesh of NVLinks, four PCIe switches with an EDR NIC each."""
    build = _Machine("dgx-1v", sm=70, vendor="GenuineIntel", model=79, gt=8.0)
    for socket in range(2):
        cpu = build.cpu(socket)
        for _ in range(2):
            switch = build.switch(cpu)
            build.gpu(switch), build.gpu(switch), build.nic(switch, EDR)
    for a, b, count in _DGX1_NVLINKS:
        build.nvlink(a, b, count)
    return build.done()


def dgx_2() -> Topology:
    """DGX-2: 16 x V100 behind NVSwitches, two sockets, eight EDR NICs."""
    build = _Machine("dgx-2", sm=70, vendor="GenuineIntel", model=85, gt=8.0)
    for socket in range(2):
        cpu = build.cpu(socket)
        for _ in range(4):
            switch = build.switch(cpu)
            build.gpu(switch), build.gpu(switch), build.nic(switch, EDR)
    build.nvswitches(6, 1)
    return build.done()


def dgx_a100() -> Topology:
    """DGX A100: 8 x A100 SXM behind six NVSwitches, four NUMA nodes' PCIe switches, eight HDR NICs."""
    build = _Machine("dgx-a100", sm=80, vendor="AuthenticAMD", gt=16.0)
    for socket in range(2):
        cpu = build.cpu(socket)
        for _ in range(2):
            switch = build.switch(cpu)
            build.gpu(switch), build.gpu(switch), build.nic(switch, HDR), build.nic(switch, HDR)
    build.nvswitches(6, 2)
    return build.done()


def dgx_h100() -> Topology:
    """DGX H100: 8 x H100 SXM behind four NVSwitches, each GPU with an NDR NIC on its own PCIe switch."""
    return _hopper("dgx-h100", 90, 143)


def dgx_h200() -> Topology:
    """DGX H200: as DGX H100, on newer Xeons."""
    return _hopper("dgx-h200", 90, 207)


def hgx_b200() -> Topology:
    """HGX B200: 8 x B200 behind two NVSwitches, each GPU with an NDR NIC on its own PCIe switch."""
    return _hopper("hgx-b200", 100, 207, (9, 9))


def workstation_4() -> Topology:
    """A workstation: 4 GPUs on PCIe 4.0 below one socket, no NVLink, one 10 Gbit/s NIC."""
    build = _Machine("4xpcie", sm=89, vendor="AuthenticAMD", gt=16.0)
    cpu = build.cpu(0)
    for _ in range(4):
        build.gpu(cpu)
    build.nic(cpu, 1.25)
    return build.done()


def _hopper(name: str, sm: int, model: int, planes: Sequence[int] = (5, 5, 4, 4)) -> Topology:
    build = _Machine(name, sm=sm, vendor="GenuineIntel", model=model, gt=32.0)
    for socket in range(2):
        cpu = build.cpu(socket)
        for _ in range(4):
            switch = build.switch(cpu)
            build.gpu(switch), build.nic(switch, NDR)
    for count in planes:
        build.nvswitches(1, count)
    return build.done()


class _Machine:
    """Collects one machine's parts in the order they are named."""

    def __init__(self, name: str, *, sm: int, vendor: str, gt: float, model: int = 49) -> None:
        self.name, self.sm, self.vendor, self.gt, self.model = name, sm, vendor, gt, model
        self.devices: list[Device] = []
        self.links: list[Link] = []
        self.bus = 0

    def count(self, kind: DeviceKind) -> int:
        return sum(device.kind is kind for device in self.devices)

    def cpu(self, index: int) -> str:
        family = "6" if self.vendor == "GenuineIntel" else "143"
        attributes = (
            ("arch", "x86_64"), ("vendor", self.vendor), ("familyid", family), ("modelid", str(self.model)),
        )  # fmt: skip
        self.devices.append(Device(f"cpu{index}", DeviceKind.CPU, index, attributes=attributes))
        return f"cpu{index}"

    def pci(self, kind: DeviceKind, id: str, parent: str, **more: object) -> str:
        self.bus += 1
        device = Device(id, kind, self.count(kind), pci_bus_id=f"0000:{self.bus:02x}:00.0", **more)  # type: ignore[arg-type]
        self.devices.append(device)
        speed = speeds.pcie_gb_per_s(self.gt, 16)
        self.links.append(Link(parent, id, LinkKind.PCIE, speed, speeds.PCIE_LATENCY_US))
        return id

    def switch(self, parent: str) -> str:
        return self.pci(DeviceKind.PCIE_SWITCH, f"switch{self.count(DeviceKind.PCIE_SWITCH)}", parent)

    def gpu(self, parent: str) -> str:
        index = self.count(DeviceKind.GPU)
        attributes = (
            ("gpu.dev", str(index)),
            ("gpu.sm", str(self.sm)),
            ("gpu.rank", str(index)),
            ("gpu.gdr", "1"),
        )
        return self.pci(DeviceKind.GPU, f"gpu{index}", parent, attributes=attributes)

    def nic(self, parent: str, gb_per_s: float) -> str:
        index = self.count(DeviceKind.NIC)
        name = f"mlx5_{index}"
        return self.pci(DeviceKind.NIC, f"nic{index}", parent, name=name, ports=(Port(name, gb_per_s),))

    def nvlink(self, a: int, b: int, count: int) -> None:
        rate = (speeds.nvlink_gb_per_s(self.sm) or 0.0) * count
        self.links.append(Link(f"gpu{a}", f"gpu{b}", LinkKind.NVLINK, rate, speeds.NVLINK_LATENCY_US, count))

    def nvswitches(self, planes: int, count: int) -> None:
        """So many NVSwitches, each joined to every GPU by ``count`` NVLinks."""
        rate = (speeds.nvlink_gb_per_s(self.sm) or 0.0) * count
        for _ in range(planes):
            index = self.count(DeviceKind.NVSWITCH)
            id = f"nvswitch{index}"
            self.devices.append(Device(id, DeviceKind.NVSWITCH, index, pci_bus_id=f"0000:f{index}:00.0"))
            for gpu in [device.id for device in self.devices if device.kind is DeviceKind.GPU]:
                self.links.append(Link(gpu, id, LinkKind.NVLINK, rate, speeds.NVSWITCH_LATENCY_US, count))

    def done(self) -> Topology:
        speed = speeds.socket_gb_per_s("x86_64", self.vendor, 6, self.model) or speeds.DEFAULT_SOCKET_GB_PER_S
        cpus = [device.id for device in self.devices if device.kind is DeviceKind.CPU]
        sockets = [
            Link(a, b, LinkKind.SOCKET, speed, speeds.SOCKET_LATENCY_US) for a, b in combinations(cpus, 2)
        ]
        return Topology(self.devices, [*self.links, *sockets], name=self.name)


# -- clusters


def cluster(
    machine: Topology,
    hosts: int,
    nics: int | None = None,
    *,
    hosts_per_leaf: int = 32,
    oversubscription: float = 1.0,
) -> Topology:
    """So many of a machine, joined rail by rail under a fat tree.

    NIC i of each of ``hosts_per_leaf`` hosts hangs on one leaf switch (the rail's); all leaves hang below
    one spine, which stands for the spine layer as a whole. GPU numbers run on from host to host.

    Args:
        machine: One host.
        hosts: How many.
        nics: How many NICs of each host are joined (its fastest first); all with a known speed by default.
        hosts_per_leaf: Hosts below one set of leaf switches.
        oversubscription: Bandwidth below a leaf over bandwidth above it; 1 is non-blocking.

    Raises:
        TopologyError: An argument is out of range, or the machine has too few NICs of known speed.

    Example:
        >>> cluster(preset("dgx-h100"), hosts=4)
        <Topology dgx-h100 x 4: 4 hosts, 32 GPUs, 16 NVSwitches, 8 NUMA nodes, 32 NICs>
    """
    _check_cluster(machine, hosts, hosts_per_leaf, oversubscription)
    rails = _rails(machine, hosts, nics)
    devices: list[Device] = []
    links: list[Link] = []
    counts: Counter[DeviceKind] = Counter()
    for host in range(hosts):
        names = place_host(machine, host, devices, links, counts)
        for rail, nic in enumerate(rails):
            leaf = f"leaf{host // hosts_per_leaf}.{rail}"
            speed = nic_speed(nic)
            links.append(Link(names[nic.id], leaf, LinkKind.NETWORK, speed, speeds.NETWORK_LATENCY_US))
    switches, above = _fat_tree(rails, hosts, hosts_per_leaf, oversubscription)
    return Topology(devices + switches, links + above, name=f"{machine.name} x {hosts}", notes=machine.notes)


def _fat_tree(
    rails: Sequence[Device], hosts: int, per_leaf: int, oversubscription: float
) -> tuple[list[Device], list[Link]]:
    switches: list[Device] = []
    links: list[Link] = []
    groups = -(-hosts // per_leaf) if hosts > 1 else 0
    for group in range(groups if hosts > 1 else 0):
        below = min(per_leaf, hosts - group * per_leaf)
        for rail, nic in enumerate(rails):
            id = f"leaf{group}.{rail}"
            switches.append(Device(id, DeviceKind.NETWORK_SWITCH, len(switches), -1))
            if groups * len(rails) > 1:
                speed = below * nic_speed(nic) / oversubscription
                links.append(Link(id, "spine", LinkKind.NETWORK, speed, speeds.NETWORK_LATENCY_US))
    if links:
        switches.append(Device("spine", DeviceKind.NETWORK_SWITCH, len(switches), -1))
    return switches, links


def _rails(machine: Topology, hosts: int, nics: int | None) -> list[Device]:
    if hosts == 1:
        return []
    known = [nic for nic in machine.devices(DeviceKind.NIC) if nic.pci_bus_id and nic_speed(nic) > 0]
    wanted = len(known) if nics is None else nics
    if not 1 <= wanted <= len(known):
        raise TopologyError(
            f"{machine!r} has {len(known)} NICs with a PCI place and a known speed; {wanted} were asked "
            f"for to join {hosts} hosts; expected 1 to {len(known)}"
        )
    fastest = sorted(known, key=lambda nic: (-nic_speed(nic), nic.index))[:wanted]
    return sorted(fastest, key=lambda nic: nic.index)


def _check_cluster(machine: Topology, hosts: int, per_leaf: int, oversubscription: float) -> None:
    if len(machine.hosts) != 1:
        raise TopologyError(
            f"a cluster is built of one machine; got {machine!r}, which has {len(machine.hosts)} hosts"
        )
    if not 1 <= hosts <= 1 << 16:
        raise TopologyError(f"hosts is {hosts!r}; expected 1 to {1 << 16}")
    if per_leaf < 1 or not oversubscription > 0:
        raise TopologyError(
            f"hosts_per_leaf is {per_leaf!r} and oversubscription {oversubscription!r}; both must be above 0"
        )
    indices = [gpu.index for gpu in machine.gpus]
    if indices != list(range(len(indices))):
        raise TopologyError(f"a cluster's machine needs GPUs numbered 0 to n-1; got {indices}")
