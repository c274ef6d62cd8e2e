"""Machines known by name, after the data sheets of their makers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from flagcx.errors import TopologyError
from flagcx.topology import speeds
from flagcx.topology.builder import Builder
from flagcx.topology.graph import Device, DeviceKind, LinkKind, Port
from flagcx.topology.join import Copies
from flagcx.topology.nccl_links import HIDDEN_SWITCH
from flagcx.topology.topology import Topology

#: GB/s in one direction of InfiniBand EDR (100 Gbit/s), HDR (200), NDR (400) and XDR (800).
EDR, HDR, NDR, XDR = 12.5, 25.0, 50.0, 100.0
_INTEL, _AMD, _ARM = "GenuineIntel", "AuthenticAMD", "ARM"
_DGX1_NVLINKS = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip
#: Four links inside each MI250X, between its two GPUs, and one or two to others: each GPU has eight.
_MI250X_XGMI = (
    (0, 1, 4), (2, 3, 4), (4, 5, 4), (6, 7, 4), (0, 6, 2), (2, 4, 2),
    (0, 2, 1), (1, 3, 1), (1, 5, 1), (3, 7, 1), (4, 6, 1), (5, 7, 1),
)  # fmt: skip
#: NVLink-C2C has ten.
_C2C_LINKS = 10
_ALL_TO_ALL = tuple((a, b, 1) for a in range(8) for b in range(a + 1, 8))


class _Branch(NamedTuple):
    """What hangs together below a NUMA node."""

    node: int
    gpus: int
    nics: int
    switch: bool = True  # below a PCIe switch, or on the node itself


def _even(cpus: int, each: int, gpus: int, nics: int, *, switch: bool = True) -> tuple[_Branch, ...]:
    """So many branches on each CPU, all alike."""
    return tuple(_Branch(cpu, gpus, nics, switch) for cpu in range(cpus) for _ in range(each))


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a machine."""

    chip: int | str  # compute capability of its GPUs, times ten; or AMD's name of their architecture
    cpu: tuple[str, int]  # vendor and model of the CPUs
    nodes: int  # NUMA nodes
    gt: float  # GT/s of its PCIe links, 16 lanes each
    branches: tuple[_Branch, ...]
    nic_gb_per_s: float
    links: tuple[tuple[int, int, int], ...] = ()  # (GPU, GPU, NVLinks or xGMI links) for each joined pair
    planes: tuple[int, ...] = ()  # NVLinks of every GPU of a board to each of its NVSwitches
    boards: int = 1  # with NVSwitches of their own, joined switch by switch
    trays: int = 1  # hosts of this kind that share the NVSwitches
    c2c_gb_per_s: float = 0.0  # between each GPU and its CPU


