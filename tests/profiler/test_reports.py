"""Reports from made-up records: figures are exact, formats are strict, wrong ones are found."""

from __future__ import annotations

import copy
import io
import re
import sys

import pytest

from flagcx.errors import ArgumentError, MissingDependencyError
from flagcx.profiler import Profiler
from flagcx.profiler.plot import plot_records
from flagcx.profiler.prometheus import format_metrics
from flagcx.profiler.records import CAPACITY, OperationInfo, Record, RecordBuffer
from flagcx.profiler.stragglers import find_stragglers
from flagcx.profiler.summary import Summary
from flagcx.profiler.trace import trace_events, write_trace
from tests.profiler.trace_format import check_trace

ALLREDUCE = OperationInfo("allreduce", 1000, "float32", "ring", 4, "slots", "shared_memory")
NAMED = OperationInfo("broadcast", 8, "int8", '<i>"mine"</i>\\', 1, "", "shared_memory")


def _records(starts_us, lasting_us=10, operation=ALLREDUCE, waiting_us=4, queued_us=0) -> list[Record]:
    return [
        Record(operation, i, int(s * 1e3), int((s + lasting_us) * 1e3), waiting_us * 1000, queued_us * 1000)
        for i, s in enumerate(starts_us)
    ]


def test_who_is_late_and_by_how_much():
    first = _records([0, 1000, 2000, 3000])
    second = _records([500, 1020, 2300, 3900])
    third = _records([10, 1000, 2000, 3000])
    report = find_stragglers([first, second, third], [0, 0, 0])
    worst, *others = report.ranks
    assert (worst.rank, worst.calls, worst.late) == (1, 4, 3), "20 us is not late"
    assert (worst.typical_us, worst.worst_us) == (500.0, 900.0)
    assert worst.caused_us == 500 + 490 + 300 + 300 + 900 + 900
    assert [entry.late for entry in others] == [0, 0]
    assert report.worst == 1
    assert report.to_dict()["ranks"][0]["late"] == 3
    assert "rank 1 was last in 3 of 4 calls, by 500 us (median; at worst 900 us)" in str(report)
    page = report._repr_html_()
    assert "<td><b>1</b></td><td><b>3</b></td><td><b>500 us</b></td>" in page and "in 4 calls" in page


def test_clocks_that_differ_are_put_right():
    fine = _records([0, 1000, 2000])
    ahead = [Record(ALLREDUCE, r.sequence, r.start_ns + 10**9, r.end_ns + 10**9, 0, 0) for r in fine]
    assert find_stragglers([fine, ahead], [0, 10**9]).worst is None
    assert find_stragglers([fine, ahead], [0, 0]).worst == 1, "without it the second seems late"
    events = check_trace(trace_events([fine, ahead], [0, 10**9]), ranks=2)
    assert sorted(e["ts"] for e in events) == [0, 0, 1000, 1000, 2000, 2000]


def test_only_calls_that_all_recorded_are_compared():
    long, short = _records([0, 1000, 2000]), _records([0, 1000, 9000])[1:]
    transfers = [Record(ALLREDUCE, -1, 0, 5, 0, 0)]
    report = find_stragglers([long + transfers, short], [0, 0])
    assert report.ranks[0].calls == 2
    assert "no call" in str(find_stragglers([[], []], [0, 0]))
    assert "in 0 calls" in find_stragglers([[], []], [0, 0])._repr_html_()
    assert "no rank was late in 3 calls" in str(find_stragglers([long, long], [0, 0]))


def test_the_figures_of_the_summary():
    records = _records([0, 100, 200], lasting_us=10) + _records([300], lasting_us=50)
    records += _records([500], operation=NAMED, queued_us=7)
    summary = Summary.of(3, records)
    row = summary.rows[0]
    assert (row.collective, row.nbytes, row.algorithm, row.calls) == ("allreduce", 1000, "ring (slots)", 4)
    assert (row.median_us, row.p95_us, row.total_us) == (10.0, 50.0, 80.0)
    assert (row.waiting_us, row.moving_us, row.queued_us) == (16.0, 64.0, 0.0)
    assert row.gb_per_s == pytest.approx(0.1)
    assert summary.rows[1].queued_us == 7.0
    assert summary.to_dict()["rows"][0]["calls"] == 4
    assert "ring (slots)" in str(summary)
    assert Summary.of(0, []).rows == ()


def test_bytes_sent_are_shown_where_they_were_counted():
    ring = RecordBuffer()
    for sent in (100, 300, 200):
        ring.append((NAMED, -1, 0, 1000, 0, 5, sent))
    summary = Summary.of(0, [*ring.records(), *_records([0])])
    named, plain = sorted(summary.rows, key=lambda row: row.sent_nbytes is None)
    assert (named.sent_nbytes, named.queued_us, plain.sent_nbytes) == (200, 0.005, None)
    assert "200" in named.cells()[2] and not plain.cells()[2]
    events = trace_events([ring.records()], [0])["traceEvents"]
    assert [e["args"]["sent_bytes"] for e in events if e["ph"] == "X" and e["tid"] == 0] == [100, 300, 200]


