"""The text of ``nvidia-smi topo -m`` as cells and columns, with no interpretation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, takewhile
from types import MappingProxyType

from flagcx.errors import TopologyError
from flagcx.topology import gpu_models, smi_text
from flagcx.topology.smi_text import AFFINITY, BLANK, CELL, CUT, GPU, HEADING, Row, Table

_MAX_DEVICES = 128
_MOST_TABLES = 100  # of a text that are looked at
#: What older drivers said, and what newer ones say for it.
_OLD_WORDS = MappingProxyType({"SOC": "SYS", "PSB": "PIX"})
#: What each heading after the devices names, whatever other words and marks it has.
_COLUMNS = re.compile(r"(?P<gpu>GPU[\W_]*NUMA|NUMA[\W_]*GPU(?![\W_]*NUMA))|(?P<cpu>CPU)|(?P<numa>NUMA)", re.I)
#: A line of NICs' names, perhaps of a table.
_LEGEND = re.compile(
    r"(?:^|[\s\]>:+-])(NIC\d+):\s*(\S+)[\s\]]*$|^[ \t]*(NIC\d+)[ \t]+([a-z]\w*\d[\w.-]*)[ \t]*$",
    re.MULTILINE,
)
_NODE = re.compile(r"\bnode[ _-]?(?=\d)", re.I)


@dataclass(slots=True)
class Matrix:
    """The content of the text."""

    names: list[str]  # of rows and columns: GPU0, ..., NIC0 or mlx5_0
    cells: dict[tuple[str, str], str]  # class by (row, column)
    affinity: dict[str, str] = field(default_factory=dict)  # CPU affinity by row
    numa: dict[str, str] = field(default_factory=dict)  # NUMA affinity by row
    memory: dict[str, str] = field(default_factory=dict)  # NUMA node of a GPU's own memory by row
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
    if re.search(r"ROCm System Management|Link Type between two GPUs|LINK TYPE TABLE", text):
        raise TopologyError(
            f"{source}: this is the output of rocm-smi or amd-smi, which does not say how many links join "
            "two GPUs; expected RCCL's topology XML (NCCL_TOPO_DUMP_FILE) or the output of "
            "'nvidia-smi topo -m'"
        )
    lines = smi_text.clean(text)
    found, wrong = _first_of(lines, source)
    if found is None:
        found, _ = _first_of([line.upper() for line in lines], source)
    if found is None:
        raise wrong or TopologyError(
            f"{source}: no line names GPU0, GPU1, ... as columns; expected the output of 'nvidia-smi topo -m'"
        )
    cleaned = "\n".join(lines)
    for line in _LEGEND.finditer(cleaned):
        nic, name = filter(None, line.groups())
        if found.legend.setdefault(nic, name) != name:
            found.notes.append(
                f"the text names {nic} twice, {found.legend[nic]} and {name}; the first is taken"
            )
    found.model = gpu_models.named_in(cleaned)
    if re.search(r"\btopo\s+-mp\b", text):
        found.notes.append("the text is that of 'nvidia-smi topo -mp', which leaves NVLinks out")
    return found


def _first_of(lines: Sequence[str], source: str) -> tuple[Matrix | None, TopologyError | None]:
    """The first matrix in lines, with a note on what the others say, and the first error."""
    found: list[tuple[int, Matrix]] = []
    others: list[str] = []
    errors: dict[bool, TopologyError] = {}
    for table in islice(smi_text.tables(lines), _MOST_TABLES):
        try:
            found.append((table.line, _matrix(table, source)))
        except TopologyError as error:
            errors.setdefault(table.is_p2p, error)
            if table.rows and not table.is_p2p:
                reason = str(error).removeprefix(source).lstrip(",: ")
                others.append(f"the table in line {table.line} is left out ({reason})")
    if not found:
        return None, errors.get(False) or errors.get(True)
    first, *more = found
    others += [f"the one in line {line} {_difference(first[1], matrix)}" for line, matrix in more]
    if others:
        first[1].notes.append(
            f"the text has {len(others) + 1} matrices; that in line {first[0]} is read, and "
            + "; ".join(others[:4])
        )
    return first[1], None


def _difference(one: Matrix, other: Matrix) -> str:
    """How a matrix differs from the one that is read."""
    if one.names != other.names:
        sizes = [
            f"{len(each.gpus)} GPUs and {len(each.names) - len(each.gpus)} NICs" for each in (one, other)
        ]
        return f"has {sizes[1]}, not {sizes[0]}" if sizes[0] != sizes[1] else "has other names of devices"
    for (a, b), cell in one.cells.items():
        if cell != other.cells[a, b]:
            return f"says {other.cells[a, b]} from {a} to {b}, not {cell}"
    columns = ((one.affinity, other.affinity, "CPU"), (one.numa, other.numa, "NUMA"))
    different = [word for mine, theirs, word in columns if mine != theirs]
    return f"has another {different[0]} affinity" if different else "is the same"


def _matrix(table: Table, source: str) -> Matrix:
    """The cells of one table.

    Raises:
        TopologyError: They are no matrix.
    """
    if table.is_p2p:
        raise TopologyError(
            f"{source}: the only table is that of 'nvidia-smi topo -p2p', which says what is allowed and not "
            "how GPUs are joined; expected the output of 'nvidia-smi topo -m'"
        )
    end = next((place for place, word in enumerate(table.header) if not any(map(str.isdigit, word))), None)
    names, headings = table.header[:end], table.header[end:] if end else []
    columns = _columns(table.text, names[-1:], headings)
    place = f"{source}, line {table.line}"
    if len(set(names)) != len(names) or len(names) > _MAX_DEVICES:
        raise TopologyError(
            f"{place}: {len(names)} columns of which some repeat, or over {_MAX_DEVICES} of them"
        )
    if any(GPU.fullmatch(word) or "..." in word for word in headings):
        raise TopologyError(
            f"{place}: {headings[0][:40]!r} among the columns; expected the whole of one table"
        )
    matrix = Matrix(names, {})
    if unknown := [word for word in headings if not HEADING.fullmatch(word)]:
        matrix.notes.append(
            f"headings that are not known ({' '.join(unknown)[:80]}); the columns after the cells are taken "
            f"as {', '.join(kind for kind, _ in columns) or 'nothing'}"
        )
    columns = columns if headings else [(kind, -1) for kind in ("cpu", "numa", "gpu")]
    span = table.text.rfind(names[-1]) - table.text.find(names[0]) if names else 0
    for row in table.rows:
        _row(matrix, row, columns, span, f"{source}, line {row.line}")
    _fill(matrix, source)
    _check(matrix, source)
    _note_apart(matrix, table)
    names.sort(key=_order)
    return matrix


def _columns(text: str, last: Sequence[str], headings: Sequence[str]) -> list[tuple[str, int]]:
    """What each column after the cells is about, and how far right of the last device's name it begins.

    Args:
        text: The header; "" where it is not one line, which gives distances of 0.
        last: The name of the last device, if there is one.
        headings: The words after it.
    """
    start = text.rfind(last[0]) if last and text else -1
    if start < 0:
        return [(str(match.lastgroup), 0) for match in _COLUMNS.finditer(" ".join(headings))]
    found = _COLUMNS.finditer(text, start + len(last[0]))
    return [(str(match.lastgroup), match.start() - start) for match in found]


def _order(name: str) -> tuple[bool, int]:
    """What sorts devices: GPUs before NICs, and each by its number; NICs by name keep their order."""
    number = re.fullmatch(r"(?:GPU|NIC)(\d{1,9})", name)
    return GPU.fullmatch(name) is None, int(number[1]) if number else 0


def _row(matrix: Matrix, row: Row, columns: list[tuple[str, int]], span: int, place: str) -> None:
    names, name = matrix.names, row.name
    if name not in names:
        raise TopologyError(f"{place}: a row called {name[:40]!r}, and there is no such column")
    cells, further = _split(row, len(names), len(columns))
    apart = len(row.rest.lstrip()) - len(further) - len("".join(cells[-1:]))  # first and last cell
    further = _NODE.sub(lambda word: " " * len(word[0]), re.sub(r",\s+(?=\d)", ",", further))
    values = _values(further, len(columns))
    words = [word for word, _ in values]
    odd = not all(map(AFFINITY.fullmatch, further.split()[: len(columns)]))
    many = len(words) > len(columns)
    found = _placed(cells, names.index(name), len(names))
    if found is None or (found != cells and (many or odd)):
        raise TopologyError(f"{place}: {_lacking(matrix, name, cells, further)}")
    for column, cell in zip(names, found, strict=True):
        if re.fullmatch(r"[A-Z]+\d{3,}", cell):
            raise TopologyError(f"{place}: {cell[:40]!r} from {name} to {column}; expected at most 99 links")
        if matrix.cells.setdefault((name, column), cell) != cell:
            raise TopologyError(
                f"{place}: a second row for {name}, with {cell} to {column}; the first has "
                f"{matrix.cells[name, column]}"
            )
    if words and words[0] not in ("N/A", BLANK) and CELL.fullmatch(words[0]):
        raise TopologyError(f"{place}: more cells for {name} than the {len(names)} columns")
    if many:
        matrix.notes.append("more words after a device's cells than headings; its affinities are left out")
        return
    if odd and GPU.fullmatch(name):
        matrix.notes.append("words after a device's cells are no numbers; its affinities may be incomplete")
    right = len(found[-1]) if found == cells and abs(apart - span) < 2 else -1
    kinds = _kinds([(word, right + start if right > 0 else 0) for word, start in values], columns)
    if None in kinds and not odd:
        matrix.notes.append(
            "fewer values after a device's cells than headings, and nothing tells which are left out; only "
            "a list of CPUs is taken"
        )
    by_kind = {"cpu": matrix.affinity, "numa": matrix.numa, "gpu": matrix.memory}
    for kind, word in zip(kinds, words, strict=False):
        if kind and word not in ("N/A", BLANK) and AFFINITY.fullmatch(word):
            by_kind[kind].setdefault(name, word)


def _values(text: str, count: int) -> list[tuple[str, int]]:
    """The values after a row's cells, without remarks, and where each begins; at most so many with blanks."""
    words = [(word[0], word.start()) for word in re.finditer(r"\S+", text)]
    words = words[:1] + list(takewhile(lambda word: AFFINITY.fullmatch(word[0]), words[1:]))
    while len(words) > count and (blank := [n for n, (word, _) in enumerate(words) if word == BLANK]):
        del words[blank[-1]]  # two tabs, where nvidia-smi's own headings are as far apart
    return words


