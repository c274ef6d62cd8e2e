"""The text of ``nvidia-smi topo -m`` as cells and columns, with no interpretation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType

from flagcx.errors import TopologyError
from flagcx.topology import gpu_models, smi_text
from flagcx.topology.smi_text import CELL, CUT, GPU, Row, Table

_MAX_DEVICES = 128
#: A column of the matrix is so wide; a first word further away stands in a later column than the next.
_TAB = 8
#: What older drivers said, and what newer ones say for it.
_OLD_WORDS = MappingProxyType({"SOC": "SYS", "PSB": "PIX"})
_COLUMNS = re.compile(
    r"(?P<cpu>CPU\s*Affinity)|(?P<gpu>GPU\s*NUMA\s*ID)|(?P<numa>NUMA(\s*(Affinity|Nodes?))?)", re.I
)


@dataclass(slots=True)
class Matrix:
    """The content of the text."""

    names: list[str]  # of rows and columns: GPU0, ..., NIC0 or mlx5_0
    cells: dict[tuple[str, str], str]  # class by (row, column)
    affinity: dict[str, str] = field(default_factory=dict)  # CPU affinity by row
    numa: dict[str, str] = field(default_factory=dict)  # NUMA affinity by row
    legend: dict[str, str] = field(default_factory=dict)  # interface by NIC#
    model: str = ""  # of the GPUs, where the text names one
    notes: list[str] = field(default_factory=list)

    @property
    def gpus(self) -> list[str]:
        """The names that are GPUs."""
        return [name for name in self.names if GPU.fullmatch(name)]


def parse_matrix(text: str, source: str = "<text>") -> Matrix:
    """Reads the first table of ``nvidia-smi topo -m`` in a text.

    Raises:
        TopologyError: There is none; names line and reason.
    """
    lines = smi_text.clean(text)
    found: Matrix | None = None
    wrong: TopologyError | None = None
    others, p2p = 0, False
    if re.search(r"ROCm System Management|Link Type between two GPUs|LINK TYPE TABLE", text):
        raise TopologyError(
            f"{source}: this is the output of rocm-smi or amd-smi, which does not say how many links join "
            "two GPUs; expected RCCL's topology XML (NCCL_TOPO_DUMP_FILE) or the output of "
            "'nvidia-smi topo -m'"
        )
    for table in smi_text.tables(lines):
        if table.is_p2p:
            p2p = True
            continue
        try:
            matrix = _matrix(table, source)
        except TopologyError as error:
            wrong = wrong or error
            continue
        others += found is not None
        found = found or matrix
    if found is None:
        raise wrong or _no_table(source, p2p)
    cleaned = "\n".join(lines)
    found.legend = dict(re.findall(r"(?:^|[\s\]>:+-])(NIC\d+):\s*(\S+)[\s\]]*$", cleaned, re.MULTILINE))
    found.model = gpu_models.named_in(cleaned)
    if re.search(r"\btopo\s+-mp\b", text):
        found.notes.append("the text is that of 'nvidia-smi topo -mp', which leaves NVLinks out")
    if others:
        found.notes.append(f"the text has {others + 1} matrices; the first is read")
    return found


def _no_table(source: str, p2p: bool) -> TopologyError:
    if p2p:
        return TopologyError(
            f"{source}: the only table is that of 'nvidia-smi topo -p2p', which says what is allowed and not "
            "how GPUs are joined; expected the output of 'nvidia-smi topo -m'"
        )
    return TopologyError(
        f"{source}: no line names GPU0, GPU1, ... as columns; expected the output of 'nvidia-smi topo -m'"
    )


def _matrix(table: Table, source: str) -> Matrix:
    """The cells of one table.

    Raises:
        TopologyError: They are no matrix.
    """
    end = next((place for place, word in enumerate(table.header) if not any(map(str.isdigit, word))), None)
    names = table.header[:end]
    headings = _COLUMNS.finditer(" ".join(table.header[len(names) :]))
    columns = [next(key for key, text in match.groupdict().items() if text) for match in headings]
    if len(set(names)) != len(names) or len(names) > _MAX_DEVICES:
        raise TopologyError(
            f"{source}, line {table.line}: {len(names)} columns of which some repeat, or over {_MAX_DEVICES} "
            "of them"
        )
    matrix = Matrix(names, {})
    for row in table.rows:
        _row(matrix, row, columns or ["cpu", "numa", "gpu"], f"{source}, line {row.line}")
    _fill(matrix, source)
    _check_symmetric(matrix, source)
    return matrix


def _row(matrix: Matrix, row: Row, columns: list[str], place: str) -> None:
    names, name = matrix.names, row.name
    if name not in names:
        raise TopologyError(f"{place}: a row called {name[:40]!r}, and there is no such column")
    if (name, name) in matrix.cells:
        raise TopologyError(f"{place}: a second row for {name}")
    cells, further = _cells(row.rest.replace(CUT, ""), len(names))
    if CUT in row.rest and len(further.split()) < len(columns):
        before, _, after = row.rest.rpartition(CUT)
        apart = _cells(f"{before.replace(CUT, '')} {after}", len(names))
        if apart[0] == cells and len(apart[1].split()) == len(columns):
            further = apart[1]
    for column, cell in zip(names, cells, strict=False):
        if not CELL.fullmatch(cell):
            raise TopologyError(
                f"{place}: {cell[:40]!r} from {name} to {column}; expected X, NV#, PIX, PXB, PHB, NODE or SYS"
            )
        matrix.cells[name, column] = _OLD_WORDS.get(cell, cell)
    if len(cells) < len(names):
        raise TopologyError(f"{place}: {len(cells)} cells for {name}; expected {len(names)}, one a column")
    words = re.sub(r",\s+(?=\d)", ",", further).split()
    if words and words[0] != "N/A" and CELL.fullmatch(words[0]):
        raise TopologyError(f"{place}: more cells for {name} than the {len(names)} columns")
    space = len(further) - len(further.lstrip())
    if len(words) == len(columns) - 1 and len(cells[-1]) + space > _TAB:
        columns = columns[1:]  # no CPU of that node is left to this process
    by_column = {"cpu": matrix.affinity, "numa": matrix.numa}
    for column, text in zip(columns, words, strict=False):
        if column in by_column and re.fullmatch(r"[\d,-]+|N/A", text):
            by_column[column][name] = text


def _cells(text: str, count: int) -> tuple[list[str], str]:
    """So many cells from the left, which may stand without a space, and the text after them.

    The last cell is the word that is none, where there is one.
    """
    cells: list[str] = []
    position = 0
    while len(cells) < count:
        position += len(text[position:]) - len(text[position:].lstrip())
        if position >= len(text):
            break
        match = CELL.match(text, position)
        if match is None:
            return [*cells, text[position:].split()[0]], ""
        cells.append(match.group())
        position = match.end()
    return cells, text[position:]


def _fill(matrix: Matrix, source: str) -> None:
    """Fills rows of NICs that the text leaves out from their columns.

    Raises:
        TopologyError: The row of a GPU is missing.
    """
    missing = [name for name in matrix.names if (name, name) not in matrix.cells]
    if lost := [name for name in missing if GPU.fullmatch(name)]:
        raise TopologyError(
            f"{source}: no row for {', '.join(lost[:8])}; is the text cut short? Expected a row "
            "for each column"
        )
    for name in missing:
        for other in matrix.names:
            cell = "X" if other == name else matrix.cells.get((other, name), "N/A")
            matrix.cells[name, other] = cell if other not in missing or other == name else "N/A"
    if missing:
        matrix.notes.append(
            f"{len(missing)} NICs have no row; their columns are taken, and how they are joined to each "
            "other is not known"
        )


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
