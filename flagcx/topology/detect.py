"""Detects the machine this runs on: NUMA nodes, PCIe and NICs from the kernel, GPUs from the driver."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import Any

from flagcx.topology import nvml as driver
from flagcx.topology import speeds, sysfs
from flagcx.topology.builder import Builder
from flagcx.topology.cpu_sets import cpu_mask
from flagcx.topology.graph import DeviceKind, LinkKind
from flagcx.topology.nccl_links import HIDDEN_SWITCH
from flagcx.topology.nvml import DriverGpu
from flagcx.topology.sysfs import PciFunction
from flagcx.topology.topology import Topology

_NVIDIA, _AMD = "0x10de", "0x1002"


def detect(*, sys: str | Path = "/sys", proc: str | Path = "/proc", nvml: Any = None) -> Topology:
    """The topology of this machine.

    GPUs are numbered as the driver numbers them, by PCI address (``CUDA_DEVICE_ORDER=PCI_BUS_ID``). A machine
    with no GPU gives its NUMA nodes and NICs. ``Topology.notes`` says which facts could not be read.

    Args:
        sys: Folder of the kernel's sysfs.
        proc: Folder of procfs.
        nvml: A module to use in place of pynvml.

    Returns:
        The machine, as one host.

    Example:
        >>> machine = detect()
        >>> len(machine["numa_nodes"]) >= 1
        True
    """
    machine = _Machine(Path(sys), Path(proc))
    machine.cpus()
    nvml = driver.load() if nvml is None else nvml
    if nvml is None:
        machine.notes.add("pynvml is not installed, so NVLinks are not known; pip install nvidia-ml-py")
    known = driver.read_gpus(nvml, machine.notes) if nvml is not None else None
    machine.gpus(known)
    machine.nics()
    return machine.topology(platform.node() or "this machine")


class _Machine(Builder):
    """Collects the machine's parts."""

    def __init__(self, sys: Path, proc: Path) -> None:
        super().__init__()
        self.sys, self.proc = sys, proc
        self.functions = sysfs.pci_functions(sys)

    # -- NUMA nodes

    def cpus(self) -> None:
        model = sysfs.cpu_model(self.proc)
        nodes = sysfs.numa_nodes(self.sys)
        for node in nodes:
            facts = {"affinity": cpu_mask(node.cpus), "arch": platform.machine(), **model}
            if node.package >= 0:
                facts["package"] = str(node.package)
            self.add(DeviceKind.CPU, f"cpu{node.number}", node.number, attributes=tuple(facts.items()))
        speed = speeds.socket_speed({"arch": platform.machine(), **model})
        if speed is None and len(nodes) > 1:
            self.notes.add(
                f"the CPU is not in the table; {speeds.DEFAULT_SOCKET_GB_PER_S:g} GB/s assumed "
                "between NUMA nodes"
            )
        self.join_cpus(speed or speeds.DEFAULT_SOCKET_GB_PER_S, assumed=speed is None)

    # -- GPUs

    def gpus(self, known: list[DriverGpu] | None) -> None:
        if known is None:
            known = self.gpus_without_driver()
        for gpu in known:
            index = str(gpu.index)
            sm = (("gpu.sm", str(gpu.sm)),) if gpu.sm else ()
            facts = (("gpu.dev", index), *sm, ("gpu.rank", index))
            id = self.add(
                DeviceKind.GPU,
                f"gpu{index}",
                gpu.index,
                name=gpu.name,
                pci_bus_id=gpu.bus_id,
                attributes=facts,
            )
            self.hang(id, self.functions.get(gpu.bus_id))
        self.nvlinks(known)

    def gpus_without_driver(self) -> list[DriverGpu]:
        """GPUs as the PCI tree shows them: no names, no NVLinks."""
        found = [
            function.address
            for function in self.functions.values()
            if (function.vendor == _NVIDIA and function.pci_class.startswith("0x03"))
            or (function.vendor == _AMD and function.pci_class.startswith(("0x0380", "0x1200")))
        ]
        if found:
            self.notes.add(
                "GPUs were found on PCIe alone, so links between them other than PCIe are not known"
            )
        return [DriverGpu(index, "", address, None, ()) for index, address in enumerate(found)]

    def nvlinks(self, gpus: list[DriverGpu]) -> None:
        by_bus = {gpu.bus_id: gpu for gpu in gpus}
        switches: dict[str, str] = {}
        for gpu in gpus:
            rate = speeds.nvlink_gb_per_s(gpu.sm)
            speed = rate or speeds.DEFAULT_NVLINK_GB_PER_S
            for end, count in sorted(Counter(gpu.links).items()):
                if end.startswith("switch:"):
                    address = end.removeprefix("switch:") or HIDDEN_SWITCH
                    if address not in switches:
                        id = f"nvswitch{len(switches)}"
                        switches[address] = self.add(DeviceKind.NVSWITCH, id, pci_bus_id=address)
                    id = switches[address]
                elif end not in by_bus:
                    self.notes.add("an NVLink goes to a GPU that is hidden from this process; it is left out")
                    continue
                elif by_bus[end].index <= gpu.index:
                    continue
                else:
                    id = f"gpu{by_bus[end].index}"
                ends = f"gpu{gpu.index}", id
                self.link(*ends, LinkKind.NVLINK, speed * count, count, assumed=rate is None)

    # -- NICs

    def nics(self) -> None:
        for number, (address, ports) in enumerate(sorted(sysfs.network_ports(self.sys).items())):
            name = "+".join(dict.fromkeys(port.name for port in ports))
            if any(port.speed_gb_per_s == 0 for port in ports):
                self.notes.add("a network port's speed is not known: it is down, or virtual")
            id = self.add(DeviceKind.NIC, f"nic{number}", name=name, pci_bus_id=address, ports=tuple(ports))
            self.hang(id, self.functions.get(address))

    # -- the PCIe tree

    def hang(self, id: str, function: PciFunction | None) -> None:
        """Links a device to the switch above it, and that to the root; ports of a switch are one device."""
        if function is None:
            self.notes.add(
                "a device's place in the PCIe tree cannot be read; it is put below the first NUMA node"
            )
            first = self.of(DeviceKind.CPU)[0].id
            self.link(id, first, LinkKind.PCIE, speeds.pcie_gb_per_s(), assumed=True)
            return
        above = self.root(function)
        # Bridges alternate: root port, then for each switch its upstream port and one downstream port.
        for address in function.above[1::2]:
            switch = f"pci:{address}"
            if switch not in self.devices:
                self.add(DeviceKind.PCIE_SWITCH, switch, pci_bus_id=address)
                self.pcie(switch, above, self.functions.get(address))
            above = switch
        self.pcie(id, above, function)

    def root(self, function: PciFunction) -> str:
        numbers = [cpu.index for cpu in self.of(DeviceKind.CPU)]
        numa = function.numa
        if numa not in numbers:
            if len(numbers) > 1:
                self.notes.add("a PCI device's NUMA node is not known; the first is assumed")
            numa = numbers[0]
        root = f"{function.root or 'pci'}@{numa}"
        if root not in self.devices:
            self.add(DeviceKind.HOST_BRIDGE, root)
            self.link(root, f"cpu{numa}", LinkKind.PCIE, speeds.UNBOUND_GB_PER_S)
        return root

    def pcie(self, id: str, above: str, function: PciFunction | None) -> None:
        gt, width = (function.gt, function.width) if function else (None, 0)
        known = gt is not None and width > 0
        if not known:
            self.notes.add(
                f"a PCIe link's speed or width is not known; assumed {speeds.DEFAULT_PCIE_GT:g} GT/s and "
                f"{speeds.DEFAULT_PCIE_WIDTH} lanes for what is missing"
            )
        self.link(id, above, LinkKind.PCIE, speeds.pcie_gb_per_s(gt, width), assumed=not known)
