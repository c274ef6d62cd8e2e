"""The models against what was measured on several GPUs: the figures that they are held to."""

from __future__ import annotations

import json

import model_vs_measured as bench
import pytest

FILES = sorted(bench.RESULTS.glob("gpu_replays_*_h200.jsonl"))


def _row(library, ranks, nbytes, replay_us, gpus=4):
    facts = {"library": library, "ranks": ranks, "nbytes": nbytes, "dtype": "float32"}
    return {**facts, "replay_us": replay_us, "run": {"gpus": gpus}}


@pytest.fixture(scope="module")
def measured():
    return bench.against_replays(bench.replay_rows(FILES))


def test_what_was_measured_is_predicted_within_a_quarter(measured):
    assert {(row["ranks"], row["name"]) for row in measured} == {
        (ranks, name) for ranks in (2, 4) for name in (*bench.SCHEDULES, "NCCL")
    }
    found = bench.replay_summary(measured)
    assert found["replays_large_median"] < 0.15 and found["replays_large_within_25_percent"] > 0.9
    assert found["replays_small_median"] < 0.15


@pytest.mark.parametrize("name", [*bench.SCHEDULES, "NCCL"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_is_predicted_within_a_quarter_from_1_mib_up(measured, ranks, name):
    own = [row for row in measured if (row["ranks"], row["name"]) == (ranks, name)]
    assert len([row for row in own if row["nbytes"] >= bench.MIB]) >= 5
    assert bench.replay_summary(own)["replays_large_median"] < 0.25
    if name != "NCCL":
        assert bench.replay_summary(own)["replays_large_worst"] < 0.25


def test_rows_without_a_time_and_of_shared_gpus_are_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        _row("NCCL", 2, 1024, 6.0),
        _row("NCCL", 8, 1024, 30.0, gpus=1),
        {"part": "topology", "exit_code": 0},
        {"library": "NCCL", "nbytes": 4, "dtype": "float32", "error": "refused"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bench.replay_rows([file]) == rows[:1]


def test_errors_are_ratios_to_what_was_measured():
    rows = [
        _row("flagcx ring over NCCL", 4, 64 << 20, 1.0),
        _row("flagcx", 4, 64 << 20, 1.0),
        _row("NCCL", 2, 4096, 1.0),
    ]
    rows.append({**_row("flagcx two_shot", 4, 1024, 1.0), "protocol": "peer_memory"})
    (ring, native) = bench.against_replays(rows)
    assert (ring["name"], native["name"]) == ("ring", "NCCL")
    (twice,) = bench.against_replays([{**rows[0], "replay_us": ring["ratio"] / 2}])
    assert twice["ratio"] == pytest.approx(2.0)
    found = bench.replay_summary([twice, native])
    assert found["replays_large_median"] == pytest.approx(1.0)
    assert found["replays_small_worst"] == pytest.approx(native["ratio"] - 1)
    lines = list(bench.replay_lines([twice, native]))
    assert lines[0].split()[-4:] == ["4", "KiB", "64", "MiB"]
    assert lines[1].split() == ["4", "ranks,", "float32", "ring", "2.00"]


def test_the_command_prints_and_writes(capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    assert bench.main(["--part", "replays", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "replays_large_median: " in printed and "4 ranks, float32  two_shot" in printed
    *rows, last = [json.loads(line) for line in out.read_text().splitlines()]
    assert last["replays_large_within_25_percent"] > 0.9 and rows[0]["measured_us"] > 0


@pytest.mark.parametrize("more", [(), ("--fit",), ("--fit", "--part", "replays")])
def test_a_file_of_tables_that_is_not_there_is_told_in_a_line(capsys, tmp_path, more):
    assert bench.main(["--tables", str(tmp_path / "none.jsonl"), *more]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.jsonl" in line and "nccl_published.jsonl with --tables" in line
