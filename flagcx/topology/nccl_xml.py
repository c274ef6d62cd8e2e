"""Reads the topology XML of NCCL (``NCCL_TOPO_DUMP_FILE``, ``NCCL_TOPO_FILE``) and of RCCL.

A file lists NUMA nodes (``cpu``), below them PCIe bridges, GPUs with their NVLinks or xGMI links, and NICs.
Static files of cloud vendors leave out the facts that NCCL finds by itself; these are assumed as NCCL
assumes them, and ``Topology.notes`` says so.

Source: NCCL ``src/graph/xml.cc``, versions 1 (NCCL) and 2 (RCCL, with ``xgmi`` and ``gcn``).
"""

from __future__ import annotations

import itertools
import string
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology import markup, nccl_links, pasted, speeds
from flagcx.topology import nccl_elements as elements
from flagcx.topology.builder import Builder, Notes
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind
from flagcx.topology.markup import Element
from flagcx.topology.topology import Topology

#: NUMA nodes of one file; every two of a host are joined, so their number is bounded.
_MOST_CPUS = 512


def parse(text: str, source: str = "<text>", *, sm: int | None = None) -> Topology:
    """Reads a topology from text.

    Args:
        text: The XML, perhaps with text around it.
        source: Its name in messages.
        sm: Compute capability times ten of the GPUs, where the text does not name it.

    Returns:
        The machine. ``notes`` names facts that the text lacks, and the assumptions made for them.

    Raises:
        TopologyError: It is not a topology; names source, line and reason.
    """
    xml, others = pasted.document(text)
    root = markup.parse(xml, source)
    reader = _Reader(source, sm)
    _check_root(root, reader.notes)
    if others:
        told = _difference(xml.removesuffix("</system>"), others[0])
        reader.notes.add(f"the text has {len(others) + 1} topologies; the first is read, and the next {told}")
    return reader.read(root)


def _difference(*texts: str) -> str:
    """How a document differs from the one that is read."""
    one, other = (text.partition("<system")[2].split() for text in texts)
    gpus, further = (text.count("<gpu ") for text in texts)
    if gpus != further:
        return f"has {further} GPUs, not {gpus}"
    return "is the same" if one == other else "is another, with as many GPUs"


def _check_root(root: Element, notes: Notes) -> None:
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
        notes.add(
            "the topology's version is neither 1 (NCCL) nor 2 (RCCL); it is read as these are",
            root.shown("version"),
        )


