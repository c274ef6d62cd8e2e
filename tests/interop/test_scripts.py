"""The article's benchmark and the measurement of all-reduce, small, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")

ROOT = Path(__file__).parents[2]


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "flagcx.cli", "run", "-n", "2", str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_articles_benchmark_prints_its_table():
    out = _run("examples/article_benchmark.py", "--elements", "300000", "--rounds", "2")
    assert "all-reduce of 1.2 MB float32 on 2 ranks (the article's has 312.5 MB)" in out
    rows = [line.split() for line in out.splitlines() if line.endswith("x")]
    assert len(rows) == 2 and "gloo" in rows[0] and "fc.enhance_process_group()" in rows[1]
    least, most = float(rows[1][-4]), float(rows[1][-3])
    assert least <= float(rows[1][-5]) <= most
    assert rows[0][-1] == "1.00x" and float(rows[1][-1][:-1]) > 0


@pytest.mark.exhaustive
def test_the_measurement_writes_a_line_for_each_size_and_way(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    _run("bench/torch_allreduce.py", "--sizes", "4K,64K", "--rounds", "4", "--output", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["nbytes"], line["wrong"], line["ranks"]) for line in lines] == [
        (nbytes, 0, 2) for nbytes in (4096, 4096, 65536, 65536)
    ]
    assert {line["implementation"] for line in lines} == {"torch gloo", "torch gloo enhanced by flagcx"}
    assert all(line["min_us"] <= line["median_us"] and line["versions"]["torch"] for line in lines)
