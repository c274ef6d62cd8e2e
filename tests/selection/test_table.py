"""Tables of measured times: what is read, what is refused and why, and what lies between two sizes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagcx.algorithms.candidate import Candidate
from flagcx.errors import ArgumentError
from flagcx.selection.table import Fit, Point, Table, fit_here, read_table, save_table, table_path

FIT = Fit({"processor": "x", "cores": 2}, 2, "shared_memory", {"flagcx": "1"}, {"slot_nbytes": 1})
RING, TREE = Candidate("ring", 1, "slots", piece_nbytes=65536), Candidate("tree")
TABLE = Table(
    FIT,
    {"allreduce": (Point(100, {RING: 10.0, TREE: 20.0}), Point(10_000, {RING: 1000.0, TREE: 80.0}))},
)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "deep" / "er" / "t.json"
    save_table(TABLE, path)
    assert read_table(path) == TABLE
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]


def test_times_between_two_sizes_lie_on_a_line_in_log_log():
    assert TABLE.times("allreduce", 100) == {RING: 10.0, TREE: 20.0}
    between = TABLE.times("allreduce", 1000)
    assert between == pytest.approx({RING: 100.0, TREE: 40.0})
    near_the_first = TABLE.times("allreduce", 200)  # linear there: the time of RING grows as the size
    assert near_the_first == pytest.approx({RING: 20.0, TREE: 20.0 * 2**0.30103}, rel=1e-3)
    assert TABLE.times("allreduce", 25) == {RING: 10.0, TREE: 20.0}
    assert TABLE.times("allreduce", 40_000) == {RING: 1000.0, TREE: 80.0}
    assert TABLE.times("allreduce", 24) == {}, "nothing is known so far below"
    assert TABLE.times("allreduce", 40_001) == {}
    assert TABLE.times("broadcast", 100) == {}


def test_a_candidate_known_on_one_side_alone():
    first, last = Point(100, {RING: 10.0, TREE: 20.0}), Point(400, {TREE: 30.0})
    assert set(Table(FIT, {"reduce": (first, last)}).times("reduce", 200)) == {TREE}
    apart = Table(FIT, {"reduce": (Point(100, {RING: 10.0}), last)})
    assert set(apart.times("reduce", 110)) == {RING}
    assert set(apart.times("reduce", 390)) == {TREE}


def test_pieces():
    assert [RING.pieces_at(n) for n in (1, 65536, 65537, 1 << 40)] == [1, 1, 2, 64]
    assert TREE.pieces_at(1 << 30) == 1


def _spoilt(change) -> str:
    data = json.loads(TABLE.to_json())
    return json.dumps(change(data) or data)


POINT = "allreduce of 100 bytes"
MALFORMED = {
    "": "not JSON",
    "{": "not JSON",
    "[" * 100_000: "not JSON",
    "[]": "the file is \\[\\], expected an object",
    "null": "the file is None",
    '{"format": 2}': "its format is 2, expected 1",
    _spoilt(lambda d: d.pop("measured") and None): "measured is None, expected an object",
    _spoilt(lambda d: d.pop("fits") and None): "fits is None",
    _spoilt(lambda d: d["fits"].update(ranks="2")): "ranks is '2', expected a whole number from 1 up",
    _spoilt(lambda d: d["fits"].update(ranks=True)): "ranks is True",
    _spoilt(lambda d: d["measured"].update(x=[])): "'x' is no collective; expected allreduce, ",
    _spoilt(lambda d: d["measured"].update(allreduce={})): "allreduce is {}, expected a list",
    _spoilt(lambda d: d["measured"]["allreduce"].reverse()): "sizes of allreduce do not grow",
    _spoilt(lambda d: d["measured"]["allreduce"][0].update(nbytes=0)): "nbytes of allreduce is 0",
    _spoilt(lambda d: d["measured"]["allreduce"][0].update(times=[])): f"{POINT} has no times",
    _spoilt(lambda d: d["measured"]["allreduce"][0]["times"][0].update(time_us=0)): "time_us of .* is 0",
    _spoilt(lambda d: d["measured"]["allreduce"][0]["times"][0].update(time_us=float("nan"))): "is nan",
    _spoilt(lambda d: d["measured"]["allreduce"][0]["times"][0].update(time_us=float("inf"))): "is inf",
    _spoilt(lambda d: d["measured"]["allreduce"][0]["times"][0].update(algorithm=3)): "is 3, expected",
    _spoilt(lambda d: d["measured"]["allreduce"][0]["times"][0].pop("protocol") and None): "protocol of",
    _spoilt(lambda d: d["measured"]["allreduce"][0]["times"].append(7)): "a time of .* is 7",
}


@pytest.mark.parametrize(("text", "message"), MALFORMED.items(), ids=range(len(MALFORMED)))
def test_malformed_tables_are_refused(text, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        Table.from_json(text)
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_table(tmp_path / "t.json")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_table(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_table(tmp_path / "binary")
    (tmp_path / "large").write_bytes(b" " * (16 << 20) + b"{}")
    with pytest.raises(ArgumentError, match="over 16 MiB"):
        read_table(tmp_path / "large")
    with pytest.raises(ArgumentError, match="cannot be written to"):
        save_table(TABLE, tmp_path / "binary" / "t.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 4}, "measured with ranks 2, here it is 4"),
        ({"transport": "mpi"}, "transport shared_memory, here it is mpi"),
        ({"machine": {"processor": "y", "cores": 2}}, "with machine .*'x'.*, here it is .*'y'"),
        ({"versions": {"flagcx": "2"}}, "versions {'flagcx': '1'}, here it is {'flagcx': '2'}"),
        ({"settings": {}}, "settings"),
    ],
)
def test_in_what_a_table_does_not_fit(change, message):
    assert re.search(message, FIT.difference(replace(FIT, **change)))
    assert not FIT.difference(FIT)


GROUPS = {"groups": [[0], [1]]}
HOSTS = {**GROUPS, "machines": [{"cores": 2}] * 2, "latency_us": 50.0, "bandwidth_gb_per_s": 0.1}


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({}, "these ranks on each host: [[0], [1]], here they are: one host"),
        ({"groups": [[1], [0]]}, "these ranks on each host: [[0], [1]], here they are: [[1], [0]]"),
        (HOSTS | {"machines": [{"cores": 2}, {"cores": 4}]}, "hosts [{'cores': 2}, {'cores': 2}], here they"),
        (HOSTS | {"latency_us": 410.0}, "50 as latency_us between hosts, here it is 410"),
        (HOSTS | {"latency_us": 6.0}, "50 as latency_us between hosts, here it is 6"),
        (HOSTS | {"bandwidth_gb_per_s": 0.41}, "0.1 as bandwidth_gb_per_s between hosts, here it is 0.41"),
        (HOSTS | {"bandwidth_gb_per_s": 0.02}, "0.1 as bandwidth_gb_per_s between hosts, here it is 0.02"),
        (GROUPS, ""),
        (HOSTS | {"latency_us": 390.0, "bandwidth_gb_per_s": 0.03}, ""),
    ],
    ids=str,
)
def test_a_table_of_several_hosts_holds_for_them_alone(here, message):
    fit = replace(FIT, hosts=HOSTS)
    found = fit.difference(replace(FIT, hosts=here))
    assert message in found and bool(message) == bool(found)
    if "groups" in here:
        assert FIT.difference(replace(FIT, hosts=here)), "a table of one host"
        assert replace(FIT, hosts=GROUPS).difference(fit), "a table that does not know its links"
    assert Table.from_json(Table(fit, {}).to_json()).fit == fit


@pytest.mark.parametrize("wrong", [[], {"groups": 3}, {"latency_us": "5"}, {"machines": {}}], ids=str)
def test_hosts_of_a_file_are_not_trusted(wrong):
    text = Table(replace(FIT, hosts=wrong), {}).to_json()
    with pytest.raises(ArgumentError, match=r"hosts is .*, expected"):
        Table.from_json(text)


def test_where_tables_lie(tmp_path):
    here = fit_here(4, "shared_memory", {})
    path = table_path(here, {"XDG_CACHE_HOME": str(tmp_path)})
    assert path.parent == tmp_path / "flagcx" / "tuning"
    assert path.name.endswith("-shared_memory-4.json")
    assert table_path(here, {"HOME": "/home/me"}).parts[:4] == ("/", "home", "me", ".cache")
    relative = table_path(here, {"HOME": "/home/me", "XDG_CACHE_HOME": "not/absolute"})
    assert relative.parts[:4] == ("/", "home", "me", ".cache"), "the specification says to ignore it"
    other = replace(here, machine={"processor": "another"})
    assert table_path(other, {"HOME": "/"}).name != path.name
    over = [replace(here, hosts={"groups": groups}) for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    names = {table_path(fit, {"HOME": "/"}).name for fit in over}
    assert len(names) == 2 and all("-shared_memory-4-2-hosts-" in name for name in names)


def _ranked(points, nbytes, serving=lambda candidate: True):
    table = Table(FIT, {"allreduce": points})
    return [str(c) for c, _ in table.rank("allreduce", nbytes, serving)]


A, B, C = Candidate("ring"), Candidate("tree"), Candidate("chain")


def test_between_equals_the_sizes_around_decide():
    low, high = Point(100, {A: 10.0, B: 20.0, C: 30.0}), Point(10_000, {A: 100.0, B: 200.0, C: 300.0})
    noisy = Point(1000, {A: 31.0, B: 30.0, C: 34.0})
    assert _ranked((low, noisy, high), 1000) == ["ring", "tree", "chain"]
    assert _ranked((low, noisy, high), 1000, lambda c: c != A) == ["tree", "chain"]
    clear = Point(1000, {A: 34.0, B: 30.0, C: 99.0})
    assert _ranked((low, clear, high), 1000)[0] == "tree", "13% are more than chance"
    scattered = Point(1000, {A: 34.0, B: 30.0, C: 99.0}, spread=0.2)
    assert _ranked((low, scattered, high), 1000)[0] == "ring", "rounds lay further apart than that"
    wild = Point(1000, {A: 45.0, B: 30.0, C: 99.0}, spread=3.0)
    assert _ranked((low, wild, high), 1000)[0] == "tree", "never by more than 30%"


def test_what_was_dropped_at_the_sizes_around_counts_as_slow_there():
    low, high = Point(100, {A: 10.0}), Point(10_000, {A: 100.0})
    assert _ranked((low, Point(1000, {A: 31.0, B: 30.0}), high), 1000)[0] == "ring"


def test_a_table_that_says_nothing_ranks_nothing():
    assert _ranked((), 1000) == [] and _ranked((Point(100, {A: 1.0}),), 0) == []
    assert _ranked((Point(100, {A: 1.0}),), 100, lambda c: False) == []
    assert _ranked((Point(100, {A: 2.0, B: 1.0}),), 100) == ["tree", "ring"]
    assert Table(FIT, {}).rank("reduce", 100, lambda c: True) == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(_JSON, st.sampled_from(["fits", "measured", "format"]), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_any_json_is_a_table_or_an_error_of_our_own(value, where, depth):
    data = json.loads(TABLE.to_json())
    if depth == 0:
        data[where] = value
    elif depth == 1:
        data["fits"]["machine" if where == "fits" else "ranks"] = value
    else:
        data["measured"]["allreduce"][0]["times"][0][where if where != "fits" else "time_us"] = value
    try:
        table = Table.from_json(json.dumps(data))
    except ArgumentError:
        return
    assert Table.from_json(table.to_json()).measured.keys() == table.measured.keys()
