"""What a job writes back to its table: how candidates compare, bounded, and only where it may."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms.candidate import Candidate
from flagcx.config import Config, environment
from flagcx.selection.online_tuning import (
    INTERVAL,
    MOST_CHANGE,
    TRIALS,
    Finding,
    corrected,
    write_back,
)
from flagcx.selection.table import Fit, Point, Table, fit_here, read_table, save_table, table_path
from flagcx.transport.shared_memory import SharedMemoryTransport
from tests.ranks import run_ranks

FIT = Fit({"cores": 2}, 2, "shared_memory", {}, {})
RING, SHOT, TREE = Candidate("ring", 1, "slots", piece_nbytes=65536), Candidate("one_shot"), Candidate("tree")
TABLE = Table(
    FIT, {"allreduce": (Point(1024, {RING: 10.0, SHOT: 12.0, TREE: 50.0}), Point(65536, {RING: 90.0}))}
)


def _finding(nbytes, ring_us, shot_us, collective="allreduce", pieces=1):
    times = {Candidate("ring", pieces, "slots"): ring_us, Candidate("one_shot"): shot_us}
    return Finding(collective, nbytes, times)


def test_only_how_candidates_compare_is_kept():
    better = corrected(TABLE, [_finding(1024, 30.0, 25.0)])
    first, second = better.measured["allreduce"]
    assert first.times_us[RING] / first.times_us[SHOT] == pytest.approx(30 / 25)
    assert first.times_us[RING] * first.times_us[SHOT] == pytest.approx(10 * 12), "the level is the tuner's"
    assert first.times_us[TREE] == 50.0 and second == TABLE.measured["allreduce"][1]
    again = corrected(better, [_finding(1024, 30.0, 25.0)])
    assert again.measured["allreduce"][0].times_us == pytest.approx(first.times_us)


def test_a_job_changes_a_time_by_a_bounded_factor():
    better = corrected(TABLE, [_finding(1024, 1e6, 1.0)])
    assert better.measured["allreduce"][0].times_us[RING] == pytest.approx(10 * MOST_CHANGE)
    assert better.measured["allreduce"][0].times_us[SHOT] == pytest.approx(12 / MOST_CHANGE)


@pytest.mark.parametrize(
    "finding",
    [
        _finding(4096, 30.0, 25.0),  # far from both sizes
        _finding(65536, 30.0, 25.0),  # one candidate there alone: nothing to compare
        _finding(1024, 30.0, 25.0, "broadcast"),
        _finding(1024, 30.0, 25.0, pieces=3),
        Finding("allreduce", 1024, {}),
    ],
)
def test_what_says_nothing_changes_nothing(finding):
    assert corrected(TABLE, [finding]) is TABLE


def test_the_file_is_corrected_as_it_is_now(tmp_path):
    path = tmp_path / "t.json"
    save_table(TABLE, path)
    assert not write_back(path, TABLE, [])
    others = Table(FIT, {"allreduce": (Point(1024, {RING: 20.0, SHOT: 12.0, TREE: 1.0}),)})
    save_table(others, path)
    assert write_back(path, TABLE, [_finding(1024, 10.0, 10.0)])
    now = read_table(path).measured["allreduce"][0].times_us
    assert now[TREE] == 1.0 and now[RING] == pytest.approx(now[SHOT], rel=1e-3)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_file_that_is_gone_spoilt_or_another_s_is_left_alone(tmp_path):
    path = tmp_path / "t.json"
    finding = [_finding(1024, 30.0, 25.0)]
    assert not write_back(path, TABLE, finding)
    path.write_text("{")
    assert not write_back(path, TABLE, finding) and path.read_text() == "{"
    save_table(Table(Fit({"cores": 4}, 2, "shared_memory", {}, {}), TABLE.measured), path)
    before = path.read_text()
    assert not write_back(path, TABLE, finding) and path.read_text() == before


CALLS = INTERVAL * 2 * TRIALS + 5


def _work(settings, dtype):
    comm = fc.init(tuning=True, **settings)
    for i in range(CALLS):
        x = np.full(256, comm.rank + i, dtype)
        assert (comm.allreduce(x) == 2 * i + 1).all()
    path = comm._host.selector.path
    comm.close()
    comm.close()
    return path


@pytest.mark.parametrize(
    ("settings", "dtype", "kept"),
    [
        ({}, "float32", True),
        ({}, "float64", False),  # not what the tuner measures
        ({"deterministic": True}, "float32", False),
        ({"live_tuning": False}, "float32", False),
        ({"tuning_file": "named"}, "float32", False),  # the user's own file
    ],
)
def test_a_job_corrects_the_table_in_the_cache(tmp_path, monkeypatch, settings, dtype, kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fit = fit_here(2, "shared_memory", SharedMemoryTransport.settings(Config()))
    path = table_path(fit, environment())
    nbytes = 256 * np.dtype(dtype).itemsize
    slow = Candidate("ring", piece_nbytes=64)
    wrong = Table(fit, {"allreduce": (Point(nbytes, {slow: 1.0, SHOT: 1.2}),)})
    save_table(wrong, path)
    if "tuning_file" in settings:
        path = path.rename(tmp_path / "named.json")
        settings = {"tuning_file": str(path)}
    before = path.read_text()
    paths = run_ranks(_work, 2, settings, dtype)
    assert paths[0] == paths[1]
    now = read_table(path).measured["allreduce"][0].times_us
    if kept:
        assert now[SHOT] < now[slow], "one exchange is far faster than 128 steps, however busy the machine"
        assert os.listdir(path.parent) == [path.name]
    else:
        assert path.read_text() == before
    assert Path(path).exists()
