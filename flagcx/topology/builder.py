"""Collects the parts of a machine, and notes: readers of files, detection and presets build with it."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

from flagcx.topology import speeds
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind
from flagcx.topology.topology import Topology

#: Kinds of notes that are shown; a hostile file could have one for each of its elements.
_MOST_NOTES = 40


class Notes:
    """What a source lacks or gets wrong and what is assumed in its place, each with its number."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, note: str, example: str = "", count: int = 1) -> None:
        """Counts a note.

        Args:
            note: What is wrong and what is assumed; the same words for everything of one kind.
            example: Where and what it was; that of the first is shown.
            count: How many things of that kind there are.
        """
        self._counts[note] += count
        self._first.setdefault(note, example)

    def lines(self) -> list[str]:
        """The notes as text, each with its number and its first example."""
        shown = []
        for note, count in list(self._counts.items())[:_MOST_NOTES]:
            facts = [f"{count} times"] if count > 1 else []
            if example := self._first[note]:
                facts.append(f"first {example}" if count > 1 else example)
            shown.append(f"{note} ({', '.join(facts)})" if facts else note)
        if len(self._counts) > _MOST_NOTES:
            shown.append(f"{len(self._counts) - _MOST_NOTES} more kinds of notes are left out")
        return shown


class Builder:
    """The devices and links of a machine so far, and notes on what is assumed."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}
        self.links: list[Link] = []
        self.notes = Notes()

    def of(self, kind: DeviceKind) -> list[Device]:
        """The devices of a kind so far."""
        return [device for device in self.devices.values() if device.kind is kind]

    def add(self, kind: DeviceKind, id: str, index: int | None = None, **facts: Any) -> str:
        """Adds a device, under the next number of its kind unless one is given; gives its id."""
        self.devices[id] = Device(id, kind, len(self.of(kind)) if index is None else index, **facts)
        return id

    def link(
        self, a: str, b: str, kind: LinkKind, gb_per_s: float, count: int = 1, *, assumed: bool = False
    ) -> None:
        """Adds a link, with the latency of its kind; add the devices first."""
        latency = speeds.LATENCY_US[kind.value]
        if kind.is_gpu_fabric and DeviceKind.NVSWITCH in (self.devices[a].kind, self.devices[b].kind):
            latency = speeds.NVSWITCH_LATENCY_US
        self.links.append(Link(a, b, kind, gb_per_s, latency, count, assumed))

    def join_cpus(self, gb_per_s: float, *, assumed: bool = False) -> None:
        """Joins every NUMA node to every other, as NCCL has them."""
        for a, b in combinations(self.of(DeviceKind.CPU), 2):
            self.link(a.id, b.id, LinkKind.SOCKET, gb_per_s, assumed=assumed)

    def topology(self, name: str) -> Topology:
        """The machine."""
        return Topology(self.devices.values(), self.links, name=name, notes=self.notes.lines())
