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
    """The content of the text."""

    names: list[str]  # of rows and columns: GPU0, ..., NIC0 or mlx5_0
    cells: dict[tuple[str, str], str]  # class by (row, column)
    affinity: dict[str, str] = field(default_factory=dict)  # CPU affinity by row
    numa: dict[str, str] = field(default_factory=dict)  # NUMA affinity by row
    legend: dict[str, str] = field(default_factory=dict)  # interface by NIC#

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
    place = f"{source}, line {header[0]}"
    names = re.split(r"\s*(?:CPU|NUMA) Affinity|\s*GPU NUMA ID", header[1])[0].split()
    if len(set(names)) != len(names) or len(names) > _MAX_DEVICES:
        raise TopologyError(
            f"{place}: {len(names)} columns of which some repeat, or over {_MAX_DEVICES} of them"
        )
    matrix = Matrix(names, {})
    for number, line in lines[header[0] :]:
        words = line.split()
        if words and words[0] == "Legend:":
            break
        if words:
            _row(matrix, words, f"{source}, line {number}")
    if missing := [name for name in names if (name, name) not in matrix.cells]:
        raise TopologyError(
            f"{source}: no row for {', '.join(missing[:8])}; is the text cut short? Expected a row "
            "for each column"
        )
    matrix.legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)\s*$", text, re.MULTILINE))
    _check_symmetric(matrix, source)
    return matrix


def _row(matrix: Matrix, words: list[str], place: str) -> None:
    names = matrix.names
    name, cells, further = words[0], words[1 : len(names) + 1], words[len(names) + 1 :]
    if name not in names:
        raise TopologyError(f"{place}: a row called {name[:40]!r}, and there is no such column")
    if (name, name) in matrix.cells:
        raise TopologyError(f"{place}: a second row for {name}")
    if len(cells) < len(names):
        raise TopologyError(f"{place}: {len(cells)} cells for {name}; expected {len(names)}, one a column")
    for column, cell in zip(names, cells, strict=True):
        if not _CELL.fullmatch(cell):
            raise TopologyError(
                f"{place}: {cell[:40]!r} from {name} to {column}; expected X, NV#, PIX, PXB, PHB, NODE or SYS"
            )
        matrix.cells[name, column] = "SYS" if cell == "SOC" else cell
    for affinity, text in zip((matrix.affinity, matrix.numa), further, strict=False):
        if re.fullmatch(r"[\d,-]+|N/A", text):
            affinity[name] = text


def _check_symmetric(matrix: Matrix, source: str) -> None:
    cells = matrix.cells
    for name in matrix.names:
        if cells[name, name] != "X":
            raise TopologyError(f"{source}: {name} to itself is {cells[name, name]}; expected X")
    for a, b in combinations(matrix.names, 2):
        if cells[a, b] != cells[b, a]:
            raise TopologyError(
                f"{source}: {a} to {b} is {cells[a, b]}, and {b} to {a} is {cells[b, a]}; expected the same"
            )
        if cells[a, b] == "X":
            raise TopologyError(f"{source}: {a} to {b} is X, which a device only is to itself")
