"""Reads the topology XML of NCCL (``NCCL_TOPO_DUMP_FILE``, ``NCCL_TOPO_FILE``) and of RCCL.

A file lists NUMA nodes (``cpu``), below them PCIe bridges, GPUs with their NVLinks or xGMI links, and NICs.
Static files of cloud vendors leave out the facts that NCCL finds by itself; these are assumed as NCCL
assumes them, and ``Topology.notes`` says so.

Source: NCCL ``src/graph/xml.cc``, versions 1 (NCCL) and 2 (RCCL, with ``xgmi`` and ``gcn``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology import markup, nccl_links, speeds
from flagcx.topology.builder import Builder
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind, Port
from flagcx.topology.markup import Element
from flagcx.topology.topology import Topology

_WHAT = "NCCL's topology XML"
_IDLE_GT = (2.5, 5.0)
#: NUMA nodes of one file; every two of a host are joined, so their number is bounded.
_MOST_CPUS = 512


def read(path: str | Path) -> Topology:
    """Reads a topology file.

    Args:
        path: The file.

    Returns:
        The machine. ``notes`` names facts that the file lacks, and the assumptions made for them.

    Raises:
        TopologyError: The file cannot be read, or is not a topology; names file, line and reason.
    """
    return parse(markup.read_text(path, _WHAT), str(path))


def parse(text: str, source: str = "<text>") -> Topology:
    """Reads a topology from text; see ``read``.

    Args:
        text: The XML.
        source: Its name in messages.

    Raises:
        TopologyError: It is not a topology.
    """
    root = markup.parse(text, source)
    _check_root(root)
    return _Reader(source).read(root)


def _check_root(root: Element) -> None:
    if root.tag == "graphs":
        raise root.error(
            "this is an NCCL graph file (root 'graphs', for NCCL_GRAPH_FILE): it lists channels, not a "
            "machine; expected a topology file with root 'system', as NCCL_TOPO_DUMP_FILE writes"
        )
    if root.tag != "system":
        raise root.error(
            f"the root element is {root.tag[:40]!r}; expected 'system', as NCCL_TOPO_DUMP_FILE writes"
        )
    version = root.attributes.get("version", "1")
    if version not in ("1", "2"):
        raise root.error(f"topology version {version[:40]!r}; versions 1 (NCCL) and 2 (RCCL) are known")


class _Reader(Builder):
    """Reads one file."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.hosts: dict[str, int] = {}
        self.gpu_elements: list[tuple[str, Element]] = []
        self.static_gpus: list[str] = []
        self.shared_nics: dict[tuple, str] = {}

    # -- elements

    def read(self, root: Element) -> Topology:
        for element in root.children:
            if element.tag == "cpu":
                self.cpu(element)
            else:
                self.skip(element)
        if not self.of(DeviceKind.CPU):
            raise TopologyError(f"{self.source}: no <cpu> element, so no machine; expected at least one")
        return self.finish()

    def cpu(self, element: Element) -> None:
        key = element.attributes.get("host_hash", "")
        host = self.hosts.setdefault(key, len(self.hosts))
        numa = element.number("numaid", -1, 1 << 16)
        index = max(numa if numa is not None else 0, 0)
        id = f"{_prefix(host)}cpu{index}"
        if id in self.devices:
            self.notes[f"NUMA node {index} is listed more than once; its parts are put together"] += 1
        else:
            if len(self.of(DeviceKind.CPU)) >= _MOST_CPUS:
                raise element.error(f"over {_MOST_CPUS} NUMA nodes; refused")
            self.add(DeviceKind.CPU, id, index, host=host, attributes=tuple(element.attributes.items()))
        for child in element.children:
            if child.tag == "pci":
                self.pci(child, id, host)
            elif child.tag == "nic":
                self.shared_nic(child, id, host)
            else:
                self.skip(child)

    def pci(self, element: Element, parent: str, host: int) -> None:
        bus_id = element.bus_id("busid")
        kind = _kind(element)
        id = f"{_prefix(host)}pci:{bus_id}"
        if id in self.devices:
            raise element.error(f"PCI device {bus_id} is listed twice")
        attributes = tuple((key, value) for key, value in element.attributes.items() if key != "busid")
        self.add(kind, id, 0, host=host, pci_bus_id=bus_id, attributes=attributes)
        bandwidth, assumed = self.pcie_bandwidth(element, kind)
        self.link(parent, id, LinkKind.PCIE, bandwidth, assumed=assumed)
        if kind is DeviceKind.GPU and not any(child.tag == "gpu" for child in element.children):
            self.static_gpus.append(id)
        for child in element.children:
            if child.tag == "pci":
                self.pci(child, id, host)
            elif child.tag == "gpu" and kind is DeviceKind.GPU:
                self.gpu(child, id)
            elif child.tag == "nic" and kind is DeviceKind.NIC:
                self.devices[id] = replace(self.devices[id], ports=self.devices[id].ports + self.ports(child))
            else:
                self.skip(child)
        if kind is DeviceKind.PCI_DEVICE:
            self.notes[
                "a PCI device's class is not in the file or is no GPU's or NIC's, so it is not used in plans"
            ] += 1

    def gpu(self, element: Element, id: str) -> None:
        device = self.devices[id]
        if any(key == "gpu.dev" for key, _ in device.attributes):
            raise element.error(f"a second gpu in PCI device {device.pci_bus_id}")
        element.number("dev", 0, 1 << 16, required=True)
        attributes = tuple((f"gpu.{key}", value) for key, value in element.attributes.items())
        self.devices[id] = replace(device, attributes=device.attributes + attributes)
        self.gpu_elements.append((id, element))

    def shared_nic(self, element: Element, cpu: str, host: int) -> None:
        """A NIC with no PCI place: interfaces that NCCL lists under every NUMA node."""
        for port in self.ports(element):
            key = (host, port)
            if key not in self.shared_nics:
                id = f"{_prefix(host)}net:{len(self.shared_nics)}"
                self.shared_nics[key] = self.add(DeviceKind.NIC, id, 0, host=host, ports=(port,))
                self.notes[
                    "a network interface has no PCI place; it is taken as near every NUMA node it is under"
                ] += 1
            bandwidth = port.speed_gb_per_s or speeds.nic_gb_per_s(10_000)
            self.link(cpu, self.shared_nics[key], LinkKind.PCIE, bandwidth, assumed=True)

    def ports(self, element: Element) -> tuple[Port, ...]:
        ports = []
        for child in element.children:
            if child.tag != "net":
                self.skip(child)
                continue
            mbit = child.number("speed", -1, 10**8) or 0
            if mbit <= 0:
                self.notes["a NIC's speed is not in the file"] += 1
            attributes = tuple((key, value) for key, value in child.attributes.items() if key != "name")
            name = child.attributes.get("name", "")
            ports.append(Port(name, speeds.nic_gb_per_s(max(mbit, 0)), attributes))
        return tuple(ports)

    def skip(self, element: Element) -> None:
        self.notes[f"element <{element.tag[:40]}> is not understood here and is left out"] += 1

    def own_pcie(self, element: Element) -> tuple[float, float | None, bool]:
        """The link above an element by its own attributes: GB/s, GT/s, and whether both parts are known."""
        gt = speeds.parse_pcie_gt(element.attributes.get("link_speed", ""))
        width = element.number("link_width", 0, 32) or 0
        own = speeds.pcie_gb_per_s(gt or speeds.DEFAULT_PCIE_GT, width or speeds.DEFAULT_PCIE_WIDTH)
        return own, gt, gt is not None and width > 0

    def widest_below(self, element: Element) -> float:
        below = [child for child in element.children if child.tag == "pci"]
        return max((max(self.own_pcie(child)[0], self.widest_below(child)) for child in below), default=0.0)

    def pcie_bandwidth(self, element: Element, kind: DeviceKind) -> tuple[float, bool]:
        """GB/s of the link above a PCI device, and whether it is assumed."""
        own, gt, known = self.own_pcie(element)
        widest = self.widest_below(element) if gt in _IDLE_GT or not known else 0.0
        if kind is DeviceKind.PCIE_SWITCH and own < widest:
            self.notes[
                "a bridge reports a slower link (2.5 or 5 GT/s, or none) than a device below it, as an "
                "idle or virtual one does; it is taken to be as fast as that device"
            ] += 1
            return widest, True
        if not known:
            self.notes[
                f"a PCIe link's speed or width is not in the file; assumed {speeds.DEFAULT_PCIE_GT:g} "
                f"GT/s and {speeds.DEFAULT_PCIE_WIDTH} lanes for what is missing, as NCCL does"
            ] += 1
        return own, not known

    # -- the whole

    def finish(self) -> Topology:
        final = self.final_devices()
        renamed = {old: device.id for old, device in final.items()}
        self.devices = {device.id: device for device in final.values()}
        self.links = [replace(link, a=renamed[link.a], b=renamed[link.b]) for link in self.links]
        elements = [(renamed[id], element) for id, element in self.gpu_elements]
        if elements:
            counts = nccl_links.read(self.devices, elements, self.notes)
            sm = None
        else:
            gpus = [self.devices[renamed[id]] for id in self.static_gpus]
            counts, sm = nccl_links.assume_nvswitch(gpus, self.notes)
        split = len(self.links)
        nccl_links.add_fabric(self, counts, sm)
        fabric, self.links = self.links[split:], self.links[:split]
        self.sockets()
        self.links = _merged(self.links + fabric)
        try:
            return self.topology(Path(self.source).stem)
        except TopologyError as error:
            raise TopologyError(f"{self.source}: {error}") from None

    def sockets(self) -> None:
        """Every NUMA node of a host to every other, as NCCL has them."""
        unnamed = False
        for a, b in combinations(self.of(DeviceKind.CPU), 2):
            if a.host == b.host:
                speed = [speeds.socket_speed(dict(cpu.attributes)) for cpu in (a, b)]
                known = [one for one in speed if one is not None]
                rate = min(known, default=speeds.DEFAULT_SOCKET_GB_PER_S)
                self.link(a.id, b.id, LinkKind.SOCKET, rate, assumed=not known)
                unnamed |= not known
        if unnamed:
            self.notes[
                f"the CPU is not named; {speeds.DEFAULT_SOCKET_GB_PER_S:g} GB/s assumed between its NUMA "
                "nodes"
            ] += 1

    def final_devices(self) -> dict[str, Device]:
        """Final ids and indices by first id: GPUs by ``dev`` or bus order, NICs in file order."""
        final: dict[str, Device] = {}
        indices = self.gpu_indices()
        counts: Counter[DeviceKind] = Counter()
        for id, device in self.devices.items():
            index = counts[device.kind]
            counts[device.kind] += 1
            prefix = _prefix(device.host)
            if device.kind is DeviceKind.GPU:
                final[id] = replace(device, id=f"{prefix}gpu{indices[id]}", index=indices[id])
            elif device.kind is DeviceKind.NIC:
                name = "+".join(port.name for port in device.ports if port.name)
                final[id] = replace(device, id=f"{prefix}nic{index}", index=index, name=name)
            elif device.kind is DeviceKind.CPU:
                final[id] = device
            else:
                final[id] = replace(device, index=index)
        return final

    def gpu_indices(self) -> dict[str, int]:
        gpus = [id for id, device in self.devices.items() if device.kind is DeviceKind.GPU]
        numbers = {id: int(element.attributes["dev"]) for id, element in self.gpu_elements}
        if len(numbers) == len(gpus) and len(set(numbers.values())) == len(gpus):
            return numbers
        if gpus:
            reason = "are not unique" if numbers else "are not in the file"
            self.notes[f"GPU numbers {reason}; the GPUs are numbered by host, number and PCI address"] += 1
        gpus.sort(key=lambda id: (self.devices[id].host, numbers.get(id, 0), self.devices[id].pci_bus_id))
        return {id: index for index, id in enumerate(gpus)}


def _prefix(host: int) -> str:
    return f"host{host}/" if host else ""


def _kind(element: Element) -> DeviceKind:
    tags = {child.tag for child in element.children}
    pci_class = element.attributes.get("class", "").lower()
    if "gpu" in tags:
        return DeviceKind.GPU
    if "nic" in tags:
        return DeviceKind.NIC
    if "pci" in tags:
        return DeviceKind.PCIE_SWITCH
    if pci_class.startswith(("0x03", "0x12")):
        return DeviceKind.GPU
    if pci_class.startswith("0x02"):
        return DeviceKind.NIC
    return DeviceKind.PCI_DEVICE


def _merged(links: list[Link]) -> list[Link]:
    """At most one link between two devices: the first (an interface may be listed twice in one place)."""
    found: dict[frozenset[str], Link] = {}
    for link in links:
        found.setdefault(frozenset((link.a, link.b)), link)
    return list(found.values())
