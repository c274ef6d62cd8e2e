"""Choices by measured times: whose table counts, what it may say, and that ranks agree."""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms import entries
from flagcx.algorithms.candidate import Candidate
from flagcx.config import Config, environment
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import Request
from flagcx.selection.rules import HostRules, choose_on_host
from flagcx.selection.selector import PiggybackExchange, Selector, TuningInfo, fitting, look_for_table
from flagcx.selection.table import Fit, Point, Table, fit_here, save_table, table_path
from flagcx.selection.tuning import (
    QUICK,
    TUNED,
    HostBench,
    TimeBudget,
    counted,
    hopeless,
    tune,
    unaffordable,
    unsteady,
)
from flagcx.transport.shared_memory import SharedMemoryTransport
from tests.ranks import run_ranks

FIT = Fit({}, 2, "shared_memory", {}, {})


def _offers(collective, algorithm, nbytes):
    return ("slots", "cross_memory") if nbytes >= 8192 else ()


TRANSPORT = SimpleNamespace(name="fake", protocols=_offers, cross_memory=True, modelled=True)


def _selector(
    times: dict[Candidate, float], nbytes: int = 100_000, collective: str = "allreduce"
) -> Selector:
    table = Table(FIT, {collective: (Point(nbytes, times),)})
    return Selector(HostRules(TRANSPORT), TuningInfo(table, "", True))


def test_the_fastest_that_can_serve_is_chosen():
    ring, tree = Candidate("ring", 1, "slots", piece_nbytes=65536), Candidate("tree", 1, "cross_memory")
    selector = _selector({ring: 20.0, tree: 10.0})
    choice = selector.choose(Request("allreduce", 100_000, 2))
    assert (choice.algorithm, choice.pieces, choice.protocol) == ("tree", 1, "cross_memory")
    assert "measured on this machine: about 10 us" in choice.reason
    assert _selector({ring: 9.0, tree: 10.0}).choose(Request("allreduce", 100_000, 2)).pieces == 2
    by_rule = choose_on_host(Request("broadcast", 100_000, 2))
    assert selector.choose(Request("broadcast", 100_000, 2)) == by_rule
    assert selector.choose(Request("allreduce", 1 << 30, 2)) == choose_on_host(
        Request("allreduce", 1 << 30, 2)
    )
    assert selector.choose(Request("allreduce", 0, 2)) == choose_on_host(Request("allreduce", 0, 2))


@pytest.mark.parametrize(
    ("collective", "candidate", "uneven"),
    [
        ("allreduce", Candidate("no_such", 1, "slots"), False),
        ("allreduce", Candidate("binomial", 1, "slots", piece_nbytes=65536), False),  # is not pipelined
        ("allreduce", Candidate("ring", 1, "telepathy"), False),
        ("allreduce", Candidate("hierarchical", 1, "slots"), False),
        ("alltoall", Candidate("bruck", 1, "slots"), True),  # needs blocks of one size
        ("broadcast", Candidate("native", 1, "slots"), False),
    ],
)
def test_what_a_file_says_is_not_trusted(collective, candidate, uneven):
    selector = _selector({candidate: 1.0}, collective=collective)
    request = Request(collective, 100_000, 4, uneven)
    assert selector.choose(request) == choose_on_host(request)


def test_alternatives_are_the_nearly_as_fast():
    measured = {"ring": 10.0, "tree": 12.0, "chain": 14.0, "binomial": 14.5, "bruck": 14.8, "two_shot": 99.0}
    times = {Candidate(name, 1, "slots"): time_us for name, time_us in measured.items()}
    names = [c.algorithm for c in _selector(times).alternatives(Request("allreduce", 100_000, 2))]
    assert names == ["ring", "tree", "chain", "binomial"]


def test_a_first_choice_asks_little_of_a_large_table():
    """What can serve is asked once for the fastest few, not of all candidates for each and each size."""
    points = []
    for power in range(8, 28, 2):
        times = {
            Candidate(str(known.algorithm), 1, protocol): (10 + 2**power / 1e3) * (1 + 0.2 * i)
            for i, known in enumerate(entries("allreduce"))
            for protocol in _offers("allreduce", known.algorithm, 1 << power) or ("",)
        }
        points.append(Point(1 << power, times))
    selector = Selector(HostRules(TRANSPORT), TuningInfo(Table(FIT, {"allreduce": tuple(points)})))
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    selector.choose(Request("allreduce", 3 << 20, 4))
    sys.setprofile(None)
    assert calls < 600


