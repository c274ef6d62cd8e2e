"""The table of an explanation as lines of text, no wider than there is room for.

Figures, the words of headings and the mark of the chosen row are never cut: where room is short, names,
links and reasons go on in further lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product, zip_longest

_WORDY = (0, 3, -1)
"""Candidate, busiest link and verdict: words, which stand at the left and may take several lines."""
_LEAST = 9
"""No column of words gets narrower: ``<- chosen`` stays whole."""
_WIDE = 80
_PARTS = re.compile(r"[^ _,/]*[ _,/]|[^ _,/]+")


def lay_out(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """A table's rows, each as text of one or more lines.

    Args:
        cells: A row of headings, then the others.
        width: Columns of the terminal; None for as many as it takes.

    Example:
        >>> rows = ("candidate", "steps", "us", "link", ""), ("double_binary_tree", "6", "1.5", "-", "1 x")
        >>> print(*lay_out(rows, None), sep="\\n")
        candidate           steps   us  link
        double_binary_tree      6  1.5  -     1 x
    """
    columns = list(zip(*cells, strict=True))
    wordy = [place % len(columns) for place in _WORDY]
    widths, gap = [max(map(len, column)) for column in columns], 2
    if width is not None and sum(widths) + gap * (len(widths) - 1) > width:
        gap = 2 if width >= _WIDE else 1
        widths = _narrowed(columns, wordy, width - gap * (len(widths) - 1))
    return [_row(row, widths, wordy, " " * gap) for row in cells]


def _narrowed(columns: Sequence[Sequence[str]], wordy: Sequence[int], room: int) -> list[int]:
    """Widths that share the room: whole words of the headings, whole figures, and what is left for words."""
    widths = [max(map(len, [*heading.split(), *texts])) for heading, *texts in columns]
    room -= sum(width for place, width in enumerate(widths) if place not in wordy)
    for place, share in zip(wordy, _shares([columns[place] for place in wordy], room), strict=True):
        widths[place] = share
    return widths


def _shares(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """The widths of the columns of words with which the table has the fewest lines."""
    natural = [max(_LEAST, *map(len, column)) for column in columns]
    heights = [
        {width: [len(fold(text, width)) for text in column] for width in range(_LEAST, most + 1)}
        for column, most in zip(columns, natural, strict=True)
    ]
    best, found = 0, [_LEAST] * 3
    for one, two in product(heights[0], heights[1]):
        three = min(room - one - two, natural[2])
        if three < _LEAST:
            continue
        lines = sum(map(max, heights[0][one], heights[1][two], heights[2][three]))
        if not best or lines <= best:
            best, found = lines, [one, two, three]
    return found


def _row(row: Sequence[str], widths: Sequence[int], wordy: Sequence[int], gap: str) -> str:
    folded = [fold(text, width) for text, width in zip(row, widths, strict=True)]
    lines = []
    for line in zip_longest(*folded, fillvalue=""):
        shown = [
            text.ljust(width) if place in wordy else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(gap.join(shown).rstrip())
    return "\n".join(lines)


def fold(text: str, width: int) -> list[str]:
    """The lines of a text: broken at blanks, else behind ``_``, ``,`` or ``/``, and within a word if need be.

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
