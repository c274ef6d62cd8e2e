"""An explanation's table on narrow terminals: figures, headings and the mark of the chosen row stay whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flagcx.report import fold, lay_out
from flagcx.selection.explain import explain
from flagcx.topology import cluster, preset

FOUND = explain("allreduce", 64 << 20, 9, cluster(preset("dgx-1v"), 2))
MEASURED = explain("allreduce", 1 << 20, 8, preset("dgx-a100"), measured={"ring": 123456.7, "tree": 99.5})
BARRED = explain("allreduce", 64 << 20, 4, preset("4xpcie"))


def test_without_a_limit_every_row_is_a_line():
    lines = lay_out(FOUND.cells(), None)
    assert lines == str(FOUND).splitlines()[1:-1]
    assert len(lines) == 1 + len(FOUND.rows) and not any("\n" in line for line in lines)
    for cells, line in zip(FOUND.cells(), lines, strict=True):
        assert all(cell in line for cell in cells)


@pytest.mark.parametrize("found", [FOUND, MEASURED, BARRED])
@pytest.mark.parametrize("width", [200, 120, 80, 79, 66])
def test_it_fits_and_only_words_are_broken(found, width):
    head, *rows = lay_out(found.cells(), width)
    assert max(len(line) for row in (head, *rows) for line in row.splitlines()) <= width
    for heading in found.cells()[0]:
        assert all(word in head for word in heading.split())
    for cells, row in zip(found.cells()[1:], rows, strict=True):
        figures, verdict = [*cells[1:3], *cells[4:-1]], cells[-1]
        first = row.splitlines()[0]
        assert all(figure in first for figure in figures)
        assert verdict in first or verdict.startswith("cannot: ")


def test_sixty_columns_and_fewer_than_can_be():
    for width in (60, 20):
        lines = [line for row in lay_out(FOUND.cells(), width) for line in row.splitlines()]
        assert max(map(len, lines)) <= max(width, 56)
        assert any("<- chosen" in line for line in lines) and any("113.8 MiB" in line for line in lines)
        assert "predicted" in lines[0] and lines[1].endswith("us")


def test_a_terminal_gets_the_whole_table():
    console = Console(width=60, file=io.StringIO(), force_terminal=True)
    console.print(FOUND)
    text = console.file.getvalue()
    assert "<- chosen" in text and "1.15 x" in text and "113.8 MiB" in text
    (chosen,) = [line for line in text.splitlines() if "<- chosen" in line]
    assert chosen.startswith("\x1b[1m") and "9453.9 <- chosen" in chosen


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("", 9, [""]),
        ("ring", 4, ["ring"]),
        ("double_binary_tree in 64 pieces", 12, ["double_", "binary_tree", "in 64 pieces"]),
        ("host1/gpu8 -> host1/switch0 92%", 20, ["host1/gpu8 ->", "host1/switch0 92%"]),
        ("ring along 0,3,2,1", 10, ["ring along", "0,3,2,1"]),
        ("abcdefghijk", 4, ["abcd", "efgh", "ijk"]),
    ],
)
def test_folds(text, width, lines):
    assert fold(text, width) == lines
