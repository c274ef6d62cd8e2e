"""Builds the plainest machine that has a given ``nvidia-smi topo -m`` matrix.

Classes PIX, PXB, PHB, NODE, SYS are nested: devices within PIX of each other share a switch, within PXB a
tree of switches, within PHB a PCIe root, within NODE a NUMA node. Each level is therefore a partition,
found by joining devices whose cell is of that level or nearer; cells that NVLink hides follow from the
rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from flagcx.topology import speeds
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind, Port
from flagcx.topology.smi_matrix import Matrix
from flagcx.topology.topology import Topology

_LEVELS = ("PIX", "PXB", "PHB", "NODE")
_MOST_LINKS = 18
_UNBOUND_GB_PER_S = 1000.0
#: What a GPU with so many NVLinks in all is taken for: compute capability and PCIe GT/s.
_BY_LINKS = {2: (75, 8.0), 4: (86, 16.0), 6: (70, 8.0), 12: (80, 16.0), 18: (90, 32.0)}


def build(matrix: Matrix, name: str, sm: int | None) -> Topology:
    """The machine of a matrix.

    Args:
        matrix: The cells.
        name: The topology's name.
        sm: Compute capability times ten, or None to guess it from the number of NVLinks.
    """
    return _Builder(matrix, sm).build(name)


@dataclass(slots=True)
class _Builder:
    matrix: Matrix
    sm: int | None
    gt: float = speeds.DEFAULT_PCIE_GT
    devices: dict[str, Device] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: Counter[DeviceKind] = field(default_factory=Counter)

    def build(self, name: str) -> Topology:
        numbers = self.nvlinks()
        self.ends()
        parts = self.partitions()
        for position, members in enumerate(parts["NODE"]):
            cpu = self.cpu(members, position)
            roots = [part for part in parts["PHB"] if part[0] in members]
            for root in roots:
                self.root(root, cpu, parts)
        cpus = [device.id for device in self.devices.values() if device.kind is DeviceKind.CPU]
        for a, b in combinations(cpus, 2):
            self.link(a, b, LinkKind.SOCKET, speeds.DEFAULT_SOCKET_GB_PER_S, speeds.SOCKET_LATENCY_US)
        self.fabric(numbers)
        self.notes.append(
            f"the text has no bandwidths; assumed {self.gt:g} GT/s PCIe with {speeds.DEFAULT_PCIE_WIDTH} "
            f"lanes and {speeds.DEFAULT_SOCKET_GB_PER_S:g} GB/s between NUMA nodes"
        )
        order = sorted(self.devices.values(), key=lambda device: device.kind is not DeviceKind.GPU)
        return Topology(order, self.links, name=name, notes=self.notes)

    # -- what NVLink says

    def nvlinks(self) -> dict[tuple[str, str], int]:
        """NVLinks by pair; settles which GPU this is taken for."""
        cells = self.matrix.cells
        numbers = {
            (a, b): int(cells[a, b][2:])
            for a, b in combinations(self.matrix.gpus, 2)
            if cells[a, b].startswith("NV")
        }
        numbers = {pair: count for pair, count in numbers.items() if count > 0}
        if numbers:
            totals = [sum(c for pair, c in numbers.items() if gpu in pair) for gpu in self.matrix.gpus]
            most = max(totals) if max(totals) <= _MOST_LINKS else max(numbers.values())
            guess = _BY_LINKS.get(most)
            if guess is not None:
                self.gt = guess[1]
            if self.sm is None:
                self.sm = guess[0] if guess else None
                rate = speeds.nvlink_gb_per_s(self.sm) or speeds.DEFAULT_NVLINK_GB_PER_S
                self.notes.append(
                    f"the text does not name the GPU; by its {most} NVLinks they are taken to have "
                    f"{rate:g} GB/s each"
                )
        return numbers

    def fabric(self, numbers: dict[tuple[str, str], int]) -> None:
        """Direct links where a GPU has that many, or a switch where it could not."""
        rate = speeds.nvlink_gb_per_s(self.sm) or speeds.DEFAULT_NVLINK_GB_PER_S
        groups = _components(self.matrix.gpus, numbers)
        switches = 0
        for group in groups:
            inside = {pair: count for pair, count in numbers.items() if pair[0] in group}
            total = max(
                (sum(count for pair, count in inside.items() if gpu in pair) for gpu in group), default=0
            )
            complete = len(inside) == len(group) * (len(group) - 1) // 2
            if total > _MOST_LINKS and complete and len(set(inside.values())) == 1:
                count = next(iter(inside.values()))
                id = f"nvswitch{switches}"
                self.devices[id] = Device(id, DeviceKind.NVSWITCH, switches)
                switches += 1
                for gpu in group:
                    self.link(
                        self.id(gpu), id, LinkKind.NVLINK, rate * count, speeds.NVSWITCH_LATENCY_US, count
                    )
                self.notes.append(
                    f"{count} NVLinks to each of {len(group) - 1} GPUs are more than a GPU has; taken "
                    "for NVSwitches"
                )
            else:
                for (a, b), count in inside.items():
                    ends = self.id(a), self.id(b)
                    self.link(*ends, LinkKind.NVLINK, rate * count, speeds.NVLINK_LATENCY_US, count)

    # -- what PCIe says

    def partitions(self) -> dict[str, list[list[str]]]:
        """For each level, the groups of devices that are at most so far apart."""
        parts: dict[str, list[list[str]]] = {}
        names = self.matrix.names
        for level, last in enumerate(_LEVELS):
            words = _LEVELS[: level + 1]
            near = [pair for pair in combinations(names, 2) if self.matrix.cells[pair] in words]
            parts[last] = _components(names, near)
        parts["NODE"] = self.same_numa(parts["NODE"])
        hidden = sum(
            self.matrix.cells[a, b].startswith("NV") and not any(a in p and b in p for p in parts["PHB"])
            for a, b in combinations(self.matrix.gpus, 2)
        )
        if hidden:
            self.notes.append(
                f"NVLink hides the PCIe tree between GPUs ({hidden} pairs); those are given PCIe "
                "roots of their own"
            )
        return parts

    def same_numa(self, parts: list[list[str]]) -> list[list[str]]:
        """Joins groups with the same NUMA (or CPU) affinity, unless a cell says that they are apart."""
        merged: list[list[str]] = []
        for part in parts:
            home = next(
                (
                    other
                    for other in merged
                    if self.home(other) is not None
                    and self.home(other) == self.home(part)
                    and not any(self.matrix.cells[a, b] == "SYS" for a in part for b in other)
                ),
                None,
            )
            if home is None:
                merged.append(list(part))
            else:
                home.extend(part)
        order = {name: position for position, name in enumerate(self.matrix.names)}
        return [sorted(part, key=order.__getitem__) for part in merged]

    def home(self, part: list[str]) -> tuple[str, str] | None:
        for name in part:
            affinity, numa = self.matrix.affinity.get(name, "N/A"), self.matrix.numa.get(name, "N/A")
            if (affinity, numa) != ("N/A", "N/A"):
                return affinity, numa
        return None

    def cpu(self, members: list[str], position: int) -> str:
        affinity, numa = self.home(members) or ("", "")
        used = {device.index for device in self.devices.values() if device.kind is DeviceKind.CPU}
        number = int(numa) if numa.isdecimal() and len(numa) < 6 and int(numa) not in used else position
        while number in used:
            number += 1
        mask = speeds.cpu_mask(affinity)
        attributes = (("affinity", mask),) if mask else ()
        self.devices[f"cpu{number}"] = Device(f"cpu{number}", DeviceKind.CPU, number, attributes=attributes)
        return f"cpu{number}"

    def root(self, members: list[str], cpu: str, parts: dict[str, list[list[str]]]) -> None:
        """A PCIe root with its trees of switches."""
        id = self.fresh(DeviceKind.HOST_BRIDGE, "root")
        self.link(id, cpu, LinkKind.PCIE, _UNBOUND_GB_PER_S, speeds.PCIE_LATENCY_US)
        for tree in (part for part in parts["PXB"] if part[0] in members):
            leaves = [part for part in parts["PIX"] if part[0] in tree]
            above = id
            if len(leaves) > 1:
                above = self.fresh(DeviceKind.PCIE_SWITCH, "switch")
                self.pcie(above, id)
            for leaf in leaves:
                below = above
                if len(leaf) > 1 or len(leaves) > 1:
                    below = self.fresh(DeviceKind.PCIE_SWITCH, "switch")
                    self.pcie(below, above)
                for name in leaf:
                    self.pcie(self.id(name), below)

    def ends(self) -> None:
        nics = 0
        for name in self.matrix.names:
            id = self.id(name)
            if name in self.matrix.gpus:
                attributes = (("gpu.sm", str(self.sm)),) if self.sm else ()
                self.devices[id] = Device(id, DeviceKind.GPU, int(name[3:]), attributes=attributes)
            else:
                interface = self.matrix.legend.get(name, name)
                self.devices[id] = Device(
                    id, DeviceKind.NIC, nics, name=interface, ports=(Port(interface, 0.0),)
                )
                nics += 1

    def id(self, name: str) -> str:
        if name in self.matrix.gpus:
            return f"gpu{int(name[3:])}"
        others = [other for other in self.matrix.names if other not in self.matrix.gpus]
        return f"nic{others.index(name)}"

    def fresh(self, kind: DeviceKind, word: str) -> str:
        index = self.counts[kind]
        self.counts[kind] += 1
        self.devices[f"{word}{index}"] = Device(f"{word}{index}", kind, index)
        return f"{word}{index}"

    def pcie(self, a: str, b: str) -> None:
        speed = speeds.pcie_gb_per_s(self.gt, speeds.DEFAULT_PCIE_WIDTH)
        self.link(a, b, LinkKind.PCIE, speed, speeds.PCIE_LATENCY_US)

    def link(self, a: str, b: str, kind: LinkKind, bandwidth: float, latency: float, count: int = 1) -> None:
        self.links.append(Link(a, b, kind, bandwidth, latency, count, True))


def _components(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Connected groups, each in the order of ``names``."""
    import networkx  # takes longer to import than the rest of the package

    graph = networkx.Graph()
    graph.add_nodes_from(names)
    graph.add_edges_from(pairs)
    order = {name: position for position, name in enumerate(names)}
    parts = [sorted(part, key=order.__getitem__) for part in networkx.connected_components(graph)]
    return sorted(parts, key=lambda part: order[part[0]])
