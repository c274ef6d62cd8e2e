"""Finds the tables of ``nvidia-smi topo`` in a text as people paste it.

Around a table may be prompts, prose, code fences, quote marks, colours and other tables; its own lines may be
indented, wrapped by a terminal (in the middle of a word too), double-spaced, or columns of Markdown.
"""

from __future__ import annotations

import csv
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flagcx.topology import pasted

GPU = re.compile(r"GPU\d{1,4}")
#: Stands where a text marks a cell or a value as left out.
BLANK = "\x01"
CELL = re.compile(rf"NV\d+|XGMI\d+|NODE|N/A|PIX|PXB|PHB|SYS|SOC|PSB|X|[-_]+(?=\s|$)|{BLANK}")
#: The words of ``topo -p2p``, which says what is allowed and not what is there.
P2P = frozenset(("OK", "CNS", "GNS", "TNS", "NS", "DR", "U"))
#: A word of a heading, or several without blanks between them.
HEADING = re.compile(r"(?:[\W_]*(?:CPU|GPU|NUMA|Affinity|ID|Nodes?))+[\W_]*", re.I)
#: Where the name of a device or a heading begins without a blank.
_GLUED = re.compile(r"(?<=[^\W_])(?=GPU\d|NIC\d|mlx\d|CPU|NUMA|GPU[ _-]?NUMA)")
_NAME = re.compile(r"[A-Za-z][A-Za-z_.:+-]*\d[\w.:+-]*")
AFFINITY = re.compile(rf"[\d,-]*\d[\d,-]*|N/A|{BLANK}")
#: Stands where a terminal has wrapped a row, perhaps in the middle of a word.
CUT = "\0"
_MOST_LINES = 1000  # of one table
_MOST_ROWS = 150
_MOST_OF_A_HEADER = 16384  # characters
_MOST_IN_ALL = 50_000  # lines of a text that are looked at
_MOST_BEFORE = 400  # characters of a line in which its name and first cell are looked for
_QUOTE = re.compile(r"(?:\s*>)+ ?")
_CELL_END = re.compile(r"</?t[dh]\b[^<>]*>", re.I)
_CLASS = r"(?:X|NV\d+|XGMI\d+|NODE|PIX|PXB|PHB|SYS|SOC|PSB)\b"
#: The name and the first cell of a row, with what a log, a list or a shell's prompt put before them.
_ROW = re.compile(
    r"(?:^|(?<=[\s\]>:+-]))(?P<name>(?!(?i:NV|XGMI)\d+\b)[A-Za-z][A-Za-z_.+-]{0,30}\d[\w.+-]{0,30}):?"
    rf"(?=\s{{1,40}}{_CLASS})"
)
_TAG_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:</?[a-zA-Z][^<>]*>)+(?=\d)")
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|`+")
_MARKS = str.maketrans(dict.fromkeys("|!&;*\\\"'", " "))
#: Footnotes' marks after a cell in markup, and what is struck out.
_FOOTNOTE = re.compile(
    r"<(sup|sub|del|s|strike)\b[^<>]*>(?:<a\b[^<>]*>)?[^<>]{0,20}(?:</a>)?</\1>|~~[^~\n]{1,20}~~"
    r"|<a\b[^<>]*#[^<>]*>[^<>]{0,4}</a>"
    rf"|(?<=[A-Z0-9]) ?(?:\[\^?\w{{1,2}}\]_?|\((?:\w{{1,2}}|\d* ?(?!{_CLASS})[A-Z][^()\n]{{0,30}})\)"
    r"|\^\{?\w{1,2}\}?\^?|\*\d\b)",
    re.I,
)
#: Where a cell is blank: between marks that separate cells, or between or after tabs.
_BLANK = re.compile(r"(?<=[|&])[ \t]+(?=[|&])|(?<=;)[ \t]*(?=;)")
_TABS = re.compile(rf"{_CLASS} ?\t ?{_CLASS}")
_BLANK_TAB = re.compile(r"(?<=\t) ?(?=\t|$)")
_BLANK_HTML = re.compile(r"<(t[dh])\b[^<>]*>(?:\s|</?(?:p|br|div|span)\b[^<>]*>){0,20}</\1>", re.I)
#: The end of a line in a list of strings, marks that Markdown escapes, and rules of LaTeX.
_NO_CELL = re.compile(r"\",?\s*$|\\(?=[_#*])|\\(?:hline|\w{3,6}rule)\b")
_NAMES = re.compile(r"\bGPU[ _#-]?(?=\d{1,4}\b)", re.I)
_ROW_OF_HTML = re.compile(r"<tr\b[^<>]*>", re.I)
_LINE_END = re.compile(r"<br\s*/?>|</(?:p|div|li|tr)>", re.I)


@dataclass(slots=True)
class Row:
    """A logical line of a table: its first word, the rest, and the number of the line it begins in."""

    name: str
    rest: str
    line: int
    last: int = 0  # length of the last physical line that is part of it


@dataclass(slots=True)
class Table:
    """A table: the words of its header, its rows, and rows that stand apart from it in the text."""

    header: list[str]
    line: int
    text: str = ""  # of the header, unless a terminal has wrapped it
    rows: list[Row] = field(default_factory=list)
    apart: list[Row] = field(default_factory=list)

    @property
    def is_p2p(self) -> bool:
        """Whether it is one of ``nvidia-smi topo -p2p``."""
        return any(word in P2P for row in self.rows for word in row.rest.split())


def clean(text: str) -> list[str]:
    """The lines of a text without colours, quote marks, prefixes of logs, markup and unusual characters."""
    text = _FOOTNOTE.sub(
        "", pasted.plain(html.unescape(html.unescape(text)).replace(CUT, "").replace(BLANK, ""))
    )
    head, *rows = _ROW_OF_HTML.split(text)
    # Each cell may stand in a line of its own, unless the row holds text with lines.
    text = head + "".join(row if "<pre" in row.lower() else _one_line(row) for row in rows)
    text = _CELL_END.sub(" ", _LINE_END.sub("\n", text))
    if re.search(r"\bGPU[ _#-]?0[\s,\"|]+GPU[ _#-]?1\b", text, re.I):
        text = _NAMES.sub("GPU", text)
    lines = re.split(r"\r*\n|\r", text, maxsplit=_MOST_IN_ALL)[:_MOST_IN_ALL]
    if re.search(r"\bGPU0\"?,\s*\"?(?:GPU|NIC|mlx|CPU)", text):
        lines = [_separated(line) for line in lines]
    if _TABS.search(text):  # else columns may be two tabs apart
        lines = [_filled(line) for line in lines]
    lines = [_NO_CELL.sub("", _BLANK.sub(f" {BLANK} ", line)).translate(_MARKS) for line in lines]
    return [_bare(line.expandtabs(8)) for line in _unnumbered(lines)]


def _one_line(row: str) -> str:
    """A row of HTML on a line of its own, and what follows it."""
    cells, end, after = row.partition("</tr>")
    cells = _LINE_END.sub(" ", _BLANK_HTML.sub(f" {BLANK} ", cells))
    return " ".join(cells.split()) + "\n" + after if end else "\n" + row


def _filled(line: str) -> str:
    """A row whose blank cells, and values if it has any, are marked between tabs."""
    end = max((cell.end() for cell in re.finditer(_CLASS, line)), default=0)
    values = line[end:]
    if end and values.strip():
        values = _BLANK_TAB.sub(BLANK, values)
    return _BLANK_TAB.sub(BLANK, line[:end]) + values


def _separated(line: str) -> str:
    """The cells of a line whose cells are separated by commas."""
    try:
        cells = next(csv.reader([line.replace(CUT, "")], skipinitialspace=True), [])
    except csv.Error:
        return line
    return "  ".join(cell or BLANK for cell in cells)


def _unnumbered(lines: list[str]) -> list[str]:
    """The lines without the numbers that an editor puts before every one of them."""
    parts = [re.match(r"\s*(\d{1,6})(?:[\s:]|$)", line) for line in lines if line]
    first = int(parts[0][1]) if parts and parts[0] else 0
    if not all(part and int(part[1]) == first + n for n, part in enumerate(parts)):
        return lines
    return [re.sub(r"^\s*\d+", "", line) for line in lines]


def _bare(line: str) -> str:
    """A line without quote marks and tags; of a row, without what stands before its name."""
    line = _TAG_BETWEEN_DIGITS.sub("?", line)
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
    table: Table | None = None
    apart: list[Row] = []
    while position < len(lines):
        header, first = _header(lines, position)
        if header:
            if table:
                yield table
            apart = [] if table else apart
            words = _words(lines[position])
            text = lines[position] if header[-len(words) :] == words else ""
            table = Table(header, position + 1, text, apart=apart)
            position = _rows(lines, first, table, _width(lines, position))
            continue
        if _begins_row(line := lines[position], table.header if table else ()):
            apart.append(_row(line, position))
        position += 1
    if table:
        yield table


def _header(lines: Sequence[str], position: int) -> tuple[list[str], int]:
    """The words of the header that begins in a line, none where it is no header, and the line after it."""
    names = _words(lines[position])
    if not names:
        return [], position
    below = next((n for n in range(position + 1, len(lines)) if any(map(str.isalnum, lines[n]))), position)
    before = _before(lines, position, names)
    if (
        all(map(_is_heading, names[:2]))
        and _ROW.match(lines[below])
        and lines[below].split()[0] in before + names
    ):
        return before + names, below
    if not all(map(_is_heading, names[:-1])):
        return [], position
    first = _first_row(lines, position + 1, before + names)
    words = _words(_joined(lines[position:first], _width(lines, position)))
    return (before + words if all(map(_is_heading, words)) else []), first


def _before(lines: Sequence[str], position: int, names: Sequence[str]) -> list[str]:
    """The names of a header before the first GPU's that have rows of two cells or more."""
    others = _split(lines[position])[: -len(names)]
    below = lines[position + 1 : position + _MOST_ROWS] if others else ()
    rows = [line.split(maxsplit=3) for line in below if _ROW.match(line)]
    with_rows = {row[0] for row in rows if CELL.fullmatch("".join(row[2:3]))}
    return [name for name in others if name in with_rows]


def _split(line: str) -> list[str]:
    return _GLUED.sub(" ", line[:_MOST_OF_A_HEADER]).split()


def _words(line: str) -> list[str]:
    """The words of a header from the first GPU's on."""
    words = _split(line)
    start = next((number for number, word in enumerate(words) if GPU.fullmatch(word)), len(words))
    return words[start:]


def _is_heading(word: str) -> bool:
    return bool(HEADING.fullmatch(word) or (_NAME.fullmatch(word) and not CELL.fullmatch(word)))


def _is_header(line: str) -> bool:
    """Whether a line has names of devices and headings alone."""
    words = _words(line)
    return bool(words) and all(map(_is_heading, words))


def _first_row(lines: Sequence[str], position: int, names: Sequence[str]) -> int:
    """The number of the first row below a header, which a terminal may have wrapped.

    Args:
        lines: All lines.
        position: The number of the line below the header's first.
        names: The words of that line.

    Returns:
        The number of a line; ``position`` where no row follows.
    """
    for number in range(position, len(lines)):
        words = lines[number].split()
        if words and words[0] in names and not HEADING.fullmatch(words[0]):
            return number
        if names[0] in words or not all(map(_is_heading, words[1:-1])):
            break
    return position


def _begins_row(line: str, names: Sequence[str]) -> bool:
    words = line.split(maxsplit=2)
    if len(words) < 2 or HEADING.fullmatch(words[0]):
        return False
    cell = bool(CELL.match(words[1])) or words[1] in P2P
    return words[0] in names or (cell and bool(GPU.fullmatch(words[0])))


def _joined(lines: Sequence[str], width: int) -> str:
    """Lines that a terminal of a width made of one, perhaps in the middle of a word."""
    text, last = "", 0
    for line in lines:
        whole = last < width or not any(map(str.isalnum, line))
        if text and whole and not any(map(_is_heading, line.split())):
            continue  # a rule below the header
        before, after = text.split()[-1:], line.split()[:1]
        apart = last < width or not before or not after or all(map(_is_heading, before + after))
        text, last = text + " " * apart + line, len(line)
    return text


def _rows(lines: Sequence[str], position: int, table: Table, width: int) -> int:
    """Collects the rows of a table; gives the number of the line after them."""
    names = table.header
    wanted = {name for name in names if _NAME.fullmatch(name)}
    while position < len(lines) and len(table.rows) < _MOST_LINES:
        line = lines[position]
        words = line.split() if any(map(str.isalnum, line)) else []
        complete = not wanted
        if _words(line) == names and not complete:  # again, as on each page
            position += 1
            continue
        if words and ("Legend:" in line or _is_header(line)):
            break
        if complete and (not words or _words(line) == names):
            break
        if _begins_row(line, names):
            if complete and not _continues(words[1:], cut=len(line) == width):
                break
            table.rows.append(_row(line, position))
            wanted.discard(words[0])
        elif words and table.rows and _continues(words, cut=len(line) == width):
            row = table.rows[-1]
            row.rest += (CUT if row.last == width else " ") + line
            row.last = len(line)
        elif words and complete:
            break
        position += 1
    return position


def _row(line: str, position: int) -> Row:
    name = line.split(maxsplit=1)[0]
    return Row(name, line.lstrip()[len(name) :], position + 1, len(line))


def _continues(words: Sequence[str], *, cut: bool) -> bool:
    """Whether a line holds nothing but the further cells of a row, the first of which may be cut in two.

    Args:
        words: Of the line.
        cut: Whether the last may be cut too.
    """
    whole = words[1:-1] if cut else words[1:]
    return all(CELL.match(word) or AFFINITY.fullmatch(word) for word in whole) and (
        len(words[0]) <= 4 or bool(CELL.match(words[0]) or AFFINITY.fullmatch(words[0]))
    )


def _width(lines: Sequence[str], start: int) -> int:
    """The width at which a terminal has wrapped a table, if one has: that of its longest line."""
    legend = (position for position in range(start + 1, len(lines)) if "Legend:" in lines[position])
    return max(map(len, lines[start : min(next(legend, len(lines)), start + _MOST_LINES)]))


def has_table(text: str) -> bool:
    """Whether a text has a table with rows."""
    return any(table.rows for table in tables(clean(text)))
