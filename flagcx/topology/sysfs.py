"""Reads a machine's NUMA nodes, PCIe tree and network interfaces from the kernel's /sys and /proc."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from flagcx.topology import speeds
from flagcx.topology.graph import Port

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


class NumaNode(NamedTuple):
    """A NUMA node: its number, its CPUs as ranges, and the socket it is part of (-1 where unknown)."""

    number: int
    cpus: str
    package: int


class PciFunction(NamedTuple):
    """A function of a PCI device; ``above`` has the addresses of the bridges from the root down to it."""

    address: str
    pci_class: str
    vendor: str
    numa: int  # -1 where unknown
    above: tuple[str, ...]
    root: str  # pci0000:00, or ""
    gt: float | None  # that both ends of the link above it can do
    width: int  # lanes that both ends have, or 0


def numa_nodes(sys: Path) -> list[NumaNode]:
    """The NUMA nodes that have CPUs; one that holds all of them where the kernel names none."""
    system, nodes = sys / "devices/system", []
    for folder in sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        if cpus := _read(folder / "cpulist"):
            first = re.match(r"\d*", cpus)[0]  # type: ignore[index]
            package = _number(system / f"cpu/cpu{first}/topology/physical_package_id")
            nodes.append(NumaNode(int(folder.name[4:]), cpus, -1 if package is None else package))
    return nodes or [NumaNode(0, _read(system / "cpu/online"), -1)]


def cpu_model(proc: Path) -> dict[str, str]:
    """Vendor, family and model of the CPU in the words of NCCL's XML; {} where they are missing."""
    wanted = {"vendor_id": "vendor", "cpu family": "familyid", "model": "modelid"}
    found: dict[str, str] = {}
    for line in _read(proc / "cpuinfo").splitlines()[:60]:
        name, _, value = line.partition(":")
        if (key := wanted.get(name.strip())) and key not in found:
            found[key] = value.strip()
    return found


def pci_functions(sys: Path) -> dict[str, PciFunction]:
    """Every PCI function by address."""
    functions = {}
    for entry in sorted((sys / "bus/pci/devices").glob("*")):
        if not _ADDRESS.fullmatch(entry.name):
            continue
        folder = entry.resolve()
        parts = folder.parts
        above = tuple(part for part in parts[:-1] if _ADDRESS.fullmatch(part))
        root = next((part for part in parts if _ROOT.fullmatch(part)), "")
        gt, width = _link(folder, above)
        numa = _number(folder / "numa_node")
        words = _read(folder / "class"), _read(folder / "vendor"), -1 if numa is None else numa
        functions[entry.name] = PciFunction(entry.name, *words, above, root, gt, width)
    return functions


def network_ports(sys: Path) -> dict[str, list[Port]]:
    """Network ports by the PCI address they belong to; InfiniBand names before interface names.

    Interfaces without a device (loopback, bridges, tunnels) are left out. Those of virtual buses
    are found under the PCI function that carries the bus.
    """
    found: dict[str, list[Port]] = {}
    for entry in sorted((sys / "class/infiniband").glob("*")):
        address = _pci_address(entry)
        for port in sorted((entry / "ports").glob("*")):
            rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", _read(port / "rate"))
            down = "ACTIVE" not in _read(port / "state").upper() and bool(_read(port / "state"))
            speed = float(rate.group(1)) / 8 if rate and not down else 0.0
            if address:
                found.setdefault(address, []).append(Port(entry.name, speed, (("port", port.name),)))
    for entry in sorted((sys / "class/net").glob("*")):
        address = _pci_address(entry)
        others = [port for port in found.get(address, ()) if port.name != entry.name]
        if address and not any(port.attributes for port in others):
            speed = speeds.nic_gb_per_s(max(_number(entry / "speed") or 0, 0))
            found.setdefault(address, []).append(Port(entry.name, speed))
    return found


def _pci_address(entry: Path) -> str:
    device = entry / "device"
    if not device.exists():
        return ""
    addresses = [part for part in device.resolve().parts if _ADDRESS.fullmatch(part)]
    return addresses[-1] if addresses else ""


def _link(folder: Path, above: tuple[str, ...]) -> tuple[float | None, int]:
    """The best speed and width of both the device and the port above it; an idle link runs below them."""
    ends = [folder, folder.parent] if above else [folder]
    rates = [gt for end in ends if (gt := speeds.parse_pcie_gt(_read(end / "max_link_speed"))) is not None]
    widths = [width for end in ends if (width := _number(end / "max_link_width")) and 0 < width <= 32]
    return min(rates, default=None), min(widths, default=0)


def _read(path: Path) -> str:
    """A small file's text; "" where it cannot be read (the kernel refuses some that it lists)."""
    try:
        with open(path, "rb") as stream:
            return stream.read(1 << 16).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None
