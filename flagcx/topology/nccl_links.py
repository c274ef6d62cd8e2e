"""The ``nvlink`` and ``xgmi`` elements of NCCL's topology XML: the links of the GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

from flagcx.topology import speeds
from flagcx.topology.builder import Builder, Notes
from flagcx.topology.graph import Device, DeviceKind, LinkKind
from flagcx.topology.markup import Element
from flagcx.topology.nccl_elements import NVSWITCH_CLASS

#: The target that NCCL writes for a switch it cannot see, as in a virtual machine.
HIDDEN_SWITCH = "fffffff:ff:ff.0"
_MAX_LINKS = 99
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
    places: Mapping[tuple[int, str], Sequence[str]],
    notes: Notes,
) -> Counts:
    """The links of the fast fabric that the ``gpu`` elements name, each pair once.

    Args:
        devices: Every device by id.
        elements: (id of the GPU, its ``gpu`` element).
        places: Ids by host and PCI address, as the file has it; several where devices share an address.
        notes: Counts the assumptions.
    """
    ends = _Ends(devices, elements, places, notes)
    counts: Counts = {}
    loops: dict[str, int] = {}
    for id, element in elements:
        for child in element.children:
            if child.tag == "c2c":
                continue
            if child.tag not in ("nvlink", "xgmi"):
                notes.add(f"element <{child.tag[:40]}> is not understood here and is left out")
                continue
            count = child.number("count", 1, _MAX_LINKS)
            if count is None:
                count = 1
                notes.add("how many links two GPUs have makes no sense; one is assumed", child.shown("count"))
            end = ends.find(id, child)
            if end == id:
                loops[id] = count
            elif end:
                kind = LinkKind.NVLINK if child.tag == "nvlink" else LinkKind.XGMI
                counts[id, end, kind] = counts.get((id, end, kind), 0) + count
    _note_missing(devices, elements, notes)
    return _symmetric(counts, loops, notes)


class _Ends:
    """Finds the device at the other end of a link."""

    def __init__(
        self,
        devices: Mapping[str, Device],
        elements: Sequence[tuple[str, Element]],
        places: Mapping[tuple[int, str], Sequence[str]],
        notes: Notes,
    ) -> None:
        self.devices, self.notes = devices, notes
        gpus = {id for id, _ in elements}
        self.at = {key: [id for id in ids if id in gpus] for key, ids in places.items()}
        self.by_number = {
            (devices[id].host, element.attributes["dev"]): id
            for id, element in elements
            if element.number("dev", 0, 1 << 16) is not None
        }
        self.turn: Counter[tuple[int, str]] = Counter()

    def find(self, id: str, link: Element) -> str:
        """The id of a GPU, the PCI address of a switch, or "" for a link that is left out."""
        host, text = self.devices[id].host, link.attributes.get("target", "").lower()
        address = HIDDEN_SWITCH if text == HIDDEN_SWITCH else link.address("target")
        if not address:
            if end := self.by_number.get((host, text)):
                self.notes.add("a link's target is a GPU's number, not its PCI address", link.shown("target"))
                return end
            self.notes.add("a link's target is no PCI address; it is left out", link.shown("target"))
            return ""
        there = self.at.get((host, address))
        if there:
            return self._one_of(there, (host, address), id)
        if link.attributes.get("tclass", NVSWITCH_CLASS) == NVSWITCH_CLASS:
            return address
        self.notes.add(
            "a link goes to a device that is not in the file; it is left out", link.shown("target")
        )
        return ""

    def _one_of(self, there: Sequence[str], key: tuple[int, str], id: str) -> str:
        """Of several GPUs at one address each in turn, but for the GPU itself."""
        others = [other for other in there if other != id] or there
        if len(there) > 1:
            self.notes.add(
                "a link goes to an address that several GPUs have; the links are shared out among them",
                f"{key[1]}",
            )
        self.turn[key] += 1
        return others[(self.turn[key] - 1) % len(others)]


def _note_missing(
    devices: Mapping[str, Device], elements: Sequence[tuple[str, Element]], notes: Notes
) -> None:
    """Says so where GPUs that can have NVLinks name none."""
    for id, element in elements:
        sm = speeds.whole(devices[id].attribute("gpu.sm"))
        amd = bool(devices[id].attribute("gpu.gcn"))
        bare = not any(child.tag in ("nvlink", "xgmi") for child in element.children)
        if bare and not amd and sm is not None and speeds.may_have_nvlink(sm) and len(elements) > 1:
            notes.add(
                f"GPUs of compute capability {sm / 10:g} can have NVLinks, and the file names none for "
                "some of them; links may be missing (NCCL adds them on the running machine)",
                f"{id} in line {element.line}",
            )


def assume_nvswitch(gpus: Sequence[Device], notes: Notes) -> tuple[Counts, int | None]:
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
        notes.add(
            f"no NVLinks are in the file; eight GPUs of PCI device {next(iter(kinds))} are taken to be on "
            f"a board with NVSwitches, {count} NVLinks each"
        )
        return {(gpu.id, HIDDEN_SWITCH, LinkKind.NVLINK): count for gpu in gpus}, sm
    if gpus:
        notes.add(
            "no NVLinks are in the file; NCCL adds them on the running machine. Planned over PCIe alone"
        )
    return {}, None


def _symmetric(counts: Counts, loops: dict[str, int], notes: Notes) -> Counts:
    """Each pair once, with the count of whichever end names more; loops become bridged neighbours."""
    joined: Counts = {}
    for (a, b, kind), count in counts.items():
        back = counts.get((b, a, kind))
        if back is not None and back != count:
            disagreement = f"{count} from {a} to {b}, {back} back"
            notes.add("two ends of an NVLink disagree on its count; the larger is taken", disagreement)
        if (b, a, kind) not in joined:
            joined[a, b, kind] = max(count, back or 0)
    looped = list(loops)
    if looped and len(looped) % 2 == 0 and not counts and len(set(loops.values())) == 1:
        notes.add(
            "every NVLink leads back to its own GPU, as a hypervisor that hides the peer reports it; "
            "neighbours in the file are taken to be bridged in pairs"
        )
        for a, b in zip(looped[::2], looped[1::2], strict=True):
            joined[a, b, LinkKind.NVLINK] = loops[a]
    elif looped:
        notes.add("an NVLink leads back to its own GPU; it is left out", count=len(looped))
    return joined


def add_fabric(machine: Builder, counts: Counts, sm: int | None) -> None:
    """Adds links, and the NVSwitches at their ends, to a machine.

    Args:
        machine: Has every other device.
        counts: The links.
        sm: Compute capability times ten of GPUs that do not name theirs, where it is known.
    """
    devices = machine.devices
    switches: dict[tuple[int, str], str] = {}
    places = sorted({(devices[a].host, b) for a, b, _ in counts if b not in devices})
    hidden = [host for host, address in places if address == HIDDEN_SWITCH]
    for host, address in places:
        shared = address == HIDDEN_SWITCH and len(hidden) > 1
        if shared and host != hidden[0]:
            switches[host, address] = switches[hidden[0], address]
            continue
        at = -1 if shared else host
        id = f"{f'host{at}/' if at > 0 else ''}nvswitch{len(switches)}"
        switches[host, address] = machine.add(DeviceKind.NVSWITCH, id, host=at, pci_bus_id=address)
    if len(hidden) > 1:
        machine.notes.add(
            f"the GPUs of {len(hidden)} hosts have NVLinks to switches that are hidden; they are taken to be "
            "one NVLink domain, as NCCL puts only such hosts into one file"
        )
    for (a, b, kind), count in counts.items():
        end = switches.get((devices[a].host, b), b)
        rates = [_rate(devices[id], kind, sm) for id in (a, end) if id not in switches.values()]
        rate = min((known for known in rates if known is not None), default=None)
        if rate is None:
            rate = speeds.DEFAULT_NVLINK_GB_PER_S if kind is LinkKind.NVLINK else speeds.DEFAULT_XGMI_GB_PER_S
            machine.notes.add(
                f"a GPU's model is not in the file; {rate:g} GB/s assumed for each of its {kind.value} links"
            )
        machine.link(a, end, kind, rate * count, count, assumed=not any(rates))
    for host in sorted({key[0] for key in switches}):
        own = [switch for key, switch in sorted(switches.items()) if key[0] == host]
        _join_boards(machine, own)


def _join_boards(machine: Builder, switches: Sequence[str]) -> None:
    """Joins the NVSwitches of boards with GPUs of their own (a DGX-2's); files don't have those links."""
    ends = {switch: [link for link in machine.links if switch in (link.a, link.b)] for switch in switches}
    boards: dict[frozenset[str], list[str]] = {}
    for switch, links in ends.items():
        boards.setdefault(frozenset(link.other(switch) for link in links), []).append(switch)
    alone = [gpus for gpus in boards if all(gpus.isdisjoint(other) for other in boards if other != gpus)]
    if len(boards) < 2 or len(alone) < len(boards) or len({len(board) for board in boards.values()}) > 1:
        return
    for one, other in combinations(boards.values(), 2):
        for a, b in zip(one, other, strict=True):
            least = min((ends[a], ends[b]), key=lambda links: sum(link.bandwidth_gb_per_s for link in links))
            speed = sum(link.bandwidth_gb_per_s for link in least)
            machine.link(a, b, least[0].kind, speed, sum(link.count for link in least), assumed=True)
    machine.notes.add(
        f"{len(boards)} groups of GPUs have NVSwitches of their own; these are taken to be joined, switch by "
        "switch, by as many NVLinks as their GPUs have, as on a DGX-2"
    )


def _rate(gpu: Device, kind: LinkKind, sm: int | None) -> float | None:
    if kind is LinkKind.XGMI:
        return speeds.xgmi_gb_per_s(gpu.attribute("gpu.gcn"))
    text = gpu.attribute("gpu.sm")
    return speeds.nvlink_gb_per_s(speeds.whole(text) or sm)


def add_c2c(machine: Builder, elements: Sequence[tuple[str, Element]], cpus: Mapping[str, str]) -> None:
    """Adds the links between GPUs and the CPU of their superchip (``c2c``: links, and MB/s of each).

    Args:
        machine: Has every device.
        elements: (id of the GPU, its ``gpu`` element).
        cpus: Id of each GPU's NUMA node.
    """
    for id, element in elements:
        for child in (child for child in element.children if child.tag == "c2c"):
            count, mb_per_s = child.number("count", 1, _MAX_LINKS), child.number("bw", 1, 10**7)
            if count is None or mb_per_s is None:
                machine.notes.add(
                    "a C2C link's count or bandwidth makes no sense; it is left out", f"in line {child.line}"
                )
            else:
                machine.link(id, cpus[id], LinkKind.C2C, count * mb_per_s / 1000, count)