_NVL72 = (_Branch(0, 1, 1, False), _Branch(0, 1, 1, False), _Branch(1, 1, 1, False), _Branch(1, 1, 1, False))
_PRESETS = MappingProxyType(
    {
        # NVLink bridges in pairs of GPUs.
        "8xa100-pcie": _Parts(
            80,
            (_AMD, 49),
            2,
            16.0,
            tuple(
                branch
                for cpu in (0, 1)
                for branch in (_Branch(cpu, 2, 0), _Branch(cpu, 2, 0), _Branch(cpu, 0, 1, False))
            ),
            HDR,
            links=tuple((n, n + 1, 12) for n in (0, 2, 4, 6)),
        ),
        # A hybrid cube mesh of NVLinks between V100.
        "dgx-1v": _Parts(70, (_INTEL, 79), 2, 8.0, _even(2, 2, 2, 1), EDR, links=_DGX1_NVLINKS),
        # Two boards of eight GPUs and six NVSwitches, with eight NVLinks from each switch to its like.
        "dgx-2": _Parts(70, (_INTEL, 85), 2, 8.0, _even(2, 4, 2, 1), EDR, planes=(1,) * 6, boards=2),
        # Each EPYC is four NUMA nodes; the switches hang on every other one.
        "dgx-a100": _Parts(
            80, (_AMD, 49), 8, 16.0, tuple(_Branch(node, 2, 2) for node in (3, 1, 7, 5)), HDR, planes=(2,) * 6
        ),
        "dgx-h100": _Parts(90, (_INTEL, 143), 2, 32.0, _even(2, 4, 1, 1), NDR, planes=(5, 5, 4, 4)),
        "dgx-h200": _Parts(90, (_INTEL, 207), 2, 32.0, _even(2, 4, 1, 1), NDR, planes=(5, 5, 4, 4)),
        "hgx-b200": _Parts(100, (_INTEL, 207), 2, 32.0, _even(2, 4, 1, 1), NDR, planes=(9, 9)),
        "hgx-b300": _Parts(103, (_INTEL, 207), 2, 64.0, _even(2, 4, 1, 1), XDR, planes=(9, 9)),
        # 18 trays of two Grace CPUs and four GPUs, which share 18 NVSwitches.
        "gb200-nvl72": _Parts(
            100, (_ARM, 0), 2, 32.0, _NVL72, NDR, planes=(1,) * 18, trays=18, c2c_gb_per_s=225.0
        ),
        "gb300-nvl72": _Parts(
            103, (_ARM, 0), 2, 64.0, _NVL72, XDR, planes=(1,) * 18, trays=18, c2c_gb_per_s=225.0
        ),
        # One superchip.
        "gh200": _Parts(90, (_ARM, 0), 1, 32.0, (_Branch(0, 1, 1, False),), NDR, c2c_gb_per_s=450.0),
        "8xmi300x": _Parts("gfx942", (_INTEL, 143), 2, 32.0, _even(2, 4, 1, 1), NDR, links=_ALL_TO_ALL),
        # Four modules of two GPUs each, as ranks see them.
        "8xmi250x": _Parts(
            "gfx90a",
            (_AMD, 48),
            4,
            16.0,
            tuple(_Branch(node, 2, 1, False) for node in (3, 1, 0, 2)),
            HDR,
            links=_MI250X_XGMI,
        ),
        # A workstation: no NVLink, one 10 Gbit/s NIC.
        "4xpcie": _Parts(89, (_AMD, 49), 1, 16.0, (_Branch(0, 4, 1, False),), 1.25),
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
        >>> preset("gb200-nvl72")
        <Topology gb200-nvl72: 18 hosts, 72 GPUs, 18 NVSwitches, 36 NUMA nodes, 72 NICs>

    Source: the makers' data sheets; for xGMI links the XML models of RCCL (``tools/topo_expl/models``).
    """
    if not isinstance(name, str) or name not in _PRESETS:
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
        amd = isinstance(parts.chip, str)
        self.fabric = LinkKind.XGMI if amd else LinkKind.NVLINK
        rate = (
            speeds.xgmi_gb_per_s(parts.chip)
            if isinstance(parts.chip, str)
            else speeds.nvlink_gb_per_s(parts.chip)
        )
        self.rate = rate or 0.0

    def build(self, name: str) -> Topology:
        parts = self.parts
        used = [
            branch.node for branch in parts.branches
        ]  # first, so that NICs are numbered as NCCL lists them
        for node in dict.fromkeys([*used, *range(parts.nodes)]):
            self.cpu(node)
        for branch in parts.branches:
            cpu = f"cpu{branch.node}"
            above = self.pci(DeviceKind.PCIE_SWITCH, "switch", cpu) if branch.switch else cpu
            for _ in range(branch.gpus):
                self.gpu(above, cpu)
            for _ in range(branch.nics):
                self.nic(above)
        for a, b, count in parts.links:
            self.link(f"gpu{a}", f"gpu{b}", self.fabric, self.rate * count, count)
        speed = speeds.socket_speed(dict(self.devices["cpu0"].attributes))
        self.join_cpus(speed or speeds.DEFAULT_SOCKET_GB_PER_S)
        if parts.trays > 1:
            self.repeat(parts.trays)
        self.nvswitches()
        return self.topology(name)

    def repeat(self, trays: int) -> None:
        """So many hosts of this kind."""
        tray = self.topology("tray")
        devices: list[Device] = []
        self.links = []
        counts: Counter[DeviceKind] = Counter()
        copies = Copies(tray)
        for host in range(trays):
            copies.add(host, devices, self.links, counts)
        self.devices = {device.id: device for device in devices}

    def nvswitches(self) -> None:
        """The boards with their NVSwitches; those of two boards are joined one to one."""
        parts, gpus = self.parts, self.of(DeviceKind.GPU)
        width, host = len(gpus) // parts.boards, 0 if parts.trays == 1 else -1
        for board in range(parts.boards if parts.planes else 0):
            for plane, count in enumerate(parts.planes):
                number = board * len(parts.planes) + plane
                bus_id = f"0000:{0xE0 + number:02x}:00.0" if host == 0 else HIDDEN_SWITCH
                id = self.add(DeviceKind.NVSWITCH, f"nvswitch{number}", host=host, pci_bus_id=bus_id)
                for gpu in gpus[board * width : (board + 1) * width]:
                    self.link(gpu.id, id, self.fabric, self.rate * count, count)
                if board > 0:
                    self.link(f"nvswitch{plane}", id, self.fabric, self.rate * count * width, count * width)

    def cpu(self, index: int) -> str:
        vendor, model = self.parts.cpu
        facts = {"arch": "x86_64", "vendor": vendor, "familyid": "6" if vendor == _INTEL else "143"}
        facts |= {"modelid": str(model)}
        if vendor == _ARM:
            facts = {"arch": "arm64", "vendor": vendor}
        return self.add(DeviceKind.CPU, f"cpu{index}", index, attributes=tuple(facts.items()))

    def pci(self, kind: DeviceKind, word: str, parent: str, **facts: Any) -> str:
        bus = 1 + sum(device.pci_bus_id != "" for device in self.devices.values())
        id = self.add(kind, f"{word}{len(self.of(kind))}", pci_bus_id=f"0000:{bus:02x}:00.0", **facts)
        self.link(parent, id, LinkKind.PCIE, speeds.pcie_gb_per_s(self.parts.gt, 16))
        return id

    def gpu(self, parent: str, cpu: str) -> None:
        index, chip = str(len(self.of(DeviceKind.GPU))), self.parts.chip
        facts = {"dev": index, "rank": index, "gdr": "1", "gcn" if isinstance(chip, str) else "sm": str(chip)}
        attributes = tuple((f"gpu.{name}", value) for name, value in facts.items())
        if self.parts.c2c_gb_per_s:
            id = self.add(
                DeviceKind.GPU, f"gpu{index}", pci_bus_id=f"0000:a{index}:00.0", attributes=attributes
            )
            self.link(id, cpu, LinkKind.C2C, self.parts.c2c_gb_per_s, _C2C_LINKS)
        else:
            self.pci(DeviceKind.GPU, "gpu", parent, attributes=attributes)

    def nic(self, parent: str) -> None:
        name = f"mlx5_{len(self.of(DeviceKind.NIC))}"
        self.pci(DeviceKind.NIC, "nic", parent, name=name, ports=(Port(name, self.parts.nic_gb_per_s),))