@pytest.mark.slow
def test_a_repeated_choice_costs_less_than_a_microsecond():
    selector = _selector({Candidate("ring", 1, "slots"): 1.0})
    best, request = float("inf"), Request("allreduce", 100_000, 2)
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(5000):
            selector.choose(request)
        best = min(best, (time.perf_counter() - begin) / 5000)
    assert best < 1e-6, f"{best * 1e9:.0f} ns"


# -- finding the table ----------------------------------------------------------------------------


def test_a_table_is_found_in_the_cache_directory(tmp_path):
    here = fit_here(2, "shared_memory", {"slot_nbytes": 1})
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        none = look_for_table(Config(), here, environ)
        assert none.table is None and "flagcx tune -n 2 would" in none.note
        table = Table(here, {"allreduce": (Point(8, {Candidate("ring"): 1.0}),)})
        save_table(table, table_path(here, environ))
        found = look_for_table(Config(), here, environ)
        assert found.table == table and found.live and found.path == str(table_path(here, environ))
        assert str(tmp_path) in found.note
        assert TuningInfo.from_bytes(found.to_bytes()) == found
        for off in (Config(tuning=False), Config(deterministic=True)):
            told = look_for_table(off, here, environ)
            assert told.table is None and not told.live
        for still in (Config(live_tuning=False), Config(profile=False)):
            assert look_for_table(still, here, environ) == replace(found, live=False, path="")


def test_a_table_of_several_hosts_is_used_on_links_like_those_alone(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    here = fit_here(2, "ucx", {}, {"groups": [[0], [1]]})
    told = look_for_table(Config(), here, environ)
    assert (
        told.note == "not measured on these hosts; flagcx tune would, where it is started as these ranks are"
    )
    hosts = {**here.hosts, "machines": [1, 2], "latency_us": 50.0, "bandwidth_gb_per_s": 0.1}
    save_table(Table(replace(here, hosts=hosts), {}), table_path(here, environ))
    found = replace(look_for_table(Config(), here, environ), order=(0, 1))
    assert found.table is not None and not found.live and not found.path, "clocks of hosts differ"
    assert fitting(found, hosts, warns=True) is found
    slower = {**hosts, "bandwidth_gb_per_s": 0.01}
    with pytest.warns(RuntimeWarning, match=r"-2-hosts-\w+.json is ignored: it was measured with 0.1 "):
        other = fitting(found, slower, warns=True)
    assert other.table is None and "is ignored" in other.note and other.order == (0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitting(found, slower, warns=False) == other, "all ranks decide alike, one tells the user"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is ignored: it is not JSON.*; make a new one with flagcx tune"),
        (Table(FIT, {}).to_json(), "is ignored: it was measured with machine"),
        (None, "is ignored: there is no such file"),
    ],
)
def test_a_table_of_no_use_is_a_warning(text, message, tmp_path):
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.warns(RuntimeWarning, match=message):
        told = look_for_table(Config(tuning_file=str(path)), fit_here(2, "shared_memory", {}), {})
    assert told.table is None
    assert "is ignored" in told.note


def test_rank_0s_word_rides_along():
    mine = TuningInfo(Table(FIT, {}), "mine", True)
    carried = [b"card of 0", b"card of 1"]

    def exchange(value: bytes) -> list[bytes]:
        posted.append(value)
        first = PiggybackExchange(lambda v: seen.append(v) or [v], mine)
        seen: list[bytes] = []
        first(carried[0])
        return [seen[0], value]

    posted: list[bytes] = []
    second = PiggybackExchange(exchange, None)
    assert second(carried[1]) == carried
    assert second.told == mine
    later = PiggybackExchange(lambda v: [v, v], mine)
    later(b"x")
    assert later(b"y") == [b"y", b"y"], "what comes later travels alone"


def _own_table(directory: str, contradict: bool):
    """Every rank has a file of its own; the last one's is broken."""
    rank = int(environment()["FLAGCX_RANK"]) if contradict else 0
    name = ["halving_doubling", "recursive_doubling", "ring"][rank]
    path = f"{directory}/{rank}.json"
    if rank == 2:
        with open(path, "w") as file:
            file.write("{")
    else:
        config = Config()
        fit = fit_here(3, "shared_memory", SharedMemoryTransport.settings(config))
        save_table(Table(fit, {"allreduce": (Point(1024, {Candidate(name): 1.0}),)}), Path(path))
    comm = fc.init(tuning_file=path)
    assert comm.rank == rank
    x = np.arange(256, dtype=np.float32) + comm.rank
    comm.allreduce(x)
    assert (x == 3 * np.arange(256) + 3).all()
    half = comm.split(comm.rank % 2)
    assert half.allreduce(np.ones(256, np.float32))[0] == half.size
    return comm.profiler.records()[0].operation.algorithm, comm._host.selector.note


