"""Finds the tables of ``nvidia-smi topo`` in a text as people paste it.

Around a table may be prompts, prose, code fences, quote marks, colours and other tables; its own lines may be
indented, wrapped by a terminal (in the middle of a word too), double-spaced, or columns of Markdown.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

GPU = re.compile(r"GPU\d{1,4}")
CELL = re.compile(r"NV\d{1,3}|XGMI\d{1,2}|NODE|N/A|PIX|PXB|PHB|SYS|SOC|X")
#: The words of ``topo -p2p``, which says what is allowed and not what is there.
P2P = frozenset(("OK", "CNS", "GNS", "TNS", "NS", "DR", "U"))
_FURTHER = ("CPU", "NUMA", "Affinity", "GPU", "ID", "Node", "node", "Nodes")
_NAME = re.compile(r"[A-Za-z][A-Za-z_.:+-]*\d[\w.:+-]*")
_AFFINITY = re.compile(r"[\d,-]*\d[\d,-]*|N/A")
#: Stands where a terminal has wrapped a row, perhaps in the middle of a word.
CUT = "\0"
_MOST_LINES = 1000  # of one table
_MOST_IN_ALL = 50_000  # lines of a text that are looked at
_MOST_BEFORE = 400  # characters of a line in which its name and first cell are looked for
_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]"
    # A colour whose first character was lost on the way, or is written out.
    r"|(?:\^\[|\\(?:u001b|x1b|033|e))?\[[0-9]{1,3}(?:;[0-9]{1,3}){0,4}m"
)
_QUOTE = re.compile(r"(?:\s*>)+ ?")
_CELL_END = re.compile(r"</t[dh]>", re.I)
#: The name and the first cell of a row, with what a log, a list or a shell's prompt put before them.
_ROW = re.compile(
    r"(?:^|(?<=[\s\]>:+-]))(?P<name>[A-Za-z][A-Za-z_.+-]{0,30}\d[\w.+-]{0,30}):?"
    r"(?=\s{1,40}(?:X|NV\d+|XGMI\d+|NODE|PIX|PXB|PHB|SYS|SOC)\b)"
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,80}>|`+")
_CHARACTERS: dict[int, str | None] = {
    **{ord(mark): None for mark in "*\ufeff\u200b\u200c\u200d\u2060\u00ad"},
    **{ord(mark): " " for mark in "|&;\\\u2502\u2503\u2551\u00a0\u2007\u202f\u3000\u2002\u2003\u2009"},
    **{ord(mark): "-" for mark in "\u2010\u2011\u2012\u2013\u2014\u2212"},
}


@dataclass(slots=True)
class Row:
    """A logical line of a table: its first word, the rest, and the number of the line it begins in."""

    name: str
    rest: str
    line: int
    last: int = 0  # length of the last physical line that is part of it


@dataclass(slots=True)
class Table:
    """A table: the words of its header, and its rows."""

    header: list[str]
    line: int
    rows: list[Row] = field(default_factory=list)

    @property
    def is_p2p(self) -> bool:
        """Whether it is one of ``nvidia-smi topo -p2p``."""
        return any(word in P2P for row in self.rows for word in row.rest.split())


def clean(text: str) -> list[str]:
    """The lines of a text without colours, quote marks, prefixes of logs, markup and unusual characters."""
    text = _ESCAPES.sub("", html.unescape(text).replace(CUT, ""))
    if text.count("\\n") > text.count("\n"):  # a string as programs print it
        text = text.replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t")
    text = _CELL_END.sub(" ", text).translate(_CHARACTERS)
    text = re.sub(r"(?<=Affinity)(?=NUMA|GPU)", " ", text)
    lines = re.split(r"\r*\n|\r", text, maxsplit=_MOST_IN_ALL)[:_MOST_IN_ALL]
    return [_bare(line.expandtabs(8)) for line in _unnumbered(lines)]


def _unnumbered(lines: list[str]) -> list[str]:
    """The lines without the numbers that an editor puts before every one of them."""
    parts = [re.match(r"\s*(\d{1,6})(?:[\s:]|$)", line) for line in lines if line]
    first = int(parts[0][1]) if parts and parts[0] else 0
    if not all(part and int(part[1]) == first + n for n, part in enumerate(parts)):
        return lines
    return [re.sub(r"^\s*\d+", "", line) for line in lines]


def _bare(line: str) -> str:
    """A line without quote marks and tags; of a row, without what stands before its name."""
    line = _TAG.sub("", _QUOTE.sub("", line, count=1) if _QUOTE.match(line) else line)
    row = _ROW.search(line, 0, _MOST_BEFORE)
    if row is None or (not line[: row.start("name")].strip() and line[row.end("name") :][:1] != ":"):
        return line
    return row["name"] + line[row.end() :]


def tables(lines: Sequence[str]) -> Iterator[Table]:
    """The tables in cleaned lines, in order.

    Yields:
        A table for each header, even one with no rows.
    """
    position = 0
    while position < len(lines):
        if not _header(lines[position], broken=_is_full(lines, position)):
            position += 1
            continue
        header, first = _whole_header(lines, position)
        table = Table(header, position + 1)
        position = _rows(lines, first, table)
        yield table


def _words(line: str) -> list[str]:
    """The words of a header from the first GPU's on."""
    words = line.split()
    start = next((number for number, word in enumerate(words) if GPU.fullmatch(word)), len(words))
    return words[start:]