def test_the_summary_in_a_notebook_and_in_a_terminal():
    from rich.console import Console

    summary = Summary.of(0, _records([0], operation=NAMED))
    html = summary._repr_html_()
    assert "&lt;i&gt;" in html and "<i>" not in html, "names are escaped"
    assert html.count("<tr>") == 2
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary)
    assert "broadcast" in console.export_text()


def test_metrics_are_in_prometheus_format():
    text = format_metrics(Summary.of(1, _records([0, 20]) + _records([50], operation=NAMED)))
    sample = re.compile(r'[a-z_]+\{(?:[a-z]+="(?:[^"\\\n]|\\\\|\\"|\\n)*",?)+\} [0-9.e+-]+')
    lines = text.splitlines()
    assert text.endswith("\n") and len(lines) == 4 * 4
    assert all(sample.fullmatch(line) or re.match(r"# (HELP|TYPE) flagcx_", line) for line in lines)
    label = 'rank="1",collective="allreduce",nbytes="1000",algorithm="ring (slots)"'
    assert f"flagcx_recent_operation_calls{{{label}}} 2" in lines
    assert f"flagcx_recent_operation_waiting_seconds{{{label}}} 8e-06" in lines


def test_the_trace():
    trace = trace_events([_records([0, 100]), _records([5, 105], queued_us=3)], [0, 0])
    events = check_trace(trace, ranks=2)
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        (0, 0, 0.0, 10.0), (0, 0, 100.0, 10.0),
        (1, 0, 5.0, 10.0), (1, 1, 2.0, 3.0), (1, 0, 105.0, 10.0), (1, 1, 102.0, 3.0),
    ]  # fmt: skip
    assert events[0]["args"]["waiting_us"] == 4.0
    assert events[0]["args"]["moving_us"] == 6.0
    check_trace(trace_events([[], []], [0, 0]), ranks=2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda events: events[-1].update(ts=-1.0),
        lambda events: events[-1].update(dur=float("nan")),
        lambda events: events[-1].update(pid=7),
        lambda events: events[-1].update(ph="B"),
        lambda events: events[-1].pop("dur"),
        lambda events: events[-1]["args"].update(waiting_us="4"),
        lambda events: events[-2].update(dur=1e6),
        lambda events: events.pop(0),
    ],
)
def test_a_wrong_trace_is_found(spoil):
    trace = copy.deepcopy(trace_events([_records([0, 100]), _records([5, 105])], [0, 0]))
    spoil(trace["traceEvents"])
    with pytest.raises((AssertionError, KeyError)):
        check_trace(trace, ranks=2)


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "t.json").write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_trace(tmp_path / "t.json", {"x": float("nan")})
    assert (tmp_path / "t.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_the_ring_keeps_the_last():
    ring = RecordBuffer()
    for i in range(CAPACITY + 10):
        ring.append((ALLREDUCE, i, 0, 1, 0, 0))
    kept = ring.records()
    assert len(kept) == CAPACITY
    assert (kept[0].sequence, kept[-1].sequence) == (10, CAPACITY + 9)
    ring.clear()
    assert ring.records() == []


def test_the_clocks_of_two_machines_are_compared(monkeypatch):
    """Rank 1 is a machine whose clock is 5 s ahead: a fake of both in one process."""
    gathered: list = []

    def gather(value, part_of):
        if isinstance(value, tuple):
            mine, boot = value
            return [(mine, boot), (theirs, "another machine")]
        gathered.append(value)
        return [value, value + 5_000_000_000]

    profiler = Profiler(0, 2, gather, lambda: None)
    theirs = [Record(ALLREDUCE, 0, 5_000_000_000 + 700_000, 5_000_800_000, 0, 0)]
    profiler.ring.append((ALLREDUCE, 0, 0, 800_000, 0, 0))
    report = profiler.stragglers()
    assert report.ranks[0].typical_us == 700.0
    assert len(gathered) == 9


def test_the_picture(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
    records = _records([0, 100]) + _records([200], operation=NAMED)
    figure = plot_records(records, 0, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    bars = [patch.get_width() for patch in figure.axes[0].patches]
    assert bars == pytest.approx([0.006, 0.012, 0.004, 0.008])
    plot_records([], 0)
    assert matplotlib
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flagcx\[plot\]'"):
        plot_records(records, 0)


@pytest.mark.parametrize("where", ["none/t.json", "folder"])
def test_a_trace_is_refused_with_the_path_that_was_given(where, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgumentError) as caught:
        write_trace(tmp_path / where, {})
    assert str(caught.value).startswith(f"the trace cannot be written to {tmp_path / where}: ")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_picture_is_refused_with_the_path_that_was_given(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    for name in ("none/p.png", "p.xyz"):
        with pytest.raises(ArgumentError) as caught:
            plot_records([], 0, tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: cannot ")
