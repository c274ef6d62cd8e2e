"""Writes a topology as NCCL's XML, so that it can be handed to ``NCCL_TOPO_FILE``.

Links of the network between hosts, PCIe roots and ids have no place in NCCL's format and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import quoteattr

from flagcx.errors import TopologyError
from flagcx.topology import speeds
from flagcx.topology.graph import Device, DeviceKind, Graph, Link, LinkKind
from flagcx.topology.nccl_elements import CLASS, NVSWITCH_CLASS
from flagcx.topology.nccl_links import HIDDEN_SWITCH


def write(topology: Graph, path: str | Path) -> None:
    """Writes a topology file for ``NCCL_TOPO_FILE``.

    Args:
        topology: One machine.
        path: The file to write.

    Raises:
        TopologyError: The topology cannot be said in NCCL's format, or the file cannot be written.
    """
    text = format_xml(topology)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{path}: cannot be written: {error.strerror or error}") from None


def format_xml(topology: Graph) -> str:
    """A topology as NCCL's XML text; see ``write``. ``nccl_xml.parse`` reads it back.

    Raises:
        TopologyError: A GPU or NIC hangs below no NUMA node, so that NCCL could not place it.
    """
    xgmi = any(link.kind is LinkKind.XGMI for link in topology.links)
    lines = [f'<system version="{2 if xgmi else 1}">']
    writer = _Writer(topology)
    for cpu in topology.devices(DeviceKind.CPU):
        lines += writer.cpu(cpu)
    missing = [
        device.id
        for device in topology.devices()
        if device.kind in (DeviceKind.GPU, DeviceKind.NIC) and device.id not in writer.written
    ]
    if missing:
        raise TopologyError(
            f"{missing[0]} of {topology!r} hangs below no NUMA node, and NCCL's format can only place "
            "it there"
        )
    return "\n".join([*lines, "</system>", ""])


class _Writer:
    """Walks the PCIe trees below the NUMA nodes."""

    def __init__(self, topology: Graph) -> None:
        self.topology = topology
        self.written: set[str] = set()
        self.order = {device.id: position for position, device in enumerate(topology.devices())}

    def cpu(self, cpu: Device) -> Iterator[str]:
        given = {key: value for key, value in cpu.attributes if key != "package"}
        numa = given.pop("numaid", str(cpu.index))
        if len(self.topology.hosts) > 1:
            given.setdefault("host_hash", hex(cpu.host + 1))
        first = {"host_hash": given.pop("host_hash")} if "host_hash" in given else {}
        yield f"  <cpu{_attributes({**first, 'numaid': numa, **given})}>"
        yield from self.below(cpu, "", "    ")
        yield "  </cpu>"

    def below(self, device: Device, parent: str, indent: str) -> Iterator[str]:
        """The PCI devices under one, and the interfaces with no PCI place."""
        around = self.topology.links_of(device.id)
        children = [id for id, link in around.items() if self.hangs(id, link) and id != parent]
        for id in sorted(children, key=self.order.__getitem__):
            child = self.topology.device(id)
            if child.kind is DeviceKind.HOST_BRIDGE:
                yield from self.below(child, device.id, indent)
            elif child.kind is DeviceKind.NIC and self.placeless(child):
                self.written.add(id)
                yield from _element("nic", {}, list(self.nets(child, indent + "  ")), indent)
            elif child.kind is not DeviceKind.CPU and id not in self.written:
                yield from self.pci(child, device.id, around[id], indent)

    def hangs(self, id: str, link: Link) -> bool:
        """Whether a device stands in the file where a link ends: by PCIe, or by C2C if it has no PCIe."""
        others = self.topology.links_of(id).values()
        bare = link.kind is LinkKind.C2C and all(other.kind is not LinkKind.PCIE for other in others)
        return link.kind is LinkKind.PCIE or bare

    def placeless(self, nic: Device) -> bool:
        return not nic.pci_bus_id and all(
            self.topology.device(id).kind is DeviceKind.CPU for id in self.topology.links_of(nic.id)
        )

    def pci(self, device: Device, parent: str, link: Link, indent: str) -> Iterator[str]:
        self.written.add(device.id)
        inside = list(self.below(device, parent, indent + "  "))
        if device.kind is DeviceKind.GPU:
            inside += self.gpu(device, indent + "  ")
        elif device.kind is DeviceKind.NIC and device.ports:
            inside += _element("nic", {}, list(self.nets(device, indent + "    ")), indent + "  ")
        given = {"busid": self.bus_id(device), **self.pci_attributes(device, link)}
        yield from _element("pci", given, inside, indent)

    def bus_id(self, device: Device) -> str:
        """Its address, or one of its own where it has none (after every address that hardware has)."""
        return (
            device.pci_bus_id or f"ffff:{self.order[device.id] // 32:02x}:{self.order[device.id] % 32:02x}.0"
        )

    def pci_attributes(self, device: Device, link: Link) -> dict[str, str]:
        given = {key: value for key, value in device.attributes if not key.startswith("gpu.")}
        if given or device.kind is DeviceKind.PCI_DEVICE:
            return given
        gt, width = speeds.pcie_form(link.bandwidth_gb_per_s)
        return {"class": CLASS[device.kind], "link_speed": f"{gt:.1f} GT/s PCIe", "link_width": str(width)}

    def gpu(self, device: Device, indent: str) -> Iterator[str]:
        known = [(key, value) for key, value in device.attributes if key != "gpu.numa_id"]  # NCCL has none
        given = {key[4:]: value for key, value in known if key.startswith("gpu.")}
        if known and not given:  # of a static file
            return
        number = device.index
        if len(self.topology.hosts) > 1:
            number = [gpu.id for gpu in self.topology.gpus if gpu.host == device.host].index(device.id)
        given = given if "dev" in given else {"dev": str(number), **given, "rank": str(device.index)}
        around = self.topology.links_of(device.id).items()
        links = [f"{indent}  {self.fabric(id, link)}" for id, link in around if link.kind.is_gpu_fabric]
        for _, link in around:
            if link.kind is LinkKind.C2C:
                speed = {"bw": f"{1000 * link.bandwidth_gb_per_s / link.count:.0f}", "count": str(link.count)}
                links.append(f"{indent}  <c2c{_attributes(speed)}/>")
        yield from _element("gpu", given, links, indent)

    def fabric(self, id: str, link: Link) -> str:
        other = self.topology.device(id)
        given = {
            "target": other.pci_bus_id or HIDDEN_SWITCH,
            "count": str(link.count),
            "tclass": NVSWITCH_CLASS,
        }
        if other.kind is DeviceKind.GPU:
            given["target"] = self.bus_id(other)
            given["tclass"] = other.attribute("class", CLASS[DeviceKind.GPU])
        return f"<{link.kind.value}{_attributes(given)}/>"

    def nets(self, nic: Device, indent: str) -> Iterator[str]:
        for number, port in enumerate(nic.ports):
            given = dict(port.attributes)
            if not port.attributes:
                given = {"dev": str(nic.index), "port": str(number + 1)}
                given |= {"speed": f"{port.speed_gb_per_s * 8000:.0f}"} if port.speed_gb_per_s else {}
                given |= {"guid": hex(nic.index + 1), "maxconn": "131072", "gdr": "1"}
            yield f"{indent}<net{_attributes({'name': port.name, **given})}/>"


def _element(tag: str, given: dict[str, str], inside: list[str], indent: str) -> Iterator[str]:
    if inside:
        yield f"{indent}<{tag}{_attributes(given)}>"
        yield from inside
        yield f"{indent}</{tag}>"
    else:
        yield f"{indent}<{tag}{_attributes(given)}/>"


def _attributes(given: dict[str, str]) -> str:
    return "".join(f" {key}={quoteattr(value)}" for key, value in given.items())
