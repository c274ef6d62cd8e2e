"""The text of ``nvidia-smi topo -m`` as cells and columns, with no interpretation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import combinations

from flagcx.errors import TopologyError

_CELL = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|N/A")
_GPU = re.compile(r"GPU(\d{1,4})")
_MAX_DEVICES = 128


@dataclass(slots=True)
class Matrix:
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


def parse_matrix(text: str, source: str = "<text>") -> Matrix:
    """Reads the text.

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
    matrix = Matrix(names, {})
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
        _row(matrix, seen, words, line, source, number)
    if missing := [name for name in names if name not in seen]:
        raise TopologyError(
            f"{source}: no row for {', '.join(missing[:8])}; is the text cut short? Expected a row "
            "for each column"
        )
    matrix.legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)\s*$", text, re.MULTILINE))
    _check_symmetric(matrix, source)
    return matrix


def _columns(line: str, source: str, number: int) -> list[str]:
    line = re.split(r"\s*(?:CPU|NUMA) Affinity|\s*GPU NUMA ID", line)[0]
    names = line.split()
    if len(set(names)) != len(names) or len(names) > _MAX_DEVICES:
        raise TopologyError(
            f"{source}, line {number}: {len(names)} columns of which some repeat, or over "
            f"{_MAX_DEVICES} of them"
        )
    return names


def _row(matrix: Matrix, seen: set[str], words: list[str], line: str, source: str, number: int) -> None:
    name, cells = words[0], words[1 : len(matrix.names) + 1]
    if name in seen:
        raise TopologyError(f"{source}, line {number}: a second row for {name}")
    seen.add(name)
    if len(cells) < len(matrix.names):
        raise TopologyError(
            f"{source}, line {number}: {len(cells)} cells for {name}; expected {len(matrix.names)}, "
            "one a column"
        )
    for column, cell in zip(matrix.names, cells, strict=True):
        if not _CELL.fullmatch(cell):
            raise TopologyError(
                f"{source}, line {number}: {cell[:40]!r} from {name} to {column}; "
                "expected X, NV#, PIX, PXB, PHB, NODE or SYS"
            )
        matrix.cells[name, column] = "SYS" if cell == "SOC" else cell
    further = words[len(matrix.names) + 1 :]
    if further and re.fullmatch(r"[\d,-]+|N/A", further[0]):
        matrix.affinity[name] = further[0]
    if len(further) > 1 and re.fullmatch(r"[\d,-]+|N/A", further[1]):
        matrix.numa[name] = further[1]


def _check_symmetric(matrix: Matrix, source: str) -> None:
    for name in matrix.names:
        if matrix.cells[name, name] != "X":
            raise TopologyError(f"{source}: {name} to itself is {matrix.cells[name, name]}; expected X")
    for a, b in combinations(matrix.names, 2):
        there, back = matrix.cells[a, b], matrix.cells[b, a]
        if there != back:
            raise TopologyError(
                f"{source}: {a} to {b} is {there}, and {b} to {a} is {back}; expected the same"
            )
        if there == "X":
            raise TopologyError(f"{source}: {a} to {b} is X, which a device only is to itself")
