"""An explanation's table on narrow terminals: figures, headings and the mark of the chosen row stay whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flagcx.report import Report, fold
from flagcx.selection.explain import explain
from flagcx.topology import cluster, preset

FOUND = explain("allreduce", 64 << 20, 9, cluster(preset("dgx-1v"), 2))
MEASURED = explain("allreduce", 1 << 20, 8, preset("dgx-a100"), measured={"ring": 123456.7, "tree": 99.5})
BARRED = explain("allreduce", 64 << 20, 4, preset("4xpcie"))


def test_without_a_limit_every_row_is_a_line():
    report = FOUND.report()
    lines = report.lay_out()
    assert lines == str(FOUND).splitlines()[1 : -len(report.notes)]
    assert len(lines) == 1 + len(FOUND.rows) and not any("\n" in line for line in lines)
    for cells, line in zip([report.columns, *report.rows], lines, strict=True):
        assert all(cell in line for cell in cells)


@pytest.mark.parametrize("found", [FOUND, MEASURED, BARRED])
@pytest.mark.parametrize("width", [200, 120, 80, 79, 66])
def test_it_fits_and_only_words_are_broken(found, width):
    report = found.report()
    head, *rows = report.lay_out(width)
    assert max(len(line) for row in (head, *rows) for line in row.splitlines()) <= width
    for heading in report.columns:
        assert all(word in head for word in heading.split())
    for cells, row in zip(report.rows, rows, strict=True):
        figures, verdict = [*cells[1:3], *cells[4:-1]], cells[-1]
        first = row.splitlines()[0]
        assert all(figure in first for figure in figures)
        assert verdict in first or verdict.startswith("cannot: ")


def test_sixty_columns_and_fewer_than_can_be():
    for width in (60, 20):
        lines = [line for row in FOUND.report().lay_out(width) for line in row.splitlines()]
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


def test_any_number_of_columns_may_hold_words():
    rows = [("alpha beta gamma", "1", "one two three four"), ("delta", "22", "five six seven eight nine")]
    report = Report("title", ("name", "n", "words"), rows, (0, 2), ["a note"])
    assert str(report).splitlines()[2] == "alpha beta gamma   1  one two three four"
    assert str(report).splitlines()[-1] == "a note"
    for width in (24, 30, 36):
        lines = [line for row in report.lay_out(width) for line in row.splitlines()]
        assert max(map(len, lines)) <= width
        assert " ".join(lines).replace(" ", "").count("seven") == 1
    one = Report("", ("name", "n"), [("alpha_beta_gamma", "1")], (0,))
    assert one.lay_out(14) == ["name         n", "alpha_beta_  1\ngamma"]


def test_html_escapes_the_cells():
    page = Report("<t>", ("a", "b"), [("<i>", "1"), ("x", "2")], (0,), ["<n>"], bold=(1,))._repr_html_()
    assert '<td style="text-align:left">&lt;i&gt;</td><td>1</td>' in page, "words stand at the left"
    assert "<p>&lt;n&gt;</p>" in page and "&lt;t&gt;" in page and "<td><b>2</b></td>" in page


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
