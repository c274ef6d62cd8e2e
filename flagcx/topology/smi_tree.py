"""Builds the simplest machine that has a given ``nvidia-smi topo -m`` matrix.

Classes PIX, PXB, PHB, NODE, SYS are nested: devices within PIX of each other share a switch, within PXB a
tree of switches, within PHB a PCIe root, within NODE a NUMA node. Each level is therefore a partition,
found by joining devices whose cell is of that level or nearer; cells that NVLink hides follow from the
rest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from flagcx.topology import gpu_models, speeds
from flagcx.topology.builder import Builder
from flagcx.topology.cpu_sets import cpu_mask
from flagcx.topology.graph import DeviceKind, LinkKind, Port
from flagcx.topology.smi_matrix import Matrix
from flagcx.topology.topology import Topology

_LEVELS = ("PIX", "PXB", "PHB", "NODE")
_MOST_LINKS = 18
_MOST_NAMES = 8  # of devices in a note
_LINKS = re.compile(r"(NV|XGMI)(\d+)")
_NUMBER = re.compile(r"\d{1,5}(?!\d)")
#: By the number of NVLinks of a GPU: its likely compute capability and PCIe GT/s.
_BY_LINKS = {2: (75, 8.0), 4: (86, 16.0), 6: (70, 8.0), 8: (90, 32.0), 12: (80, 16.0), 18: (90, 32.0)}
_NEWER = "; those of B200, B300, GB200 and GB300 have 40.1: name the model (--gpu-model, --sm) if it is one"


def build(matrix: Matrix, name: str, sm: int | None) -> Topology:
    """The machine of a matrix.

    Args:
        matrix: The cells.
        name: The topology's name.
        sm: Compute capability times ten, or None to guess it from the number of NVLinks.
    """
    return _Tree(matrix, sm).build(name)


class _Tree(Builder):
    def __init__(self, matrix: Matrix, sm: int | None) -> None:
        super().__init__()
        self.matrix, self.sm = matrix, sm
        self.gt = speeds.DEFAULT_PCIE_GT
        self.fabric_kind = LinkKind.NVLINK
        self.numa = {name: text for name, text in matrix.numa.items() if _NUMBER.match(text)}
        for text in sorted(set(matrix.numa.values()) - set(self.numa.values())):
            self.notes.add("a NUMA affinity is no node's number", text[:40])
        others = [name for name in matrix.names if name not in matrix.gpus]
        self.ids = {name: f"gpu{int(name[3:])}" for name in matrix.gpus}
        self.ids |= {name: f"nic{number}" for number, name in enumerate(others)}

    def build(self, name: str) -> Topology:
        counts = self.nvlinks()
        self.ends()
        parts = self.partitions()
        for number, members in zip(self.numbers(parts["NODE"]), parts["NODE"], strict=True):
            cpu = self.cpu(members, number)
            for root in (part for part in parts["PHB"] if part[0] in members):
                self.root(root, cpu, parts)
        self.join_cpus(speeds.DEFAULT_SOCKET_GB_PER_S)
        self.fabric(counts)
        self.notes.add(
            f"the text has no bandwidths; assumed {self.gt:g} GT/s PCIe with {speeds.DEFAULT_PCIE_WIDTH} "
            f"lanes and {speeds.DEFAULT_SOCKET_GB_PER_S:g} GB/s between NUMA nodes"
        )
        for note in self.matrix.notes:
            self.notes.add(note)
        order = sorted(self.devices.values(), key=lambda device: device.kind is not DeviceKind.GPU)
        self.devices = {device.id: device for device in order}
        self.links = [replace(link, assumed=True) for link in self.links]
        return self.topology(name)

    # -- NVLinks

    def nvlinks(self) -> dict[tuple[str, str], int]:
        """NVLinks by pair of GPUs; settles the kind of GPU."""
        cells = {pair: self.matrix.cells[pair] for pair in combinations(self.matrix.gpus, 2)}
        links = {pair: match for pair, cell in cells.items() if (match := _LINKS.fullmatch(cell))}
        counts = {pair: int(match[2]) for pair, match in links.items() if int(match[2]) > 0}
        if any(match[1] == "XGMI" for match in links.values()):
            self.fabric_kind = LinkKind.XGMI
            self.notes.add(
                f"the text does not name the GPU; {speeds.DEFAULT_XGMI_GB_PER_S:g} GB/s assumed for each of "
                "its xGMI links"
            )
        elif counts:
            total = max(_total(counts, gpu) for gpu in self.matrix.gpus)
            most = total if total <= _MOST_LINKS else max(counts.values())
            sm, self.gt = _BY_LINKS.get(most, (None, self.gt))
            named = gpu_models.MODELS.get(self.matrix.model)
            if self.sm is not None and named not in (None, self.sm):
                self.notes.add(
                    f"the text names {self.matrix.model}, of compute capability {named}; the one that was "
                    f"given, {self.sm}, is taken"
                )
            if self.sm is None and self.matrix.model:
                self.sm = gpu_models.MODELS[self.matrix.model]
                self.notes.add(f"the text names {self.matrix.model}, which gives the NVLinks' speed")
            elif self.sm is None:
                self.sm = sm
                rate = speeds.nvlink_gb_per_s(sm) or speeds.DEFAULT_NVLINK_GB_PER_S
                note = f"the text does not name the GPU; by its {most} NVLinks they are taken to have "
                self.notes.add(f"{note}{rate:g} GB/s each" + (_NEWER if most == _MOST_LINKS else ""))
        if self.sm is not None:
            self.gt = speeds.pcie_gt_of(self.sm)
        return counts

    def fabric(self, counts: dict[tuple[str, str], int]) -> None:
        """Direct links where a GPU has that many, or a switch where it could not."""
        rate = speeds.nvlink_gb_per_s(self.sm) or speeds.DEFAULT_NVLINK_GB_PER_S
        if self.fabric_kind is LinkKind.XGMI:
            rate = speeds.DEFAULT_XGMI_GB_PER_S
        for group in _components(self.matrix.gpus, counts):
            inside = {pair: count for pair, count in counts.items() if pair[0] in group}
            total = max(_total(inside, gpu) for gpu in group)
            complete = len(inside) == len(group) * (len(group) - 1) // 2
            own = {gpu: max((n for pair, n in inside.items() if gpu in pair), default=0) for gpu in group}
            alike = all(count == min(own[a], own[b]) for (a, b), count in inside.items())
            if total > _MOST_LINKS and complete and alike:
                switch = self.fresh(DeviceKind.NVSWITCH, "nvswitch")
                for gpu, count in own.items():
                    self.link(self.ids[gpu], switch, self.fabric_kind, rate * count, count)
                self.notes.add(
                    f"{max(own.values())} NVLinks to each of {len(group) - 1} GPUs are more than a GPU has; "
                    "taken for NVSwitches"
                )
            else:
                for (a, b), count in inside.items():
                    self.link(self.ids[a], self.ids[b], self.fabric_kind, rate * count, count)

    # -- PCIe

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
            _LINKS.fullmatch(self.matrix.cells[a, b]) is not None
            and not any(a in p and b in p for p in parts["PHB"])
            for a, b in combinations(self.matrix.gpus, 2)
        )
        if hidden:
            self.notes.add(
                f"NVLink hides the PCIe tree between GPUs ({hidden} pairs); those are given PCIe "
                "roots of their own"
            )
        return parts

    def same_numa(self, parts: list[list[str]]) -> list[list[str]]:
        """Joins groups of one NUMA (or CPU) affinity, or of none, unless a cell says that they are apart."""
        merged: list[list[str]] = []
        unknown: list[str] = []
        for part in sorted(parts, key=lambda part: not any(self.home(part))):
            own = self.home(part)
            home = next(
                (
                    other
                    for other in merged
                    if (not any(own) or _same_node(own, self.home(other)))
                    and not any(self.matrix.cells[a, b] == "SYS" for a in part for b in other)
                ),
                None,
            )
            if home is None:
                merged.append(list(part))
            else:
                unknown += [] if any(own) else part
                home.extend(part)
        anywhere = self.matrix.affinity or self.numa
        if unknown or not anywhere:
            shown = ", ".join(unknown[:_MOST_NAMES]) + ", ..." * (len(unknown) > _MOST_NAMES)
            self.notes.add(
                f"nothing that was read tells the NUMA node of {shown if anywhere else 'any device'}; those "
                "that no SYS sets apart are put below one"
            )
        order = {name: position for position, name in enumerate(self.matrix.names)}
        merged = [sorted(part, key=order.__getitem__) for part in merged]
        merged.sort(key=lambda part: order[part[0]])
        self.note_contradictions(merged)
        return merged

    def note_contradictions(self, merged: list[list[str]]) -> None:
        """Notes where cells and columns of affinity say different things of NUMA nodes, or the columns do."""
        place = {name: number for number, group in enumerate(merged) for name in group}
        homes = {name: home for name in place if any(home := self.home([name]))}
        for (a, one), (b, other) in combinations(homes.items(), 2):
            pair = f"{a} and {b}"
            together = place[a] == place[b]
            if all((*one, *other)) and (one[0] == other[0]) == together != (one[1] == other[1]):
                self.notes.add("NUMA affinity and CPU affinity contradict each other; NUMA's is taken", pair)
            if together and not _same_node(one, other):
                self.notes.add(
                    "devices of one NUMA node by their cells have different affinities; the cells are taken",
                    pair,
                )
            elif not together and _same_node(one, other):
                self.notes.add(
                    "devices of one affinity are SYS apart by their cells; the cells are taken", pair
                )

    def home(self, part: list[str]) -> tuple[str, str]:
        """NUMA and CPU affinity of the first devices of a group that have them; "" where none has."""
        numa, cpus = (
            next((found for name in part if (found := column.get(name, "N/A")) != "N/A"), "")
            for column in (self.numa, self.matrix.affinity)
        )
        return numa, cpus

    def numbers(self, groups: list[list[str]]) -> list[int]:
        """The numbers of NUMA nodes: the first of their affinity, or one that none of them has."""
        found: dict[int, int] = {}
        for position, members in enumerate(groups):
            numa = self.home(members)[0]
            if first := _NUMBER.match(numa):
                found.setdefault(int(first[0]), position)
                if first[0] != numa:
                    self.notes.add("a NUMA affinity names several nodes; the first is taken", numa[:40])
        own = []
        for position in sorted(set(range(len(groups))) - set(found.values())):
            own.append(next(n for n in itertools.count(position) if n not in found))
            found[own[-1]] = position
        if own:
            shown = ", ".join(map(str, own[:_MOST_NAMES])) + ", ..." * (len(own) > _MOST_NAMES)
            self.notes.add(
                f"the text gives no number to some NUMA nodes; flagcx numbers them itself: {shown}"
            )
        return sorted(found, key=found.__getitem__)

    def cpu(self, members: list[str], number: int) -> str:
        cpus = dict.fromkeys(home[1] for name in members if (home := self.home([name]))[1])
        mask = cpu_mask(",".join(cpus))
        if cpus and not mask.strip("0,"):
            self.notes.add("a CPU affinity is no list of CPUs", ",".join(cpus)[:40])
        attributes = (("affinity", mask),) if mask else ()
        return self.add(DeviceKind.CPU, f"cpu{number}", number, attributes=attributes)

    def root(self, members: list[str], cpu: str, parts: dict[str, list[list[str]]]) -> None:
        """A PCIe root with its trees of switches."""
        root = self.fresh(DeviceKind.HOST_BRIDGE, "root")
        self.link(root, cpu, LinkKind.PCIE, speeds.UNBOUND_GB_PER_S)
        for tree in (part for part in parts["PXB"] if part[0] in members):
            leaves = [part for part in parts["PIX"] if part[0] in tree]
            above = self.switch(root) if len(leaves) > 1 else root
            for leaf in leaves:
                below = self.switch(above) if len(leaf) > 1 or len(leaves) > 1 else above
                for name in leaf:
                    self.pcie(self.ids[name], below)

    def ends(self) -> None:
        model = {"gpu.sm": str(self.sm)} if self.sm else {}
        for name, id in self.ids.items():
            if name in self.matrix.gpus:
                memory = {"gpu.numa_id": self.matrix.memory[name]} if name in self.matrix.memory else {}
                self.add(DeviceKind.GPU, id, int(name[3:]), attributes=tuple({**model, **memory}.items()))
            else:
                port = Port(self.matrix.legend.get(name, name), 0.0)
                self.add(DeviceKind.NIC, id, name=port.name, ports=(port,))

    def switch(self, above: str) -> str:
        switch = self.fresh(DeviceKind.PCIE_SWITCH, "switch")
        self.pcie(switch, above)
        return switch

    def fresh(self, kind: DeviceKind, word: str) -> str:
        return self.add(kind, f"{word}{len(self.of(kind))}")

    def pcie(self, a: str, b: str) -> None:
        self.link(a, b, LinkKind.PCIE, speeds.pcie_gb_per_s(self.gt))


def _same_node(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two NUMA and CPU affinities are one node's: by NUMA's, or by CPUs where one lacks it."""
    return one[0] == other[0] if one[0] and other[0] else one[1] == other[1] != ""


def _total(counts: dict[tuple[str, str], int], gpu: str) -> int:
    """NVLinks of a GPU."""
    return sum(count for pair, count in counts.items() if gpu in pair)


def _components(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Connected groups, each in the order of ``names``."""
    import networkx  # takes longer to import than the rest of the package

    graph = networkx.Graph()
    graph.add_nodes_from(names)
    graph.add_edges_from(pairs)
    order = {name: position for position, name in enumerate(names)}
    parts = [sorted(part, key=order.__getitem__) for part in networkx.connected_components(graph)]
    return sorted(parts, key=lambda part: order[part[0]])
