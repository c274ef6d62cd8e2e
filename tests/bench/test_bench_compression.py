"""The benches of compression: what they call a miss, and that they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import compression
import convergence
import pytest

from tests.ranks import run_ranks


def row(codec: str, speedup: float, link: str = "0.125") -> compression.Row:
    return compression.Row(2, link, codec, 64 << 20, 100.0, 99.0, 101.0, speedup, 0.01, True)


def test_goals_are_of_a_link_and_a_codec():
    assert row("int8", 2.5).goal == 2 and row("int8", 2.5, "0.0125").goal == 3
    assert row("int4", 2.5).goal is None and row("int8", 1.0, "").goal is None
    table = compression.format_rows([row("int8", 1.9), row("topk", 4.0)])
    assert "2 MISSED" in table and "4 ok" in table and "equal" in table


@pytest.mark.slow
def test_the_bench_measures_and_writes(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    options = ["--ranks", "2", "--links", "1", "--size", "256K", "--rounds", "1", "--json", str(path)]
    assert compression.main([*options, "--codecs", "int8,topk+,auto"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["codec"] for r in rows] == ["dense", "int8", "topk+", "auto"]
    assert all(r["equal"] and r["time_ms"] > 0 for r in rows)
    assert rows[0]["error"] < 1e-6 < rows[1]["error"] < 0.02
    said = capsys.readouterr().out
    assert "auto: 256 KiB over 2 ranks" in said and "1 GB/s, 2 ranks" in said


def test_a_training_that_falls_short_is_a_miss():
    def of(codec: str, *ratios: float, equal: bool = True, task: str = "cnn") -> str:
        return convergence.Row(task, 4, 10, codec, (1.0,) * len(ratios), ratios, equal, 1.0).verdict

    assert of("int8", 1.019) == "ok" and of("int8", 1.03) == "MISSED"
    assert of("topk+", 0.99, 1.01, 1.05) == "ok" and of("topk+", 0.99, 1.03, 1.05) == "MISSED"
    assert of("topk+", 1.04, task="digits") == ""
    assert of("topk", 2.0) == "" and of("int4+", 1.0, equal=False) == "RANKS DIFFER"
    said = convergence._cells(convergence.Row("cnn", 4, 9, "topk+", (2.0, 4.0), (0.9, 1.1), True, 1.0))
    assert said == ["topk+", "3.0000", "1.000", "0.900", "1.100", "ok"]


@pytest.mark.exhaustive
def test_a_short_training_runs(tmp_path):
    path = tmp_path / "rows.jsonl"
    few = ["--steps", "5", "--ranks", "2", "--seeds", "2", "--codecs", "int8,int4+"]
    assert convergence.main(["--tasks", "digits", "--threads", *few, "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["codec"] for r in rows] == ["dense", "int8", "int4+"]
    assert all(r["threads"] and r["equal"] and len(r["losses"]) == 2 and max(r["losses"]) < 2.5 for r in rows)
    assert all(r["versions"]["numpy"] and "cpu" in r for r in rows)


def trained_by_torch(path: str, codecs: Sequence[str]) -> list[tuple[list[float], bool]]:
    """What a rank does: two steps of the network of torch with each codec."""
    import torch.distributed as dist

    from tests.interop.jobs import start

    start("gloo", path)
    try:
        return [convergence.training("cnn", codec, 2, range(1)) for codec in codecs]
    finally:
        dist.destroy_process_group()


@pytest.mark.exhaustive
def test_a_network_of_torch_trains(tmp_path):
    pytest.importorskip("torch", reason="the network is torch's")
    for each in run_ranks(trained_by_torch, 2, str(tmp_path / "store"), ["dense", "int4+"]):
        assert all(equal and loss < 2.5 for (loss,), equal in each) and len(each) == 2


def test_stored_results_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    stored = Path(convergence.__file__).parent / "results" / "convergence_epyc_2_cores.jsonl"
    picture = tmp_path / "picture.svg"
    assert convergence.main(["--stored", str(stored), "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:5] == b"<?xml"
    with pytest.raises(SystemExit):
        convergence.main(["--stored", str(stored)])
