"""Reads and prints the matrix of ``nvidia-smi topo -m``.

The matrix tells classes, not the tree behind them, and where NVLink stands in a cell it hides what PCIe
lies below. ``parse`` builds the plainest tree that gives the same matrix, and says in the notes what it
had to guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology import markup, paths, smi_tree
from flagcx.topology.graph import DeviceKind, Topology

_WHAT = "the output of nvidia-smi topo -m"
_CELL = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|N/A")
_GPU = re.compile(r"GPU(\d{1,4})")
_MAX_DEVICES = 128
#: Columns behind the matrix, in nvidia-smi's order.
_FURTHER = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")

LEGEND = """\
Legend:

  X    = Self
  SYS  = Path over PCIe and the interconnect between NUMA nodes (QPI, UPI, Infinity Fabric)
  NODE = Path over PCIe and between PCIe roots of one NUMA node
  PHB  = Path over PCIe and one PCIe root (as a rule the CPU)
  PXB  = Path over several PCIe switches, and no PCIe root
  PIX  = Path over one PCIe switch at most
  NV#  = # bonded NVLinks"""


@dataclass(slots=True)
class Table:
    """What the text holds.

    Attributes:
        names: Row and column names in order: ``GPU0``, ..., ``NIC0`` or ``mlx5_0``.
        cells: Class by (row, column).
        affinity: CPU affinity by row name.
        numa: NUMA affinity by row name.
        legend: Interface name by ``NIC#``.
    """

    names: list[str]
    cells: dict[tuple[str, str], str]
    affinity: dict[str, str] = field(default_factory=dict)
    numa: dict[str, str] = field(default_factory=dict)
    legend: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        """The names that are GPUs."""
        return [name for name in self.names if _GPU.fullmatch(name)]


def read(path: str | Path, *, sm: int | None = None) -> Topology:
    """Reads a file that holds the output of ``nvidia-smi topo -m``; see ``parse``.

    Raises:
        TopologyError: The file cannot be read or understood; names file, line and reason.
    """
    return parse(markup.read_text(path, _WHAT), str(path), sm=sm)


def parse(text: str, source: str = "<text>", *, sm: int | None = None) -> Topology:
    """Builds a topology from the output of ``nvidia-smi topo -m``.

    Args:
        text: The output, with spaces or tabs, with or without its legend.
        source: What to call it in messages.
        sm: Compute capability times ten of the GPUs, where known; it gives the NVLinks' speed.

    Returns:
        A topology whose matrix is that of the text. Bandwidths are assumed, as the text has none.

    Raises:
        TopologyError: It is no such output, or contradicts itself.
    """
    table = parse_table(text, source)
    try:
        topology = smi_tree.build(table, Path(source).stem, sm)
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from None
    built = paths.matrix(topology)
    rows = dict(zip(built, [*table.gpus, *(n for n in table.names if n not in table.gpus)], strict=True))
    wrong = [
        (a, b)
        for a, b in combinations(built, 2)
        if (cell := table.cells[rows[a], rows[b]]) != built[a][b] and cell != "N/A"
    ]
    if wrong:
        a, b = wrong[0]
        raise TopologyError(
            f"{source}: the matrix is not that of a machine: {rows[a]} to {rows[b]} says "
            f"{table.cells[rows[a], rows[b]]}, and the other cells say {built[a][b]}"
        )
    return topology


def parse_table(text: str, source: str = "<text>") -> Table:
    """Reads the text to cells and columns, with no interpretation.

    Raises:
        TopologyError: Names line and reason.
    """
    lines = list(enumerate(re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines(), 1))
    header = next((item for item in lines if _GPU.search(item[1]) and "X" not in item[1].split()), None)
    if header is None:
        raise TopologyError(
            f"{source}: no line names GPU0, GPU1, ... as columns; expected the output of 'nvidia-smi topo -m'"
        )
    names = _columns(header[1], source, header[0])
    table = Table(names, {})
    seen: set[str] = set()
    for number, line in lines:
        words = line.split()
        if number <= header[0] or not words:
            continue
        if words[0] == "Legend:":
            break
        if words[0] not in names:
            raise TopologyError(
                f"{source}, line {number}: a row called {words[0][:40]!r}, and there is no such column"
            )
        _row(table, seen, words, line, source, number)
    if missing := [name for name in names if name not in seen]:
        raise TopologyError(
            f"{source}: no row for {', '.join(missing[:8])}; is the text cut short? Expected a row "
            "for each column"
        )
    table.legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)\s*$", text, re.MULTILINE))
    _check_symmetric(table, source)
    return table


