"""Correcting choices while a job runs: the same on all ranks, rare, and off where it must be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms.candidate import Candidate
from flagcx.config import Config, environment
from flagcx.selection.online_tuning import INTERVAL, PAUSE, TRIALS, Exploration
from flagcx.selection.table import Point, Table, fit_here, save_table
from flagcx.transport.shared_memory import SharedMemoryTransport
from tests.ranks import run_ranks

SLOW, FAST = Candidate("slow"), Candidate("fast")


def _explore(times_by_rank: list[dict[str, int]], calls: int) -> list[Exploration]:
    """Lets ranks make calls in step; ``agree`` waits until all have come, as the real one does."""
    posted: list[list[int]] = []

    def agree(values):
        posted.append(list(values))
        return [max(column) for column in zip(*posted, strict=True)]

    ranks = [Exploration((SLOW, FAST), agree) for _ in times_by_rank]
    for _ in range(calls):
        posted.clear()
        deciding = [e for e in ranks if e.calls + 1 >= e.due and len(e.times) + 1 == 2 * TRIALS]
        if deciding:  # all post first, so that each gets the same
            everybodys = []
            for exploration, times in zip(ranks, times_by_rank, strict=True):
                trial = _trial(exploration, times)
                everybodys.append([v for _, a, b in (*exploration.times, trial) for v in (a, b)])
            posted.extend(everybodys)
        for exploration, times in zip(ranks, times_by_rank, strict=True):
            exploration.calls += 1
            if exploration.calls >= exploration.due:
                _, start, end = _trial(exploration, times)
                exploration.note(start, end)
    return ranks


def _trial(exploration: Exploration, times: dict[str, int]) -> tuple[int, int, int]:
    start = exploration.due * 1000
    return 0, start, start + times[exploration.candidate().algorithm]


def test_ranks_that_measure_the_opposite_choose_alike():
    ranks = _explore([{"slow": 10, "fast": 500}, {"slow": 900, "fast": 20}], INTERVAL * 2 * TRIALS)
    assert [e.rounds for e in ranks] == [1, 1]
    assert [e.current for e in ranks] == [FAST, FAST], "500 over all ranks against 900"


def test_a_small_gain_changes_nothing():
    (rank,) = _explore([{"slow": 100, "fast": 95}], INTERVAL * 2 * TRIALS)
    assert rank.rounds == 1 and rank.current is SLOW


def test_trials_are_rare_and_become_rarer():
    (rank,) = _explore([{"slow": 100, "fast": 200}], INTERVAL * 2 * TRIALS)
    assert rank.due == rank.calls + PAUSE
    before = rank.calls
    tried = 0
    for _ in range(PAUSE + INTERVAL * 2 * TRIALS):
        rank.calls += 1
        if rank.calls >= rank.due:
            rank.note(0, 1)
            tried += 1
    assert tried == 2 * TRIALS
    assert rank.due >= before + 2 * PAUSE
    assert INTERVAL >= 32


def _lie(path: str, calls: int, settings: dict, late: bool):
    """The table says that a slow algorithm is fastest, and the right one nearly so."""
    if environment()["FLAGCX_RANK"] == "0":
        fit = fit_here(2, "shared_memory", SharedMemoryTransport.settings(Config()))
        slow = Candidate("ring", piece_nbytes=64)  # in 16 pieces, which is slow on a busy machine too
        point = Point(1024, {slow: 1.0, Candidate("one_shot"): 1.2})
        save_table(Table(fit, {"allreduce": (point,)}), Path(path))
    if settings.pop("apart", False):
        settings["profile"] = environment()["FLAGCX_RANK"] == "0"
    comm = fc.init(tuning_file=path, **settings)
    out = np.empty(256, np.float32)
    for i in range(calls):
        x = np.full(256, comm.rank + i, np.float32)
        if late and comm.rank == 1:
            comm.allreduce(x)  # in place on one rank, not on the other
            total = x
        else:
            total = comm.allreduce(x, out=out)
        assert (total == 2 * i + 1).all()
    ran = [r.operation.algorithm for r in comm.profiler.records()]
    return ran[-500:]


CALLS = INTERVAL * 2 * TRIALS + 20


@pytest.mark.parametrize("mixed", [False, True])
def test_a_wrong_table_is_corrected(tmp_path, mixed):
    first, second = run_ranks(_lie, 2, str(tmp_path / "t.json"), CALLS, {}, mixed)
    assert first == second, "all ranks run the same in every call"
    assert first[0] == "ring"
    assert first[-20:] == ["one_shot"] * 20
    trials = [i for i, name in enumerate(first[:-20]) if name == "one_shot"]
    assert len(trials) == TRIALS


def test_ranks_that_record_and_ranks_that_do_not_stay_in_step(tmp_path):
    first, second = run_ranks(_lie, 2, str(tmp_path / "t.json"), CALLS, {"apart": True}, False)
    assert first[-20:] == ["one_shot"] * 20
    assert second == []


@pytest.mark.parametrize(
    ("settings", "stays"),
    [
        ({"live_tuning": False}, "ring"),
        ({"deterministic": True}, "one_shot"),
        ({"tuning": False}, "one_shot"),
    ],
)
def test_it_can_be_switched_off(tmp_path, settings, stays):
    for ran in run_ranks(_lie, 2, str(tmp_path / "t.json"), CALLS, settings, False):
        assert set(ran) == {stays}