def _header(line: str, *, broken: bool = False) -> bool:
    """Whether a line is a header: names of devices and headings, and no cell.

    Args:
        line: The line.
        broken: Whether its last word may be cut in two by a terminal.
    """
    words = _words(line)
    return bool(words) and all(map(_is_heading, words[:-1] if broken and len(words) > 1 else words))


def _is_heading(word: str) -> bool:
    return word in _FURTHER or (bool(_NAME.fullmatch(word)) and not CELL.fullmatch(word))


def _is_full(lines: Sequence[str], position: int) -> bool:
    """Whether a line is as long as those around it that a terminal may have wrapped."""
    near = lines[position : position + 4]
    return len(lines[position]) >= 40 and len(lines[position]) == max(map(len, near))


def _begins_row(line: str, names: Sequence[str]) -> bool:
    words = line.split(maxsplit=2)
    if not words or (words[0] not in names and not _NAME.fullmatch(words[0])):
        return False
    return len(words) > 1 and bool(CELL.match(words[1]) or words[1] in P2P or words[0] in names)


def _whole_header(lines: Sequence[str], start: int) -> tuple[list[str], int]:
    """The words of a header that may be wrapped, and the number of the line after it."""
    text, position = lines[start], start + 1
    while position < len(lines):
        line = lines[position]
        if line.strip() and (_header(line) or _begins_row(line, _words(text))):
            break
        words = line.split()
        whole = words[1:] if words and not _is_heading(words[0]) else words  # the first may be cut in two
        if words and (
            not all(map(_is_heading, whole)) or (len(whole) < len(words) and not _cut(text, words[0]))
        ):
            break
        if words:
            apart = _is_heading(text.split()[-1]) and _is_heading(words[0])
            text += (" " if apart else "") + line
        position += 1
    return _words(text), position


def _cut(text: str, rest: str) -> bool:
    """Whether ``rest`` ends the last word of a header that a terminal has cut in two."""
    words = text.split()
    return bool(words) and _is_heading(words[-1] + rest)


def _rows(lines: Sequence[str], position: int, table: Table) -> int:
    """Collects the rows of a table; gives the number of the line after them."""
    names = table.header
    wanted = {name for name in names if _NAME.fullmatch(name)}
    width = _width(lines, table.line - 1)
    while position < len(lines):
        line = lines[position]
        words = line.split() if any(map(str.isalnum, line)) else []
        complete = wanted <= {row.name for row in table.rows}
        if words and ("Legend:" in line or (_header(line) and not _begins_row(line, names))):
            break
        if complete and not words:
            break
        if _begins_row(line, names):
            rest = line.lstrip()[len(words[0]) :]
            table.rows.append(Row(words[0], rest, position + 1, len(line)))
        elif words and table.rows and _continues(words):
            row = table.rows[-1]
            row.rest += (CUT if row.last == width else " ") + line
            row.last = len(line)
        elif words and complete:
            break
        position += 1
    return position


def _continues(words: Sequence[str]) -> bool:
    """Whether a line holds nothing but the further cells of a row; its first may be cut in two."""
    return all(CELL.match(word) or _AFFINITY.fullmatch(word) for word in words[1:]) and (
        len(words[0]) <= 4 or bool(CELL.match(words[0]) or _AFFINITY.fullmatch(words[0]))
    )


def _width(lines: Sequence[str], start: int) -> int:
    """The width at which a terminal has wrapped a table, if one has: that of its longest line."""
    legend = (position for position in range(start + 1, len(lines)) if "Legend:" in lines[position])
    return max(map(len, lines[start : min(next(legend, len(lines)), start + _MOST_LINES)]))


def has_table(text: str) -> bool:
    """Whether a text has a table with rows."""
    return any(table.rows for table in tables(clean(text)))
