"""The ``nvlink`` and ``xgmi`` elements of NCCL's topology XML: the links of the GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flagcx.topology import speeds
from flagcx.topology.builder import Builder
from flagcx.topology.graph import Device, DeviceKind, LinkKind
from flagcx.topology.markup import Element

#: The target that NCCL writes for a switch it cannot see, as in a virtual machine.
HIDDEN_SWITCH = "fffffff:ff:ff.0"
_SWITCH_CLASS = "0x068000"
_MAX_LINKS = 1024
#: PCI device ids of GPUs that come in boards of eight with NVSwitches: compute capability, NVLinks.
_NVSWITCH_BOARDS = {
    "0x20b0": (80, 12),
    "0x20b2": (80, 12),
    "0x2324": (90, 8),
    "0x2330": (90, 18),
    "0x2335": (90, 18),
    "0x2901": (100, 18),
}


#: NVLinks or xGMI links by (GPU id, id of the GPU or PCI address of the switch at the other end, kind).
Counts = dict[tuple[str, str, LinkKind], int]


def read(
    devices: Mapping[str, Device],
    elements: Sequence[tuple[str, Element]],
    notes: Counter[str],
) -> Counts:
    """The links of the fast fabric that the ``gpu`` elements name, each pair once.

    Args:
        devices: Every device by id.
        elements: (id of the GPU, its ``gpu`` element).
        notes: Counts the assumptions.

    Raises:
        TopologyError: A link's target or count is not valid.
    """
    by_bus = {(devices[id].host, devices[id].pci_bus_id): id for id, _ in elements}
    counts: Counts = {}
    loops: dict[str, int] = {}
    for id, element in elements:
        for child in element.children:
            if child.tag not in ("nvlink", "xgmi"):
                notes[f"element <{child.tag[:40]}> is not understood here and is left out"] += 1
                continue
            target = child.bus_id("target", HIDDEN_SWITCH)
            count = child.number("count", 1, _MAX_LINKS, required=True) or 0
            end = by_bus.get((devices[id].host, target))
            if end is None and child.attributes.get("tclass", _SWITCH_CLASS) == _SWITCH_CLASS:
                end = target
            if end is None:
                notes["an NVLink goes to a device that is not in the file; it is left out"] += 1
            elif end == id:
                loops[id] = count
            else:
                kind = LinkKind.NVLINK if child.tag == "nvlink" else LinkKind.XGMI
                counts[id, end, kind] = counts.get((id, end, kind), 0) + count
    return _symmetric(counts, loops, notes)


def assume_nvswitch(gpus: Sequence[Device], notes: Counter[str]) -> tuple[Counts, int | None]:
    """The links of a static file that names none, where its GPUs are of a kind that always has NVSwitches.

    Args:
        gpus: The file's GPUs.
        notes: Counts the assumptions.

    Returns:
        The links, and the GPUs' compute capability times ten where that is known.
    """
    kinds = {gpu.attribute("device").lower() for gpu in gpus}
    if len(gpus) == 8 and len(kinds) == 1 and (board := _NVSWITCH_BOARDS.get(next(iter(kinds)))):
        sm, count = board
        notes[
            f"no NVLinks are in the file; eight GPUs of PCI device {next(iter(kinds))} are taken to be on "
            f"a board with NVSwitches, {count} NVLinks each"
        ] += 1
        return {(gpu.id, HIDDEN_SWITCH, LinkKind.NVLINK): count for gpu in gpus}, sm
    if gpus:
        notes[
            "no NVLinks are in the file; NCCL adds them on the running machine. Planned over PCIe alone"
        ] += 1
    return {}, None


def _symmetric(counts: Counts, loops: dict[str, int], notes: Counter[str]) -> Counts:
    """Each pair once, with the count of whichever end names more; loops become bridged neighbours."""
    joined: Counts = {}
    for (a, b, kind), count in counts.items():
        back = counts.get((b, a, kind))
        if back is not None and back != count:
            notes["two ends of an NVLink disagree on its count; the larger is taken"] += 1
        if (b, a, kind) not in joined:
            joined[a, b, kind] = max(count, back or 0)
    looped = list(loops)
    if looped and len(looped) % 2 == 0 and not counts and len(set(loops.values())) == 1:
        notes[
            "every NVLink leads back to its own GPU, as a hypervisor that hides the peer reports it; "
            "neighbours in the file are taken to be bridged in pairs"
        ] += 1
        for a, b in zip(looped[::2], looped[1::2], strict=True):
            joined[a, b, LinkKind.NVLINK] = loops[a]
    elif looped:
        notes["an NVLink leads back to its own GPU; it is left out"] += len(looped)
    return joined


def add_fabric(machine: Builder, counts: Counts, sm: int | None) -> None:
    """Adds links, and the NVSwitches at their ends, to a machine.

    Args:
        machine: Has every other device.
        counts: The links.
        sm: Compute capability times ten, where the file does not name it and it is known.
    """
    devices = machine.devices
    switches: dict[tuple[int, str], str] = {}
    for host, bus_id in sorted({(devices[a].host, b) for a, b, _ in counts if b not in devices}):
        id = f"{f'host{host}/' if host else ''}nvswitch{len(switches)}"
        switches[host, bus_id] = machine.add(DeviceKind.NVSWITCH, id, host=host, pci_bus_id=bus_id)
    for (a, b, kind), count in counts.items():
        end = switches.get((devices[a].host, b), b)
        rates = [_rate(devices[id], kind, sm) for id in (a, end) if id not in switches.values()]
        rate = min((known for known in rates if known is not None), default=None)
        if rate is None:
            rate = speeds.DEFAULT_NVLINK_GB_PER_S if kind is LinkKind.NVLINK else speeds.DEFAULT_XGMI_GB_PER_S
            machine.notes[
                f"a GPU's model is not in the file; {rate:g} GB/s assumed for each of its {kind.value} links"
            ] += 1
        machine.link(a, end, kind, rate * count, count, assumed=not any(rates))


def _rate(gpu: Device, kind: LinkKind, sm: int | None) -> float | None:
    if kind is LinkKind.XGMI:
        return speeds.xgmi_gb_per_s(gpu.attribute("gpu.gcn"))
    text = gpu.attribute("gpu.sm")
    return speeds.nvlink_gb_per_s(sm or (int(text) if text.isdecimal() and len(text) < 6 else None))