def test_ranks_with_contradicting_tables_choose_alike(tmp_path):
    results = run_ranks(_own_table, 3, str(tmp_path), True)
    assert {algorithm for algorithm, _ in results} == {"halving_doubling"}, "rank 0's table counts"
    assert len({note for _, note in results}) == 1


def _malformed(path: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = fc.init(tuning_file=path)
    x = comm.allreduce(np.ones(256, np.float32))
    return float(x[0]), [str(w.message) for w in caught], comm.profiler.records()[0].operation.algorithm


def test_a_malformed_table_warns_once_and_the_rule_chooses(tmp_path):
    (tmp_path / "t.json").write_text('{"format": 1, "fits"')
    (value, said, algorithm), second = run_ranks(_malformed, 2, str(tmp_path / "t.json"))
    assert (value, algorithm) == (2.0, "one_shot")
    assert len(said) == 1 and "is ignored: it is not JSON" in said[0]
    assert second == (2.0, [], "one_shot"), "one rank warns, not all"


# -- measuring ------------------------------------------------------------------------------------


def _every_candidate(nbytes: int):
    """Runs every candidate and compares with NumPy; returns how many there were."""
    comm = fc.init(tuning=False)
    size, rank, count = comm.size, comm.rank, nbytes // 4
    kind, op, done = dtype_of(np.dtype(np.int32)), None, 0
    for name in TUNED:
        what = COLLECTIVES[name]
        root = size - 1 if what.rooted else None
        op = resolve_op("sum", kind) if what.reduces else None
        inputs = [_data(q, what.input_blocks(size) * count) for q in range(size)]
        wanted = _expected(name, inputs, size, rank, root, count)
        for candidate in HostBench(comm._host.transport).candidates(name, nbytes):
            choice = candidate.at(nbytes)
            plan = comm._host._make(name, count, kind, op, root, False, choice)
            given = inputs[rank] if what.has_input(rank, root) else None
            result = np.zeros_like(wanted) if wanted is not None else None
            plan.run(None if given is None else given.copy(), result)
            assert wanted is None or (result == wanted).all(), f"{name}: {candidate}"
            done += 1
    return done


def _data(rank: int, count: int) -> np.ndarray:
    return (np.arange(count) * 7 + rank * 1_000_003).astype(np.int32)


def _expected(name, inputs, size, rank, root, count):
    whole = np.concatenate(inputs)
    at_root = rank == root
    return {
        "allreduce": lambda: sum(inputs),
        "reduce": lambda: sum(inputs) if at_root else None,
        "broadcast": lambda: inputs[root],
        "allgather": lambda: whole,
        "gather": lambda: whole if at_root else None,
        "scatter": lambda: inputs[root][rank * count : (rank + 1) * count],
        "reduce_scatter": lambda: sum(inputs)[rank * count : (rank + 1) * count],
        "alltoall": lambda: np.concatenate([x[rank * count : (rank + 1) * count] for x in inputs]),
    }[name]()


@pytest.mark.parametrize(("size", "nbytes"), [(2, 8), (3, 300_004), (4, 9000)])
def test_every_candidate_is_right(size, nbytes):
    counts = run_ranks(_every_candidate, size, nbytes)
    assert len(set(counts)) == 1
    assert counts[0] >= (30 if nbytes < 8192 else 60)


def _tune():
    comm = fc.init(tuning=False)
    told: list = []
    fit = fit_here(comm.size, "shared_memory", {})
    sizes, pace = [4, 1024, 8192], TimeBudget(2e-4, 2)
    table = tune(
        HostBench(comm._host.transport), fit, ("allreduce", "scatter"), sizes, pace, lambda *p: told.append(p)
    )
    return table.to_json(), told


def test_tuning_gives_the_same_table_on_every_rank():
    (text, told), (same, _) = run_ranks(_tune, 2)
    assert text == same
    table = Table.from_json(text)
    assert [p.nbytes for p in table.measured["allreduce"]] == [4, 1024, 8192]
    assert [p.nbytes for p in table.measured["scatter"]] == [4, 512, 4096], "bytes of a block"
    assert told[0] == (0, 6, "allreduce of 4 bytes") and told[-1] == (6, 6, "done")
    names = {c.algorithm for c in table.measured["allreduce"][1].times_us}
    serving = {str(e.algorithm) for e in entries("allreduce") if not e.grouped and e.allows(2)}
    assert names == serving
    assert {c.protocol for c in table.measured["allreduce"][2].times_us} >= {"slots", "cross_memory", ""}


def test_times_that_scatter_are_told():
    times = {Candidate("ring"): 1.0}
    steady, wild = Point(8, times, 0.1), Point(16, times, 0.8)
    assert unsteady(Table(FIT, {"allreduce": (steady,) * 3 + (wild,)})) == ""
    assert "the times of 2 of 4 sizes scattered by over 50%: other work ran" in unsteady(
        Table(FIT, {"allreduce": (steady, wild), "reduce": (steady, wild)})
    )
    assert Table.from_json(Table(FIT, {"reduce": (wild,)}).to_json()).measured["reduce"][0].spread == 0.8


def test_sizes_of_blocks_and_hopeless_candidates():
    assert list(counted("allgather", [256, 1 << 20], 4)) == [64, 1 << 18]
    assert list(counted("broadcast", [2, 256], 4)) == [4, 256]
    slow, fast = Candidate("ring"), Candidate("tree")
    assert hopeless(Point(1 << 20, {slow: 41.0, fast: 10.0})) == [slow]
    assert hopeless(Point(1 << 20, {slow: 39.0, fast: 10.0})) == []
    assert hopeless(Point(1024, {slow: 41.0, fast: 10.0})) == []
    assert QUICK.rounds < TimeBudget().rounds


class _SlowBench:
    """Two ranks that need 2 s for each MiB."""

    size = 2

    def candidates(self, collective, nbytes):
        return [Candidate("ring"), Candidate("tree")]

    def measurement(self, collective, nbytes):
        return SimpleNamespace(time_all=lambda choices, pace: [[nbytes / (1 << 19)]] * len(choices))

    def slowest(self, seconds):
        return 0.0


def test_sizes_that_there_is_no_time_for_are_left_out():
    sizes, told = [1 << shift for shift in (18, 20, 22, 24)], []
    pace = replace(QUICK, total_s=20.0)
    table = tune(_SlowBench(), FIT, ("allreduce", "reduce"), sizes, pace, lambda *p: told.append(p[0]))
    # 20 s for 8 points, then for 7, 6: 2.5, 2.9, 3.3 s; two calls take 1, 4, 16 s.
    assert [p.nbytes for p in table.measured["allreduce"]] == sizes[:1]
    assert [p.nbytes for p in table.measured["reduce"]] == sizes[:2]
    assert told == [0, 1, 4, 5, 6, 8]


def test_candidates_between_hosts_are_measured_along_them():
    compiled = []
    transport = SimpleNamespace(rank=0, size=4, protocols=lambda *_: ())
    transport.compile = lambda call: compiled.append(call.schedule)
    bench = HostBench(transport, ((0, 2), (1, 3)))
    found = {one.algorithm: one for one in bench.candidates("allreduce", 1024)}
    assert found["hierarchical"] == Candidate("hierarchical") and "ring" in found
    measurement = bench.measurement("allreduce", 1024)
    for name in ("ring", "hierarchical"):
        measurement.plan(found[name])
    ring, hierarchical = compiled[-2:]
    peers = {t.peer for step in ring.program(0).steps for t in step.transfers}
    assert peers == {2, 3}, "its host's other rank, and the last of the other host"
    assert hierarchical == Candidate("hierarchical", groups=((0, 2), (1, 3))).build("allreduce", 4)


def test_candidates_that_there_is_no_time_for():
    times = {Candidate("ring", pieces): 1000.0 * pieces for pieces in range(1, 8)}
    point = Point(1 << 20, times)
    assert unaffordable(point, 4 << 20, 1.0) == []
    # 2 calls of 4 times 1, 2, 3, ... ms: 8, 24, 48, 80, 120, 168, 224 ms in all.
    assert unaffordable(point, 4 << 20, 0.13) == [Candidate("ring", 6), Candidate("ring", 7)]
    assert unaffordable(point, 4 << 20, -1.0) == [Candidate("ring", pieces) for pieces in (5, 6, 7)]


def _rounds_within(total_s):
    comm = fc.init(tuning=False)
    measurement = HostBench(comm._host.transport).measurement("allreduce", 64)
    pace = TimeBudget(2e-4, 5, near=1e9, total_s=total_s)
    return [len(times) for times in measurement.time_all([Candidate("ring"), Candidate("tree")], pace)]


def test_without_time_each_candidate_is_timed_once():
    assert run_ranks(_rounds_within, 2, 0.0) == [[1, 1]] * 2
    assert run_ranks(_rounds_within, 2, 1e9) == [[5, 5]] * 2
    assert json.loads(Table(FIT, {}).to_json())["format"] == 1