def _columns(line: str, source: str, number: int) -> list[str]:
    line = re.split(r"\s*(?:CPU|NUMA) Affinity|\s*GPU NUMA ID", line)[0]
    names = line.split()
    if len(set(names)) != len(names) or len(names) > _MAX_DEVICES:
        raise TopologyError(
            f"{source}, line {number}: {len(names)} columns of which some repeat, or over "
            f"{_MAX_DEVICES} of them"
        )
    return names


def _row(table: Table, seen: set[str], words: list[str], line: str, source: str, number: int) -> None:
    name, cells = words[0], words[1 : len(table.names) + 1]
    if name in seen:
        raise TopologyError(f"{source}, line {number}: a second row for {name}")
    seen.add(name)
    if len(cells) < len(table.names):
        raise TopologyError(
            f"{source}, line {number}: {len(cells)} cells for {name}; expected {len(table.names)}, "
            "one a column"
        )
    for column, cell in zip(table.names, cells, strict=True):
        if not _CELL.fullmatch(cell):
            raise TopologyError(
                f"{source}, line {number}: {cell[:40]!r} from {name} to {column}; "
                "expected X, NV#, PIX, PXB, PHB, NODE or SYS"
            )
        table.cells[name, column] = "SYS" if cell == "SOC" else cell
    further = words[len(table.names) + 1 :]
    if further and re.fullmatch(r"[\d,-]+|N/A", further[0]):
        table.affinity[name] = further[0]
    if len(further) > 1 and re.fullmatch(r"[\d,-]+|N/A", further[1]):
        table.numa[name] = further[1]


def _check_symmetric(table: Table, source: str) -> None:
    for name in table.names:
        if table.cells[name, name] != "X":
            raise TopologyError(f"{source}: {name} to itself is {table.cells[name, name]}; expected X")
    for a, b in combinations(table.names, 2):
        there, back = table.cells[a, b], table.cells[b, a]
        if there != back:
            raise TopologyError(
                f"{source}: {a} to {b} is {there}, and {b} to {a} is {back}; expected the same"
            )
        if there == "X":
            raise TopologyError(f"{source}: {a} to {b} is X, which a device only is to itself")


# -- printing


def format_matrix(topology: Topology, *, legend: bool = True) -> str:
    """The matrix as ``nvidia-smi topo -m`` prints it, of any topology.

    Args:
        topology: The machine.
        legend: Whether to explain the classes and name the NICs below.
    """
    matrix = paths.matrix(topology)
    header = ["", *matrix, *_FURTHER]
    rows = [header]
    for gpu in topology.gpus:
        numa = paths.numa_node(topology, gpu.index)
        affinity = cpu_ranges(numa.attribute("affinity")) if numa else "N/A"
        number = str(numa.index) if numa else "N/A"
        rows.append(
            [f"GPU{gpu.index}", *matrix[f"GPU{gpu.index}"].values(), affinity or "N/A", number, "N/A"]
        )
    nics = topology.devices(DeviceKind.NIC)
    rows += [[f"NIC{nic.index}", *matrix[f"NIC{nic.index}"].values()] for nic in nics]
    text = _aligned(rows)
    if not legend:
        return text
    names = "".join(f"\n  NIC{nic.index}: {nic.name or nic.id}" for nic in nics)
    return text + "\n\n" + LEGEND + (f"\n\nNIC Legend:\n{names}" if names else "")


def cpu_ranges(mask: str) -> str:
    """CPU numbers as ranges, from NCCL's mask in hexadecimal words; "" where it is no mask.

    Example:
        >>> cpu_ranges("00000001,0000000f")
        '0-3,32'
    """
    words = mask.split(",")
    if len(words) > 256 or not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", word) for word in words):
        return ""
    bits = 0
    for word in words:
        bits = bits << 32 | int(word, 16)
    return _ranges(number for number in range(bits.bit_length()) if bits >> number & 1)


def _ranges(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def _aligned(rows: list[list[str]]) -> str:
    widths = [
        max(len(row[column]) for row in rows if column < len(row)) + 2 for column in range(len(rows[0]))
    ]
    lines = []
    for row in rows:
        cells = [
            text.center(width) if text == "X" else text.ljust(width)
            for text, width in zip(row, widths, strict=False)
        ]
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)