def _kinds(values: list[tuple[str, int]], columns: list[tuple[str, int]]) -> list[str | None]:
    """What each value is about: by its place below a heading where some are missing; None where unclear.

    Args:
        values: Words, and how far right of the last cell's beginning they stand; 0 where the row's cells are
            not below the devices' names.
        columns: As ``_columns`` gives them; distances below 0 where there are no headings.
    """
    kinds: list[str | None] = [kind for kind, _ in columns]
    marked = any(word == BLANK for word, _ in values)
    if not 0 < len(values) < len(columns) or marked or columns[0][1] < 0:
        return kinds
    below = [[kind for kind, at in columns if start and abs(start - at) < 2] for _, start in values]
    if all(below):
        return [kind for kind, *_ in below]
    word, start = values[0]
    width = columns[0][1]  # of a column; nvidia-smi leaves the CPUs out where a process has none of the node
    if len(values) == len(columns) - 1 and start and abs(start - 2 * width) < 2:
        return kinds[1:]
    return [kinds[0] if kinds[0] == "cpu" and re.search("[-,]", word) else None, None]


def _split(row: Row, count: int, columns: int) -> tuple[list[str], str]:
    """The cells of a row, and the text after them, of which a terminal may have cut a word in two."""
    cells, further = _cells(row.rest.replace(CUT, ""), count)
    if CUT in row.rest and len(further.split()) < columns:
        before, _, after = row.rest.rpartition(CUT)
        apart = _cells(f"{before.replace(CUT, '')} {after}", count)
        if apart[0] == cells and len(apart[1].split()) == columns:
            further = apart[1]
    return cells, further


