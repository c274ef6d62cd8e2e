"""Machines known by name, after the data sheets of their makers, and clusters of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flagcx.errors import TopologyError
from flagcx.topology import speeds
from flagcx.topology.builder import Builder
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind, Port
from flagcx.topology.join import nic_speed, place_host
from flagcx.topology.topology import Topology

#: GB/s in one direction of InfiniBand HDR (200 Gbit/s), NDR (400) and EDR (100).
HDR, NDR, EDR = 25.0, 50.0, 12.5
_INTEL, _AMD = "GenuineIntel", "AuthenticAMD"
_DGX1_NVLINKS = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a machine."""

    sm: int  # compute capability of its GPUs, times ten
    vendor: str  # of its CPUs, one for each socket
    gt: float  # GT/s of its PCIe links, 16 lanes each
    switches: int  # PCIe switches below each socket; 0 to hang everything on the socket
    gpus: int  # below each switch
    nics: int  # below each switch
    nic_gb_per_s: float
    model: int = 49  # of the CPUs
    sockets: int = 2
    socket_nics: int = 0  # NICs on each socket itself
    nvlinks: tuple[tuple[int, int, int], ...] = ()  # (GPU, GPU, NVLinks) for each joined pair
    planes: tuple[int, ...] = ()  # NVLinks of every GPU to each NVSwitch


_PRESETS = MappingProxyType(
    {
        # NVLink bridges in pairs of GPUs.
        "8xa100-pcie": _Parts(
            80, _AMD, 16.0, 2, 2, 0, HDR, socket_nics=1, nvlinks=tuple((n, n + 1, 12) for n in (0, 2, 4, 6))
        ),
        # A hybrid cube mesh of NVLinks between V100.
        "dgx-1v": _Parts(70, _INTEL, 8.0, 2, 2, 1, EDR, 79, nvlinks=_DGX1_NVLINKS),
        "dgx-2": _Parts(70, _INTEL, 8.0, 4, 2, 1, EDR, 85, planes=(1,) * 6),
        "dgx-a100": _Parts(80, _AMD, 16.0, 2, 2, 2, HDR, planes=(2,) * 6),
        "dgx-h100": _Parts(90, _INTEL, 32.0, 4, 1, 1, NDR, 143, planes=(5, 5, 4, 4)),
        "dgx-h200": _Parts(90, _INTEL, 32.0, 4, 1, 1, NDR, 207, planes=(5, 5, 4, 4)),
        "hgx-b200": _Parts(100, _INTEL, 32.0, 4, 1, 1, NDR, 207, planes=(9, 9)),
        # A workstation: no NVLink, one 10 Gbit/s NIC.
        "4xpcie": _Parts(89, _AMD, 16.0, 0, 4, 1, 1.25, sockets=1),
    }
)


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
    if name not in _PRESETS:
        raise TopologyError(f"no preset {name!r}; there are {', '.join(_PRESETS)}")
    return _Machine(_PRESETS[name]).build(name)


def preset_names() -> tuple[str, ...]:
    """The names that ``preset`` knows."""
    return tuple(_PRESETS)


class _Machine(Builder):
    """Builds one machine from its parts."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.parts = parts

    def build(self, name: str) -> Topology:
        parts = self.parts
        for socket in range(parts.sockets):
            cpu = self.cpu(socket)
            for _ in range(parts.switches or 1):
                above = self.pci(DeviceKind.PCIE_SWITCH, "switch", cpu) if parts.switches else cpu
                for _ in range(parts.gpus):
                    self.gpu(above)
                for _ in range(parts.nics):
                    self.nic(above)
            for _ in range(parts.socket_nics):
                self.nic(cpu)
        rate = speeds.nvlink_gb_per_s(parts.sm) or 0.0
        for a, b, count in parts.nvlinks:
            self.link(f"gpu{a}", f"gpu{b}", LinkKind.NVLINK, rate * count, count)
        for number, count in enumerate(parts.planes):
            switch = self.add(DeviceKind.NVSWITCH, f"nvswitch{number}", pci_bus_id=f"0000:f{number}:00.0")
            for gpu in self.of(DeviceKind.GPU):
                self.link(gpu.id, switch, LinkKind.NVLINK, rate * count, count)
        speed = speeds.socket_speed(dict(self.devices["cpu0"].attributes))
        self.join_cpus(speed or speeds.DEFAULT_SOCKET_GB_PER_S)
        return self.topology(name)

    def cpu(self, index: int) -> str:
        vendor, model = self.parts.vendor, str(self.parts.model)
        family = "6" if vendor == _INTEL else "143"
        attributes = (("arch", "x86_64"), ("vendor", vendor), ("familyid", family), ("modelid", model))
        return self.add(DeviceKind.CPU, f"cpu{index}", attributes=attributes)

    def pci(self, kind: DeviceKind, word: str, parent: str, **facts: Any) -> str:
        bus = 1 + sum(device.pci_bus_id != "" for device in self.devices.values())
        id = self.add(kind, f"{word}{len(self.of(kind))}", pci_bus_id=f"0000:{bus:02x}:00.0", **facts)
        self.link(parent, id, LinkKind.PCIE, speeds.pcie_gb_per_s(self.parts.gt, 16))
        return id

    def gpu(self, parent: str) -> None:
        index = str(len(self.of(DeviceKind.GPU)))
        facts = {"dev": index, "sm": str(self.parts.sm), "rank": index, "gdr": "1"}
        attributes = tuple((f"gpu.{name}", value) for name, value in facts.items())
        self.pci(DeviceKind.GPU, "gpu", parent, attributes=attributes)

    def nic(self, parent: str) -> None:
        name = f"mlx5_{len(self.of(DeviceKind.NIC))}"
        self.pci(DeviceKind.NIC, "nic", parent, name=name, ports=(Port(name, self.parts.nic_gb_per_s),))


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

    def wire(a: str, b: str, gb_per_s: float) -> None:
        links.append(Link(a, b, LinkKind.NETWORK, gb_per_s, speeds.LATENCY_US["network"]))

    for host in range(hosts):
        names = place_host(machine, host, devices, links, counts)
        for rail, nic in enumerate(rails):
            wire(names[nic.id], f"leaf{host // hosts_per_leaf}.{rail}", nic_speed(nic))
    groups = range(-(-hosts // hosts_per_leaf))
    leaves = [(group, rail, nic) for group in groups for rail, nic in enumerate(rails)]
    switches = [f"leaf{group}.{rail}" for group, rail, _ in leaves]
    if len(leaves) > 1:
        for group, rail, nic in leaves:
            below = min(hosts_per_leaf, hosts - group * hosts_per_leaf)
            wire(f"leaf{group}.{rail}", "spine", below * nic_speed(nic) / oversubscription)
        switches.append("spine")
    devices += [Device(id, DeviceKind.NETWORK_SWITCH, index, -1) for index, id in enumerate(switches)]
    return Topology(devices, links, name=f"{machine.name} x {hosts}", notes=machine.notes)


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
