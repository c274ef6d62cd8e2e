"""The ranks' output: prefixes, carriage returns, rank 0's terminal, and the traceback at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagcx._launch.failure import is_consequence
from flagcx._launch.output import Lines, Screen, Tail


def lines_of(*pieces, clock=lambda: 0.0, finish=True):
    written = []
    lines = Lines(b"[1] ", written.append, clock)
    for piece in pieces:
        lines.feed(piece)
    if finish:
        lines.finish()
    return written


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], [b"[1] one\n", b"[1] two\n"]),
        ([b"on", b"e\nt", b"wo\n"], [b"[1] one\n", b"[1] two\n"]),
        ([b"no end"], [b"[1] no end\n"]),
        ([b"\n\n"], [b"[1] \n", b"[1] \n"]),
        ([b"dos\r\nline\r\n"], [b"[1] dos\n", b"[1] line\n"]),
        ([b"10%\r20%\r100%\ndone\n"], [b"[1] 100%\n", b"[1] done\n"]),
        ([b"10%\r", b"20%\r", b"100%\r", b"\n"], [b"[1] 100%\n"]),
        ([b"\r10%", b"\r20%", b"\r100%"], [b"[1] 100%\n"]),
        ([b"10%\r"], [b"[1] 10%\n"]),
        ([], []),
    ],
)
def test_lines_are_whole_and_show_what_a_bar_leaves(pieces, expected):
    assert lines_of(*pieces) == expected


def test_a_bar_is_shown_once_a_second_while_it_moves():
    moments = iter([0.0, 0.5, 1.0, 1.0, 1.5, 2.1, 2.1])
    pieces = [b"\r%d%%" % (10 * step) for step in range(1, 5)]
    assert lines_of(*pieces, clock=lambda: next(moments), finish=False) == [b"[1] 20%\n", b"[1] 40%\n"]


def test_an_endless_line_does_not_fill_the_memory():
    written = lines_of(*[b"x" * 50_000] * 4, finish=False)
    assert sum(len(line) - 5 for line in written) >= 100_000


@given(st.lists(st.text(alphabet="ab \n", max_size=20)))
def test_without_returns_nothing_is_lost_however_it_is_cut(pieces):
    text = "".join(pieces)
    found = b"".join(line.removeprefix(b"[1] ") for line in lines_of(*(piece.encode() for piece in pieces)))
    assert found.decode() == (text if text.endswith("\n") or not text else text + "\n")


def test_an_interrupt_in_the_middle_of_a_write_shows_nothing_twice():
    written = []

    def write(line):
        written.append(line)
        if len(written) == 1:
            raise KeyboardInterrupt

    lines = Lines(b"", write)
    lines.feed(b"one")
    with pytest.raises(KeyboardInterrupt):
        lines.feed(b"\ntw")
    lines.feed(b"o\n")
    lines.finish()
    assert written == [b"one\n", b"two\n"]


def screen():
    written = []
    return Screen(written.append), written


def test_on_a_terminal_rank_0s_bytes_pass_unchanged():
    made, written = screen()
    for piece in (b"\x1b[1m10%", b"\r20%", b"\n"):
        made.pass_through(piece)
    assert b"".join(written) == b"\x1b[1m10%\r20%\n"


@pytest.mark.parametrize(
    ("drawn", "drawing"),
    [
        ([b"10%"], b"10%"),
        ([b"10%\r20%"], b"20%"),
        ([b"10%\r"], b"10%\r"),
        ([b"a\n10", b"%"], b"10%"),
        ([b"a\r", b"b"], b"b"),
    ],
)
def test_a_line_of_another_rank_stands_above_the_bar_which_is_drawn_again(drawn, drawing):
    made, written = screen()
    for piece in drawn:
        made.pass_through(piece)
    written.clear()
    made.insert(b"[1] hello\n")
    assert written == [b"\r\x1b[K[1] hello\n" + drawing]


def test_a_line_of_another_rank_needs_no_care_where_nothing_is_drawn():
    made, written = screen()
    made.pass_through(b"whole\n")
    made.insert(b"[1] hello\n")
    assert written == [b"whole\n", b"[1] hello\n"]


def test_an_open_line_is_ended_once():
    made, written = screen()
    made.pass_through(b"open")
    made.finish()
    made.finish()
    assert written == [b"open", b"\n"]


PLAIN = b'Traceback (most recent call last):\n  File "a", line 1\nValueError: x\n'
CHAINED = PLAIN + b"\nDuring handling of the above exception, another exception occurred:\n\n" + PLAIN
CAUSED = PLAIN + b"\nThe above exception was the direct cause of the following exception:\n\n" + PLAIN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"just talk\n", b""),
        (b"\x1b[1;35m" + PLAIN.replace(b"ValueError", b"\x1b[31mValueError\x1b[0m"), PLAIN),  # Python 3.13
        (b"warning\n" + PLAIN, PLAIN),
        (b"warning\n" + CHAINED, CHAINED),
        (b"warning\n" + CAUSED, CAUSED),
        (PLAIN + b"went on\n" + PLAIN, PLAIN),
        (CHAINED + b"went on\n" + CAUSED + b"after\n", CAUSED + b"after\n"),
    ],
)
def test_the_last_traceback_is_found_with_what_led_to_it(text, expected):
    tail = Tail()
    tail.feed(text)
    tail.finish()
    assert tail.traceback().encode() == expected


def test_without_a_traceback_the_last_lines_speak():
    tail = Tail()
    tail.feed(b"".join(b"line %d\n" % index for index in range(1000)))
    assert tail.last_words(2) == "line 998\nline 999\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flagcx.errors.PeerDiedError: rank 2 died", True),
        ("Traceback ...\nflagcx.errors.AbortedError: rank 1 gave up\n", True),
        ("ValueError: flagcx.errors.PeerDiedError: quoted", False),
        ("flagcx.errors.ArgumentError: root", False),
    ],
)
def test_a_traceback_that_blames_another_rank_is_known(text, expected):
    assert is_consequence(text) is expected