def _cells(text: str, count: int) -> tuple[list[str], str]:
    """At most so many cells from the left, which may stand without a space, and the text after them."""
    cells: list[str] = []
    position = 0
    while len(cells) < count:
        match = CELL.match(text, position + len(text[position:]) - len(text[position:].lstrip()))
        if match is None:
            break
        cells.append(_cell(match.group()))
        position = match.end()
    return cells, text[position:]


def _cell(word: str) -> str:
    """A cell as drivers of today write it."""
    if word[:1] in f"-_{BLANK}":
        return "N/A"
    return _OLD_WORDS.get(word) or re.sub(r"(?<=[VI])0+(?=\d)", "", word)


def _placed(cells: list[str], position: int, count: int) -> list[str] | None:
    """The cells of the device in a position; of a row that is half of a triangle, with N/A for the others.

    Returns:
        None where there are too few, and it is not known which.
    """
    missing = ["N/A"] * (count - len(cells))
    if not missing or (cells[:1] == ["X"] and len(missing) == position):
        return missing + cells
    return cells + missing if cells[-1:] == ["X"] and len(cells) == position + 1 else None


def _lacking(matrix: Matrix, name: str, cells: list[str], further: str) -> str:
    """What is wrong with a row of too few cells."""
    words = further.split()
    if words and not all(map(AFFINITY.fullmatch, words)):
        column, word = matrix.names[len(cells)], words[0]
        if cells and (further[0] == word[0] or word[0] == "(" or not any(map(str.isalnum, word))):
            column, word = matrix.names[len(cells) - 1], cells[-1] + further[: further.index(word)] + word
        return f"{word[:40]!r} from {name} to {column}; expected X, NV#, PIX, PXB, PHB, NODE or SYS"
    return f"{len(cells)} cells for {name}; expected {len(matrix.names)}, one a column"


