"""Pictures: the table is checked by its words, the drawing by what it is made of."""

from __future__ import annotations

import builtins
import sys

import pytest

from flagcx.errors import ArgumentError, MissingDependencyError
from flagcx.schedule.draw import REDUCED, draw, text
from flagcx.schedule.verify import verify
from tests.schedule.samples import binomial_broadcast, one_shot, ring_allreduce, two_shot


def test_text_of_a_one_shot():
    assert text(one_shot(2)) == (
        "allreduce, one_shot: 2 ranks, 1 chunk\n"
        "rank | step 0\n"
        "   0 | I0→1 S1←1 S0=I0 O0=S0 O0+=S1\n"
        "   1 | I0→0 S0←0 S1=I0 O0=S0 O0+=S1\n"
        "I, O, S: INPUT, OUTPUT, SCRATCH. O1→2 sends chunk 1 of OUTPUT to rank 2;\n"
        "O1←2 receives it from rank 2; O1+←2 receives and reduces. O1=I1 copies; O1+=S1 reduces."
    )


def test_text_puts_both_sides_of_a_message_into_one_column():
    lines = text(binomial_broadcast(5, root=0)).splitlines()
    assert lines[0] == "broadcast, binomial: 5 ranks, 1 chunk, root 0"
    columns = [[cell.strip() for cell in line.split("|")] for line in lines[1:7]]
    assert columns[1] == ["0", "O0=I0", "O0→4", "O0→2", "O0→1"]
    assert columns[4] == ["3", "", "", "", "O0←2"]


def test_text_cuts_long_cells():
    line = text(two_shot(5), width=20).splitlines()[2]
    assert line.startswith("   0 | I1→1 I2→2 I3→3 I4→4 ... 10 more")
    assert "O0-4=I0-4" in text(ring_allreduce(5))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_draw_writes_a_picture(tmp_path, ending):
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    path = tmp_path / f"ring.{ending}"
    draw(ring_allreduce(3), path)
    assert path.read_bytes()[:4] == {"png": b"\x89PNG", "svg": b"<?xm"}[ending]


def test_draw_shows_every_message_and_reduction():
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    axes = draw(ring_allreduce(4)).axes[0]
    (reduced,) = (marks for marks in axes.collections if marks.get_gid() == REDUCED)
    assert len(reduced.get_offsets()) == 12
    assert sorted(t.get_text() for t in axes.texts) == sorted("0123" * 6)
    assert [t.get_text() for t in axes.get_yticklabels()] == [f"rank {r}" for r in range(4)]


def test_a_figure_shows_itself_in_a_notebook():
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    figure = draw(two_shot(3))
    assert figure._repr_png_()[:4] == b"\x89PNG"
    assert two_shot(3)._repr_html_().startswith('<img alt="a schedule" src="data:image/png;base64,')
    assert figure._repr_html_().startswith('<img alt="a schedule" src="data:image/png;base64,')


def test_a_schedule_that_cannot_be_drawn_shows_itself_in_words(monkeypatch):
    assert two_shot(2)._repr_png_()[:4] == b"\x89PNG" and two_shot(300)._repr_png_() is None
    page = two_shot(300)._repr_html_()
    assert "two_shot: 300 ranks" in page and "cannot be read" in page
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert two_shot(2)._repr_html_().startswith("<pre>allreduce, two_shot: 2 ranks, 2 chunks\nrank | step 0")


@pytest.mark.parametrize("path", ["x.xyz", "nowhere/x.png"])
def test_a_file_that_cannot_be_written_is_refused(path):
    with pytest.raises(ArgumentError, match=r"cannot draw to '\.xyz'|there is no such directory"):
        draw(two_shot(3), path)


@pytest.mark.parametrize("function", [draw, verify])
def test_what_is_no_schedule_is_refused(function):
    with pytest.raises(ArgumentError, match=r"expected a Schedule, such as .*, got 'ring'"):
        function("ring")


def test_of_a_long_schedule_the_first_steps_are_drawn():
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    axes = draw(ring_allreduce(100)).axes[0]
    assert axes.get_title(loc="left") == "allreduce, ring: 100 ranks, 100 chunks; the first 101 of 199 steps"
    lines = next(marks for marks in axes.collections if type(marks).__name__ == "LineCollection")
    assert len(lines.get_segments()) <= 10_000
    with pytest.raises(ArgumentError, match="300 ranks cannot be read; expected at most 256"):
        draw(ring_allreduce(300))


def test_draw_without_matplotlib(tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flagcx\[plot\]'"):
        draw(one_shot(2), tmp_path / "none.png")
