"""A table with a title and notes: as text, in a terminal, in a notebook, as JSON.

In a terminal the table is no wider than there is room for. Figures and the words of headings are never cut:
where room is short, columns of words go on in further lines.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

_LEAST = 9
"""No column of words gets narrower: ``<- chosen`` stays whole."""
_WIDE = 80
_PARTS = re.compile(r"[^ _,/]*[ _,/]|[^ _,/]+")


def duration(time_us: float) -> str:
    """A time in three digits and a unit that suits it.

    Args:
        time_us: The time, in us.

    Example:
        >>> duration(9.685), duration(9685.3)
        ('9.69 us', '9.69 ms')
    """
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if time_us >= factor:
            return f"{time_us / factor:.3g} {unit}"
    return f"{time_us:.3g} us"


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A table with a title and notes.

    Attributes:
        title: A line above the table.
        columns: The headings.
        rows: The cells of each row, as many as there are headings.
        words: Columns that hold words, by index: they stand at the left and may take several lines. Others
            hold figures, which stand at the right.
        notes: Sentences below the table.
        bold: Rows that a terminal shows in bold, by index.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int]
    notes: Sequence[str] = ()
    bold: Collection[int] = ()

    def lay_out(self, width: int | None = None) -> list[str]:
        """The headings and each row, as text of one or more lines.

        Args:
            width: Columns of the terminal; None for as many as it takes.

        Example:
            >>> report = Report("", ("candidate", "steps", "us"), [("double_binary_tree", "6", "1.5")], (0,))
            >>> print(*report.lay_out(), sep="\\n")
            candidate           steps   us
            double_binary_tree      6  1.5
        """
        cells = [self.columns, *self.rows]
        columns = list(zip(*cells, strict=True))
        widths, gap = [max(map(len, column)) for column in columns], 2
        if width is not None and sum(widths) + gap * (len(widths) - 1) > width:
            gap = 2 if width >= _WIDE else 1
            widths = self._narrowed(columns, width - gap * (len(widths) - 1))
        return [self._row(row, widths, " " * gap) for row in cells]

    def _narrowed(self, columns: Sequence[Sequence[str]], room: int) -> list[int]:
        """Widths that share the room: whole words of headings, whole figures, and what is left for words."""
        widths = [max(map(len, [*heading.split(), *texts])) for heading, *texts in columns]
        room -= sum(width for place, width in enumerate(widths) if place not in self.words)
        wordy = sorted(self.words)
        for place, share in zip(wordy, _shares([columns[place] for place in wordy], room), strict=True):
            widths[place] = share
        return widths

    def _row(self, row: Sequence[str], widths: Sequence[int], gap: str) -> str:
        folded = [fold(text, width) for text, width in zip(row, widths, strict=True)]
        lines = []
        for line in zip_longest(*folded, fillvalue=""):
            shown = [
                text.ljust(width) if place in self.words else text.rjust(width)
                for place, (text, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append(gap.join(shown).rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join([self.title, *self.lay_out(), *self.notes])

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        yield Text(self.title, style="italic")
        for number, row in enumerate(self.lay_out(options.max_width), -1):
            yield Text(row, style="bold" if number in self.bold else "", no_wrap=True, overflow="ignore")
        yield from map(Text, self.notes)

    def _repr_html_(self) -> str:
        import html

        def row(cells: Sequence[str], tag: str, bold: bool = False) -> str:
            shown = (f"<b>{html.escape(text)}</b>" if bold else html.escape(text) for text in cells)
            # Notebooks put all cells at the right.
            left = (' style="text-align:left"' if place in self.words else "" for place in range(len(cells)))
            row = (f"<{tag}{side}>{text}</{tag}>" for side, text in zip(left, shown, strict=True))
            return f"<tr>{''.join(row)}</tr>"

        body = "".join(row(cells, "td", place in self.bold) for place, cells in enumerate(self.rows))
        return (
            f"<p><b>{html.escape(self.title)}</b></p>"
            f"<table><thead>{row(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"
            + "".join(f"<p>{html.escape(text)}</p>" for text in self.notes)
        )


class Reported:
    """Base of results that print as a report, which a notebook shows as a table."""

    __slots__ = ()

    @abstractmethod
    def report(self) -> Report:
        """The result as a table."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        return str(self.report())

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield self.report()

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def _shares(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """The widths of the columns of words with which the table has the fewest lines."""
    natural = [max(_LEAST, *map(len, column)) for column in columns]
    heights = [
        {width: [len(fold(text, width)) for text in column] for width in range(_LEAST, most + 1)}
        for column, most in zip(columns, natural, strict=True)
    ]
    best, found = 0, [_LEAST] * len(columns)
    for widths in product(*heights[:-1]):
        last = min(room - sum(widths), natural[-1])
        if last < _LEAST:
            continue
        chosen = [*widths, last]
        folded = (column[width] for column, width in zip(heights, chosen, strict=True))
        lines = sum(map(max, zip(*folded, strict=True)))
        if not best or lines <= best:
            best, found = lines, chosen
    return found


def fold(text: str, width: int) -> list[str]:
    """The lines of a text: broken at blanks, else after ``_``, ``,`` or ``/``, and within a word if need be.

    Example:
        >>> fold("ring along 0,3,2,1,5,6,7,4,...", 14)
        ['ring along', '0,3,2,1,5,6,7,', '4,...']
    """
    lines = [""]
    for word in text.split():
        whole = f"{lines[-1]} {word}".lstrip()
        if len(whole) <= width:
            lines[-1] = whole
            continue
        if lines[-1]:
            lines.append("")
        for part in _PARTS.findall(word):
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
            while len(lines[-1]) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines
