"""What single elements of NCCL's topology XML say: kind, speed of a link, ports. Nonsense becomes a note."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from flagcx.topology import speeds
from flagcx.topology.builder import Notes
from flagcx.topology.graph import DeviceKind, Port
from flagcx.topology.markup import Element

#: The PCI class that is written for a device of each kind.
CLASS = MappingProxyType(
    {DeviceKind.GPU: "0x030200", DeviceKind.NIC: "0x020000", DeviceKind.PCIE_SWITCH: "0x060400"}
)
#: The PCI class of NVSwitches, by which the end of an NVLink is told.
NVSWITCH_CLASS = "0x068000"
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_IDLE_GT = (2.5, 5.0)
#: Faster than any port; a larger number is in another unit.
_MOST_MBIT = 10_000_000
_PCI = ("busid", "class", "vendor", "device", "subsystem_vendor", "subsystem_device")
#: The attributes of each element that are read, or known to say nothing about the machine's links.
_KNOWN = MappingProxyType(
    {
        "cpu": {"host_hash", "numaid", "affinity", "arch", "vendor", "familyid", "modelid"},
        "pci": {*_PCI, "link_speed", "link_width"},
        "gpu": {"dev", "sm", "rank", "gdr", "gcn", "arch"},
        "net": {"name", "dev", "latency", "speed", "port", "guid", "maxconn", "gdr", "coll", "net", "gin"},
    }
)


def check(element: Element, notes: Notes) -> None:
    """Notes the attributes that are not understood."""
    for name in element.attributes:
        if name not in _KNOWN[element.tag]:
            notes.add(f"attribute {name[:40]} of <{element.tag}> is not understood here", element.shown(name))


def skip(element: Element, notes: Notes) -> None:
    """Notes an element that is not understood where it stands."""
    tag = element.tag[:40]
    notes.add(f"element <{tag}> is not understood here and is left out", f"in line {element.line}")


def kind(element: Element) -> DeviceKind:
    """The kind of a ``pci`` element: by its children, or else by its class."""
    tags = {child.tag for child in element.children}
    pci_class = element.attributes.get("class", "").lower()
    if "pci" in tags:
        return DeviceKind.PCIE_SWITCH
    if "gpu" in tags:
        return DeviceKind.GPU
    if tags & {"nic", "net"}:
        return DeviceKind.NIC
    if pci_class.startswith(("0x03", "0x12")):
        return DeviceKind.GPU
    if pci_class.startswith("0x02"):
        return DeviceKind.NIC
    return DeviceKind.PCI_DEVICE


def ports(elements: Sequence[Element], notes: Notes) -> tuple[Port, ...]:
    """The ports of a NIC, by its ``net`` elements."""
    found = []
    for child in elements:
        if child.tag != "net":
            skip(child, notes)
            continue
        check(child, notes)
        attributes = tuple((key, value) for key, value in child.attributes.items() if key != "name")
        speed = speeds.nic_gb_per_s(_mbit(child, notes))
        found.append(Port(child.attributes.get("name", ""), speed, attributes))
    return tuple(found)


def _mbit(net: Element, notes: Notes) -> float:
    """The speed of a port in Mbit/s; 0 where the file does not have it."""
    given = net.number("speed", 1, 10**15) or 0
    speed: float = given
    while speed > _MOST_MBIT:
        speed /= 1000
    if given > _MOST_MBIT:
        notes.add(
            "a NIC's speed is too large for Mbit/s; it is taken as given in kbit/s or bit/s",
            net.shown("speed"),
        )
    elif not given:
        notes.add("a NIC's speed is missing or makes no sense", net.shown("speed"))
    return speed


def pcie_gb_per_s(element: Element, kind: DeviceKind, notes: Notes) -> tuple[float, bool]:
    """GB/s of the link above a PCI device, and whether it is assumed."""
    own, gt, known = _own_pcie(element)
    widest = _widest_below(element) if gt in _IDLE_GT or not known else 0.0
    if kind is DeviceKind.PCIE_SWITCH and own < widest:
        notes.add(
            "a bridge reports a slower link (2.5 or 5 GT/s, or none that makes sense) than a device below "
            "it, as an idle or virtual one does; it is taken to be as fast as that device"
        )
        return widest, True
    if not known:
        notes.add(
            f"a PCIe link's speed or width is missing or makes no sense; assumed {speeds.DEFAULT_PCIE_GT:g} "
            f"GT/s and {speeds.DEFAULT_PCIE_WIDTH} lanes for it, as NCCL does",
            element.shown("link_width" if gt is not None else "link_speed"),
        )
    return own, not known


def _own_pcie(element: Element) -> tuple[float, float | None, bool]:
    """The link above an element by its own attributes: GB/s, GT/s, and whether both parts are known."""
    gt = speeds.parse_pcie_gt(element.attributes.get("link_speed", ""))
    width = element.number("link_width", 1, 32) or 0
    width = width if width in _WIDTHS else 0
    return speeds.pcie_gb_per_s(gt, width), gt, gt is not None and width > 0


def _widest_below(element: Element) -> float:
    below = [child for child in element.children if child.tag == "pci"]
    return max((max(_own_pcie(child)[0], _widest_below(child)) for child in below), default=0.0)
