"""Times of NCCL's collectives on many machines, as their owners published them, and those machines.

    python bench/nccl_published.py < OUTPUT    # what nccl-tests printed, as the points of a table

``bench/results/nccl_published.jsonl`` has one table a line: the machine, by a preset or by its parts;
``driven``, how many GPUs one thread drove, and ``threads``, how many of one process drove a GPU each, where
it was several; ``source``; and ``log2_nbytes_us``, pairs
of the power of two that the message had in bytes, and the time in us of plain calls out of place (the median,
where there were several runs). A table that is ``doubtful`` says why; it is predicted, but nothing is fitted
to it. ``nccl_collectives_published.jsonl`` has tables of other collectives, by name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flagcx.cost.nccl import collective_algorithms, nccl_algorithms
from flagcx.cost.nccl_law import NcclAlgorithm
from flagcx.topology import DeviceKind, LinkKind, Port, Topology, cluster, preset, speeds
from flagcx.topology.builder import Builder

PATH = Path(__file__).resolve().parent / "results" / "nccl_published.jsonl"
COLLECTIVES = PATH.with_name("nccl_collectives_published.jsonl")
_VENDORS = {"amd": "AuthenticAMD", "intel": "GenuineIntel"}


@dataclass(frozen=True)
class Points:
    """Measured times of one group of ranks of a machine.

    Attributes:
        algorithms: What NCCL can choose from there.
        nbytes: Sizes, float64 of shape (points,).
        time_us: Times, of the same shape.
        driven: How many GPUs each thread of the benchmark drove.
        threads: How many threads each process had that drove a GPU each; 0 for one.
        replayed: Whether calls were replayed in a CUDA graph.
        doubtful: Why the table tells little of its kind of machine; empty where nothing says so.
    """

    algorithms: tuple[NcclAlgorithm, ...]
    nbytes: np.ndarray
    time_us: np.ndarray
    driven: int = 1
    threads: int = 0
    replayed: bool = False
    doubtful: str = ""


def read(path: Path = PATH) -> dict[str, list[Points]]:
    """Each machine's points, by its name.

    Raises:
        FileNotFoundError: There is no such file.
    """
    found: dict[str, list[Points]] = {}
    for line in path.read_text().splitlines():
        table = json.loads(line)
        name = ", ".join(table[key] for key in ("machine", "collective") if key in table)
        found.setdefault(name, []).append(points_of(table))
    return found


def points_of(table: Mapping[str, Any]) -> Points:
    """One table as points."""
    parts = {key: value for key, value in table.items() if key in _PARTS}
    algorithms = _algorithms(json.dumps(parts, sort_keys=True), table.get("collective", "allreduce"))
    powers, times = np.array(table["log2_nbytes_us"], float).T
    facts = {key: table[key] for key in ("driven", "threads", "doubtful") if key in table}
    return Points(algorithms, 2.0**powers, times, **facts)


@cache
def _algorithms(parts: str, collective: str) -> tuple[NcclAlgorithm, ...]:
    own = json.loads(parts)
    machine = machine_of(own)
    used = own.get("use") or (own["gpus"] if "preset" in own and "gpus" in own else len(machine.gpus))
    gpus = [gpu.index for gpu in machine.gpus][:used]
    if collective != "allreduce":
        return collective_algorithms(collective, machine, gpus, fabric=own.get("net"), peers=own.get("p2p"))
    return nccl_algorithms(
        machine, gpus, nvls=own.get("nvls") is not False, fabric=own.get("net"), peers=own.get("p2p")
    )


_PARTS = (
    "preset", "hosts", "gpus", "use", "nics", "nic", "net", "nvls", "p2p", "nvl", "sm", "nvlinks", "pairs",
    "all", "xgmi", "cpu", "model", "gt", "sockets", "switches", "socket_nics",
)  # fmt: skip


def machine_of(own: Mapping[str, Any]) -> Topology:
    """The machine that a table describes.

    Args:
        own: ``preset``, or ``sm`` (compute capability times ten), ``cpu``, ``gt`` (GT/s of PCIe, 16 lanes),
            ``sockets``, ``switches`` (PCIe, below each socket), ``gpus`` (below each switch, or socket), and
            what joins the GPUs: ``pairs`` or ``all`` (NVLinks of each pair), ``xgmi`` (GB/s of each pair),
            or ``nvl`` GPUs with ``nvlinks`` each. ``hosts`` of them, with ``nics`` of ``nic`` GB/s.
    """
    hosts = own.get("hosts", 1)
    if "preset" in own:
        machine = preset(own["preset"])
        return _with_nics(machine, hosts, own.get("nics"), own.get("nic")) if hosts > 1 else machine
    machine = _Machine(own).topology("machine")
    return cluster(machine, hosts) if hosts > 1 else machine


def _with_nics(machine: Topology, hosts: int, nics: int | None, gb_per_s: float | None) -> Topology:
    if gb_per_s is None:
        return cluster(machine, hosts, nics)
    devices = [
        replace(device, ports=tuple(replace(port, speed_gb_per_s=gb_per_s) for port in device.ports))
        for device in machine.devices()
    ]
    return cluster(Topology(devices, machine.links, name=machine.name), hosts, nics)


class _Machine(Builder):
    """A machine built of a table's parts."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        super().__init__()
        self.own = own
        vendor, arch = _VENDORS.get(own.get("cpu", "intel"), ""), "x86_64"
        if own.get("cpu") == "arm":
            arch = "aarch64"
        model = str(own.get("model", 143))
        facts = (("arch", arch), ("vendor", vendor), ("familyid", "6" if vendor != "AuthenticAMD" else "143"))
        sockets = own.get("sockets", 1)
        below = sockets * (own.get("switches") or 1) if "xgmi" not in own else 1
        total = own.get("nvl") or own["gpus"] * below
        for socket in range(sockets):
            self.add(DeviceKind.CPU, f"cpu{socket}", attributes=(*facts, ("modelid", model)))
            above = f"cpu{socket}"
            for _ in range(own.get("switches") or 1):
                below = self.hang(DeviceKind.PCIE_SWITCH, "switch", above) if own.get("switches") else above
                share = total // sockets // (own.get("switches") or 1)
                for _ in range(share):
                    number = str(len(self.of(DeviceKind.GPU)))
                    sm = (("gpu.dev", number), ("gpu.rank", number), ("gpu.sm", str(own["sm"])))
                    self.hang(DeviceKind.GPU, "gpu", below, attributes=sm if own["sm"] else sm[:2])
                for _ in range(own.get("nics", 0)):
                    self.nic(below)
            for _ in range(own.get("socket_nics", 0)):
                self.nic(above)
        self.join()
        speed = speeds.socket_speed(dict(self.devices["cpu0"].attributes))
        self.join_cpus(speed or speeds.DEFAULT_SOCKET_GB_PER_S)

    def hang(self, kind: DeviceKind, word: str, above: str, **facts: Any) -> str:
        """Adds a device below another on PCIe."""
        bus = 1 + sum(device.pci_bus_id != "" for device in self.devices.values())
        id = self.add(kind, f"{word}{len(self.of(kind))}", pci_bus_id=f"0000:{bus:02x}:00.0", **facts)
        self.link(above, id, LinkKind.PCIE, speeds.pcie_gb_per_s(self.own.get("gt", 32.0), 16))
        return id

    def nic(self, above: str) -> None:
        """Adds a NIC."""
        name = f"mlx5_{len(self.of(DeviceKind.NIC))}"
        self.hang(DeviceKind.NIC, "nic", above, name=name, ports=(Port(name, self.own["nic"]),))

    def join(self) -> None:
        """Joins the GPUs to each other, or to an NVSwitch."""
        gpus = [gpu.id for gpu in self.of(DeviceKind.GPU)]
        rate = speeds.nvlink_gb_per_s(self.own["sm"]) or 0.0
        if "nvl" in self.own:
            switch = self.add(DeviceKind.NVSWITCH, "nvswitch0", pci_bus_id="0000:f0:00.0")
            for gpu in gpus:
                self.link(gpu, switch, LinkKind.NVLINK, rate * self.own["nvlinks"], self.own["nvlinks"])
        for number, gpu in enumerate(gpus):
            for other in gpus[number + 1 :]:
                links = self.own.get("all") or (number + 1) % 2 * (other == gpus[number + 1]) * self.own.get(
                    "pairs", 0
                )
                if links:
                    self.link(gpu, other, LinkKind.NVLINK, rate * links, links)
                elif "xgmi" in self.own:
                    self.link(gpu, other, LinkKind.XGMI, self.own["xgmi"])


# -- nccl-tests' output


def rows_of(text: str) -> list[tuple[int, float]]:
    """(bytes, us) of every row of nccl-tests' output, of the out-of-place columns."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and words[0].isdigit() and words[2] in ("float", "half"):
            numbers = [word for word in words[4:] if re.fullmatch(r"-?\d+(\.\d+)?", word)]
            numbers = numbers[1:] if numbers[0] == "-1" else numbers
            found.append((int(words[0]), float(numbers[0])))
    return found


def medians(rows: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """(Power of two, us) of each size that is one, with the median of its times."""
    sizes = sorted({nbytes for nbytes, _ in rows if nbytes.bit_count() == 1})
    return [
        (size.bit_length() - 1, float(np.median([us for nbytes, us in rows if nbytes == size])))
        for size in sizes
    ]


if __name__ == "__main__":
    print(json.dumps({"log2_nbytes_us": medians(rows_of(sys.stdin.read()))}))
