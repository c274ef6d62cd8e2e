"""Detects the machine this runs on: NUMA nodes, PCIe and NICs from the kernel, GPUs from the driver."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from flagcx.topology import nvml as driver
from flagcx.topology import speeds, sysfs
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind
from flagcx.topology.nccl_links import HIDDEN_SWITCH
from flagcx.topology.nvml import DriverGpu
from flagcx.topology.sysfs import PciFunction
from flagcx.topology.topology import Topology

_UNBOUND_GB_PER_S = 1000.0
_NVIDIA, _AMD = "0x10de", "0x1002"


def detect(*, sys: str | Path = "/sys", proc: str | Path = "/proc", nvml: Any = None) -> Topology:
    """The topology of this machine.

    GPUs are numbered as the driver numbers them, by PCI address (``CUDA_DEVICE_ORDER=PCI_BUS_ID``). A machine
    with no GPU gives its NUMA nodes and NICs. What could not be read is said in ``Topology.notes``.

    Args:
        sys: Where the kernel's sysfs is.
        proc: Where procfs is.
        nvml: A module to use in place of pynvml.

    Returns:
        The machine, as one host.

    Example:
        >>> machine = detect()
        >>> len(machine["numa_nodes"]) >= 1
        True
    """
    notes: Counter[str] = Counter()
    machine = _Machine(Path(sys), Path(proc), notes)
    machine.cpus()
    nvml = driver.load() if nvml is None else nvml
    if nvml is None:
        notes["pynvml is not installed, so NVLinks are not known; pip install nvidia-ml-py"] += 1
    known = driver.read_gpus(nvml, notes) if nvml is not None else None
    machine.gpus(known)
    machine.nics()
    return Topology(
        machine.devices,
        machine.links,
        name=platform.node() or "this machine",
        notes=[note if count == 1 else f"{note} ({count} times)" for note, count in notes.items()],
    )


@dataclass(slots=True)
class _Machine:
    """Collects the machine's parts."""

    sys: Path
    proc: Path
    notes: Counter[str]
    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    functions: dict[str, PciFunction] = field(default_factory=dict)
    placed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.functions = sysfs.pci_functions(self.sys)

    # -- NUMA nodes

    def cpus(self) -> None:
        model = sysfs.cpu_model(self.proc)
        nodes = sysfs.numa_nodes(self.sys)
        for node in nodes:
            attributes = {"affinity": speeds.cpu_mask(node.cpus), "arch": platform.machine(), **model}
            if node.package >= 0:
                attributes["package"] = str(node.package)
            self.devices.append(
                Device(f"cpu{node.number}", DeviceKind.CPU, node.number, attributes=tuple(attributes.items()))
            )
        speed = speeds.socket_gb_per_s(
            platform.machine(), model.get("vendor", ""), _whole(model, "familyid"), _whole(model, "modelid")
        )
        if speed is None and len(nodes) > 1:
            self.notes[
                f"the CPU is not in the table; {speeds.DEFAULT_SOCKET_GB_PER_S:g} GB/s assumed "
                "between NUMA nodes"
            ] += 1
        for a, b in combinations(nodes, 2):
            ends = f"cpu{a.number}", f"cpu{b.number}"
            rate = speed or speeds.DEFAULT_SOCKET_GB_PER_S
            self.links.append(Link(*ends, LinkKind.SOCKET, rate, speeds.SOCKET_LATENCY_US, 1, speed is None))

    # -- GPUs

    def gpus(self, known: list[DriverGpu] | None) -> None:
        if known is None:
            known = self.gpus_without_driver()
        for gpu in known:
            function = self.functions.get(gpu.bus_id)
            sm = (("gpu.sm", str(gpu.sm)),) if gpu.sm else ()
            attributes = (("gpu.dev", str(gpu.index)), *sm, ("gpu.rank", str(gpu.index)))
            self.devices.append(
                Device(
                    f"gpu{gpu.index}",
                    DeviceKind.GPU,
                    gpu.index,
                    name=gpu.name,
                    pci_bus_id=gpu.bus_id,
                    attributes=attributes,
                )
            )
            self.hang(f"gpu{gpu.index}", function, gpu.bus_id)
        self.nvlinks(known)

    def gpus_without_driver(self) -> list[DriverGpu]:
        """GPUs as the PCI tree shows them: no names, no NVLinks."""
        found = [
            function
            for function in self.functions.values()
            if (function.vendor == _NVIDIA and function.pci_class.startswith("0x03"))
            or (function.vendor == _AMD and function.pci_class.startswith(("0x0380", "0x1200")))
        ]
        if found:
            self.notes[
                "GPUs were found on PCIe alone, so links between them other than PCIe are not known"
            ] += 1
        return [DriverGpu(index, "", function.address, None, ()) for index, function in enumerate(found)]

    def nvlinks(self, gpus: list[DriverGpu]) -> None:
        by_bus = {gpu.bus_id: gpu for gpu in gpus}
        switches: dict[str, str] = {}
        for gpu in gpus:
            rate = speeds.nvlink_gb_per_s(gpu.sm)
            speed = rate or speeds.DEFAULT_NVLINK_GB_PER_S
            for end, count in sorted(Counter(gpu.links).items()):
                if end.startswith("switch:"):
                    address = end.removeprefix("switch:") or HIDDEN_SWITCH
                    id = switches.setdefault(address, f"nvswitch{len(switches)}")
                    latency = speeds.NVSWITCH_LATENCY_US
                elif end not in by_bus:
                    self.notes[
                        "an NVLink goes to a GPU that is hidden from this process; it is left out"
                    ] += 1
                    continue
                elif by_bus[end].index <= gpu.index:
                    continue
                else:
                    id, latency = f"gpu{by_bus[end].index}", speeds.NVLINK_LATENCY_US
                self.links.append(
                    Link(f"gpu{gpu.index}", id, LinkKind.NVLINK, speed * count, latency, count, rate is None)
                )
        for number, (address, id) in enumerate(switches.items()):
            self.devices.append(Device(id, DeviceKind.NVSWITCH, number, pci_bus_id=address))

    # -- NICs

    def nics(self) -> None:
        for number, (address, ports) in enumerate(sorted(sysfs.network_ports(self.sys).items())):
            id = f"nic{number}"
            name = "+".join(dict.fromkeys(port.name for port in ports))
            if any(port.speed_gb_per_s == 0 for port in ports):
                self.notes["a network port's speed is not known: it is down, or virtual"] += 1
            self.devices.append(
                Device(id, DeviceKind.NIC, number, name=name, pci_bus_id=address, ports=tuple(ports))
            )
            self.hang(id, self.functions.get(address), address)

    # -- the PCIe tree

    def hang(self, id: str, function: PciFunction | None, address: str) -> None:
        """Links a device to the switch above it, and that to the root; ports of a switch are one node."""
        if function is None:
            self.notes[
                "a device's place in the PCIe tree cannot be read; it is put below the first NUMA node"
            ] += 1
            speed = speeds.pcie_gb_per_s(speeds.DEFAULT_PCIE_GT, speeds.DEFAULT_PCIE_WIDTH)
            self.links.append(
                Link(id, self.devices[0].id, LinkKind.PCIE, speed, speeds.PCIE_LATENCY_US, 1, True)
            )
            return
        above = self.root(function)
        # Bridges alternate: root port, then for each switch its upstream port and one downstream port.
        for switch in function.above[1::2]:
            node = f"pci:{switch}"
            if node not in self.placed:
                index = sum(device.kind is DeviceKind.PCIE_SWITCH for device in self.devices)
                self.devices.append(Device(node, DeviceKind.PCIE_SWITCH, index, pci_bus_id=switch))
                self.pcie(node, above, self.functions.get(switch))
                self.placed[node] = above
            above = node
        self.pcie(id, above, function)

    def root(self, function: PciFunction) -> str:
        numbers = [device.index for device in self.devices if device.kind is DeviceKind.CPU]
        numa = function.numa
        if numa not in numbers:
            if len(numbers) > 1:
                self.notes["a PCI device's NUMA node is not known; the first is assumed"] += 1
            numa = numbers[0]
        node = f"{function.root or 'pci'}@{numa}"
        if node not in self.placed:
            index = sum(device.kind is DeviceKind.HOST_BRIDGE for device in self.devices)
            self.devices.append(Device(node, DeviceKind.HOST_BRIDGE, index))
            self.links.append(
                Link(node, f"cpu{numa}", LinkKind.PCIE, _UNBOUND_GB_PER_S, speeds.PCIE_LATENCY_US)
            )
            self.placed[node] = f"cpu{numa}"
        return node

    def pcie(self, id: str, above: str, function: PciFunction | None) -> None:
        gt = function.gt if function else None
        width = function.width if function else 0
        known = gt is not None and width > 0
        if not known:
            self.notes[
                f"a PCIe link's speed or width is not known; assumed {speeds.DEFAULT_PCIE_GT:g} GT/s and "
                f"{speeds.DEFAULT_PCIE_WIDTH} lanes for what is missing"
            ] += 1
        speed = speeds.pcie_gb_per_s(gt or speeds.DEFAULT_PCIE_GT, width or speeds.DEFAULT_PCIE_WIDTH)
        self.links.append(Link(id, above, LinkKind.PCIE, speed, speeds.PCIE_LATENCY_US, 1, not known))


def _whole(values: dict[str, str], name: str) -> int | None:
    text = values.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 9 else None