class _Reader(Builder):
    """Reads one file."""

    def __init__(self, source: str, sm: int | None) -> None:
        super().__init__()
        self.source, self.sm = source, sm
        self.hosts: dict[str, int] = {}
        self.gpu_elements: list[tuple[str, Element]] = []
        self.static_gpus: list[str] = []
        self.shared_nics: dict[tuple, str] = {}
        self.found: dict[tuple[int, str], list[str]] = {}  # ids by host and address, as the file has it
        self.above: dict[str, tuple[str, str]] = {}  # NUMA node and PCI device above, by id

    # -- elements

    def read(self, root: Element) -> Topology:
        for element in root.children:
            if element.tag == "cpu":
                self.cpu(element)
            else:
                elements.skip(element, self.notes)
        if not self.of(DeviceKind.CPU):
            raise TopologyError(f"{self.source}: no <cpu> element, so no machine; expected at least one")
        return self.finish()

    def cpu(self, element: Element) -> None:
        elements.check(element, self.notes)
        key = element.attributes.get("host_hash", "")
        host = self.hosts.setdefault(key, len(self.hosts))
        index = element.number("numaid", -1, 1 << 16)
        if index is None:
            index = -1
            self.notes.add(
                "a CPU's numaid is no NUMA node's number; its node is not known", element.shown("numaid")
            )
        elif index < 0:
            self.notes.add("numaid is -1, so the GPUs' NUMA node is not known")
        if set(element.attributes.get("affinity", "")) - {*string.hexdigits, ","}:
            self.notes.add("a CPU's affinity is no mask", element.shown("affinity"))
        id = f"{_prefix(host)}cpu{max(index, 0)}"
        if id in self.devices and self.devices[id].index != index:
            id += "b"  # node 0, and one whose number is not known
        if id in self.devices:
            self.notes.add(f"NUMA node {index} is listed more than once; its parts are put together")
        else:
            if len(self.of(DeviceKind.CPU)) >= _MOST_CPUS:
                raise element.error(f"over {_MOST_CPUS} NUMA nodes; refused")
            self.add(DeviceKind.CPU, id, index, host=host, attributes=tuple(element.attributes.items()))
        for child in element.children:
            if child.tag == "pci":
                self.pci(child, id, id)
            elif child.tag == "nic":
                self.shared_nic(child, id, host)
            elif child.tag == "gpu":
                self.gpu(child, self.extra(DeviceKind.GPU, id, id))
            else:
                elements.skip(child, self.notes)

    def pci(self, element: Element, parent: str, cpu: str) -> None:
        elements.check(element, self.notes)
        kind, host = elements.kind(element), self.devices[cpu].host
        given = element.address("busid")
        same = self.found.setdefault((host, given), []) if given else []
        twin = next((id for id in same if self.above[id] == (cpu, parent)), "")
        if twin and kind is self.devices[twin].kind is DeviceKind.PCIE_SWITCH:
            id = twin
            self.notes.add(
                "a PCI bridge is listed more than once; its parts are put together", element.shown("busid")
            )
        else:
            address = given if given and not same else self.own_address()
            if not given:
                self.notes.add("a PCI device has no valid address", element.shown("busid"))
            elif same:
                self.notes.add(
                    "two PCI devices have the same address; they are kept apart", element.shown("busid")
                )
            id = f"{_prefix(host)}pci:{address}"
            facts = {"class": elements.CLASS[kind]} if kind in (DeviceKind.GPU, DeviceKind.NIC) else {}
            facts |= {key: value for key, value in element.attributes.items() if key != "busid"}
            attributes = tuple(facts.items())
            self.add(kind, id, 0, host=host, pci_bus_id=address, attributes=attributes)
            self.above[id] = cpu, parent
            same.append(id)
            bandwidth, assumed = elements.pcie_gb_per_s(element, kind, self.notes)
            self.link(parent, id, LinkKind.PCIE, bandwidth, assumed=assumed)
        if kind is DeviceKind.GPU and not any(child.tag == "gpu" for child in element.children):
            self.static_gpus.append(id)
        self.ends(element, id, kind, cpu, same)
        if kind is DeviceKind.PCI_DEVICE:
            self.notes.add(
                "a PCI device's class is not in the file or is no GPU's or NIC's, so it is not used in plans"
            )

    def ends(self, element: Element, id: str, kind: DeviceKind, cpu: str, same: list[str]) -> None:
        """The children of a PCI device: devices below it, and what it is itself."""
        free = kind is DeviceKind.GPU
        for child in element.children:
            if child.tag == "pci":
                self.pci(child, id, cpu)
            elif child.tag == "gpu" and free:
                self.gpu(child, id)
                free = False
            elif child.tag == "gpu":
                twin = self.extra(
                    DeviceKind.GPU, id if kind is not DeviceKind.GPU else self.above[id][1], cpu
                )
                same.append(twin)
                self.gpu(child, twin)
            elif child.tag in ("nic", "net"):
                nic = id if kind is DeviceKind.NIC else self.extra(DeviceKind.NIC, id, cpu)
                ports = elements.ports([child] if child.tag == "net" else child.children, self.notes)
                self.devices[nic] = replace(self.devices[nic], ports=self.devices[nic].ports + ports)
            else:
                elements.skip(child, self.notes)

    def extra(self, kind: DeviceKind, parent: str, cpu: str) -> str:
        """A GPU or NIC that has no PCI device of its own in the file."""
        self.notes.add(
            f"a {kind.value.upper()} shares its PCI device with another or has none; it is kept apart, with "
            "a PCIe link of its own"
        )
        host, address = self.devices[cpu].host, self.own_address()
        id = f"{_prefix(host)}pci:{address}"
        self.add(kind, id, 0, host=host, pci_bus_id=address, attributes=(("class", elements.CLASS[kind]),))
        self.above[id] = cpu, parent
        self.link(parent, id, LinkKind.PCIE, speeds.pcie_gb_per_s(), assumed=True)
        return id

    def own_address(self) -> str:
        """An address that no hardware has, for a device without one of its own."""
        number = len(self.devices)
        return f"{0xFFFE0000 + (number >> 13):08x}:{number >> 5 & 255:02x}:{number & 31:02x}.0"

    def gpu(self, element: Element, id: str) -> None:
        elements.check(element, self.notes)
        device = self.devices[id]
        if element.number("dev", 0, 1 << 16) is None:
            self.notes.add("a GPU's number makes no sense or is missing", element.shown("dev"))
        if "sm" in element.attributes and element.number("sm", 1, 999) is None:
            self.notes.add("a GPU's sm is no compute capability times ten", element.shown("sm"))
        attributes = tuple((f"gpu.{key}", value) for key, value in element.attributes.items())
        self.devices[id] = replace(device, attributes=device.attributes + attributes)
        self.gpu_elements.append((id, element))

    def shared_nic(self, element: Element, cpu: str, host: int) -> None:
        """A NIC with no PCI place: interfaces that NCCL lists under every NUMA node."""
        for port in elements.ports(element.children, self.notes):
            key = (host, port)
            if key not in self.shared_nics:
                id = f"{_prefix(host)}net:{len(self.shared_nics)}"
                self.shared_nics[key] = self.add(DeviceKind.NIC, id, 0, host=host, ports=(port,))
                self.notes.add(
                    "a network interface has no PCI place; it is taken as near every NUMA node it is under"
                )
            bandwidth = port.speed_gb_per_s or speeds.DEFAULT_NIC_GB_PER_S
            self.link(cpu, self.shared_nics[key], LinkKind.PCIE, bandwidth, assumed=True)

    # -- the whole

    def finish(self) -> Topology:
        final = self.final_devices()
        renamed = {old: device.id for old, device in final.items()}
        self.devices = {device.id: device for device in final.values()}
        self.links = [replace(link, a=renamed[link.a], b=renamed[link.b]) for link in self.links]
        gpus = [(renamed[id], element) for id, element in self.gpu_elements]
        if gpus:
            places = {key: [renamed[id] for id in ids] for key, ids in self.found.items()}
            counts = nccl_links.read(self.devices, gpus, places, self.notes)
            sm = self.sm
        else:
            static = [self.devices[renamed[id]] for id in self.static_gpus]
            counts, sm = nccl_links.assume_nvswitch(static, self.notes)
            sm = self.sm or sm
        split = len(self.links)
        nccl_links.add_fabric(self, counts, sm)
        cpus = {renamed[id]: renamed[cpu] for id, (cpu, _) in self.above.items()}
        nccl_links.add_c2c(self, gpus, cpus)
        fabric, self.links = self.links[split:], self.links[:split]
        self.sockets()
        self.links = _merged(fabric + self.links)
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
            self.notes.add(
                f"the CPU is not named; {speeds.DEFAULT_SOCKET_GB_PER_S:g} GB/s assumed between its NUMA "
                "nodes"
            )

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
        given = {id: element.number("dev", 0, 1 << 16) for id, element in self.gpu_elements}
        numbers = {id: number for id, number in given.items() if number is not None}
        unique = len(set(numbers.values())) == len(numbers)
        if numbers and unique:
            free = (index for index in itertools.count() if index not in set(numbers.values()))
            return {id: numbers[id] if id in numbers else next(free) for id in gpus}
        if gpus:
            reason = "are not unique" if numbers else "are not in the file"
            self.notes.add(f"GPU numbers {reason}; the GPUs are numbered by host, number and PCI address")
        gpus.sort(key=lambda id: (self.devices[id].host, numbers.get(id, 0), self.devices[id].pci_bus_id))
        return {id: index for index, id in enumerate(gpus)}


def _prefix(host: int) -> str:
    return f"host{host}/" if host else ""


def _merged(links: list[Link]) -> list[Link]:
    """At most one link between two devices: the first (an interface may be listed twice in one place, and
    a GPU may be joined to its CPU by C2C and PCIe)."""
    found: dict[frozenset[str], Link] = {}
    for link in links:
        found.setdefault(frozenset((link.a, link.b)), link)
    return list(found.values())