def _fill(matrix: Matrix, source: str) -> None:
    """Fills rows of NICs that the text leaves out, and cells that it leaves blank, from their columns.

    Raises:
        TopologyError: The row of a GPU is missing.
    """
    names, cells = matrix.names, matrix.cells
    missing = [name for name in names if (name, name) not in cells]
    if lost := [name for name in missing if GPU.fullmatch(name)]:
        raise TopologyError(
            f"{source}: no row for {', '.join(lost[:8])}; is the text cut short? Expected a row "
            "for each column"
        )
    blank = [pair for pair, cell in cells.items() if cell == "N/A"]
    cells.update({(name, other): "N/A" for name in missing for other in names})
    for a, b in [pair for pair, cell in cells.items() if cell == "N/A"]:
        cells[a, b] = "X" if a == b else cells[b, a]
    if missing:
        matrix.notes.append(
            f"{len(missing)} NICs have no row; their columns are taken, and how they are joined to each "
            "other is not known"
        )
    if filled := [pair for pair in blank if cells[pair] != "N/A"]:
        matrix.notes.append(
            f"{len(filled)} cells are blank, the first from {' to '.join(filled[0])}; those of the other "
            "half of the matrix are taken"
        )
    if unknown := [pair for pair in blank if cells[pair] == "N/A"]:
        matrix.notes.append(f"{len(unknown)} cells are N/A, the first from {' to '.join(unknown[0])}")


def _note_apart(matrix: Matrix, table: Table) -> None:
    """Notes the rows apart from the table that say something else than the table."""
    own = {row.name: _split(row, len(matrix.names), 0) for row in table.rows}
    others = []
    for row in table.apart:
        cells, further = _split(row, len(matrix.names), 0)
        mine, after = own.get(row.name, ([], ""))
        words = further.split()
        numbers = words if all(map(AFFINITY.fullmatch, words)) else []
        if cells and (cells != mine[: len(cells)] or numbers not in ([], after.split())):
            others.append(f"that in line {row.line} says {' '.join(cells + numbers)[:80]} for {row.name}")
    if others:
        matrix.notes.append(f"{len(others)} rows apart from the table are left out; {others[0]}")


def _check(matrix: Matrix, source: str) -> None:
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
