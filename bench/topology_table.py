"""Plans an all-reduce over every known machine, and tells how near each plan comes to the bound.

    python bench/topology_table.py                              # the presets and small clusters of them
    python bench/topology_table.py FOLDER [FOLDER ...]          # and every topology file below some folders
    python bench/topology_table.py FOLDER --markdown --json table.jsonl

Columns: ``by`` = the ``algorithm=`` that the plan names, ``plan`` and ``bound`` in GB/s of algorithm
bandwidth (message bytes over time of a large all-reduce), ``ratio`` = plan / bound, ``gain`` = plan over one
ring in the order 0 .. n-1, ``nccl`` = what NCCL's own all-reduce is taken to reach over the bound, ``cross``
= hops of the planned order between NUMA nodes and over PCIe, ``time`` = seconds to plan. Files that are no
topology are listed with the reason. The exit status is 1 where the plan of a machine with NVSwitches is
under 0.9 of its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology import (
    DeviceKind,
    LinkKind,
    Topology,
    cluster,
    make_plan,
    order_bandwidth,
    preset,
    preset_names,
    read,
)
from flagcx.topology.nccl_bandwidth import nccl_bandwidth
from flagcx.topology.plan import crossings

_HEADER = (
    "machine",
    "GPUs",
    "by",
    "plan",
    "bound",
    "ratio",
    "gain",
    "nccl",
    "cross",
    "time",
    "why",
)


@dataclass(frozen=True)
class Row:
    """One machine's line."""

    machine: str
    gpus: int
    switched: bool
    method: str
    plan_gb_per_s: float
    bound_gb_per_s: float
    nccl_gb_per_s: float
    plain_order_gb_per_s: float
    numa_crossings: int
    pcie_hops: int
    seconds: float
    why: str

    @property
    def ratio(self) -> float:
        """Plan over bound."""
        return self.plan_gb_per_s / self.bound_gb_per_s

    def cells(self) -> tuple[str, ...]:
        """The line's cells as text."""
        return (
            self.machine,
            str(self.gpus),
            self.method,
            f"{self.plan_gb_per_s:.2f}",
            f"{self.bound_gb_per_s:.2f}",
            f"{self.ratio:.3f}",
            f"{self.plan_gb_per_s / self.plain_order_gb_per_s:.2f}",
            f"{self.nccl_gb_per_s / self.bound_gb_per_s:.3f}",
            f"{self.numa_crossings} / {self.pcie_hops}",
            f"{self.seconds:.2f}",
            self.why,
        )


def measure(name: str, machine: Topology) -> Row:
    """Plans one machine.

    Raises:
        TopologyError: It names fewer than two GPUs.
    """
    if len(machine.gpus) < 2:
        raise TopologyError(f"{name} names {len(machine.gpus)} GPUs; {'; '.join(machine.notes[:3])}")
    start = time.perf_counter()
    plan = make_plan(machine)
    took = time.perf_counter() - start
    nccl = nccl_bandwidth(machine)
    return Row(
        name,
        len(machine.gpus),
        bool(machine.devices(DeviceKind.NVSWITCH)) and len(machine.hosts) == 1,
        plan.method,
        plan.bandwidth_gb_per_s,
        plan.bound_gb_per_s,
        max(nccl.rings_gb_per_s, nccl.levels_gb_per_s),
        order_bandwidth(machine, sorted(plan.gpus)),
        crossings(machine, plan.order, LinkKind.SOCKET),
        crossings(machine, plan.order, LinkKind.PCIE),
        took,
        plan.why,
    )


def machines(folders: Sequence[Path]) -> Iterator[tuple[str, Topology | TopologyError]]:
    """Presets, clusters of some, and every file below the folders; an error for one that is no topology."""
    for name in preset_names():
        yield name, preset(name)
    for name, hosts in (
        ("dgx-a100", 2),
        ("dgx-h100", 4),
        ("dgx-h100", 64),
        ("8xa100-pcie", 2),
        ("dgx-1v", 4),
    ):
        yield f"{name} x {hosts}", cluster(preset(name), hosts)
    for folder in folders:
        for path in sorted([*folder.rglob("*.xml"), *folder.rglob("*.txt")]):
            try:
                yield path.name, read(path)
            except TopologyError as error:
                yield path.name, error


def table(rows: Sequence[Row], *, markdown: bool) -> str:
    """The lines under a header."""
    cells = [_HEADER, *(row.cells() for row in rows)]
    if markdown:
        lines = [f"| {' | '.join(line)} |" for line in cells]
        return "\n".join([lines[0], "|" + "---|" * len(_HEADER), *lines[1:]])
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def main() -> int:
    """Prints the table; gives the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="folders with topology files")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", type=Path, help="write one JSON object a machine to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    refused: list[str] = []
    for name, machine in machines(arguments.folders):
        try:
            if isinstance(machine, TopologyError):
                raise machine
            rows.append(measure(name, machine))
        except TopologyError as error:
            refused.append(f"{name}: {error}")
    print(table(rows, markdown=arguments.markdown))
    if refused:
        print("\nNot planned:\n" + "\n".join(f"- {line}" for line in refused))
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    poor = [row.machine for row in rows if row.switched and row.ratio < 0.9]
    if poor:
        print(f"\nUnder 0.9 of the bound with NVSwitches: {', '.join(poor)}")
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(main())
