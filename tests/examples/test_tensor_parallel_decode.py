"""The decoding example: a small model gives the same tokens in every way, on two ranks without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_small_model_gives_the_same_tokens_in_every_way(tmp_path):
    ways = "gloo,flagcx,flagcx fused"
    command = [
        sys.executable,
        "-m",
        "flagcx.cli",
        "run",
        "-n",
        "2",
        "examples/tensor_parallel_decode.py",
        "--small",
    ]
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command += ["--tokens", "8", "--only", ways]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, env=environ)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("24 of 24 tokens the same") == 3
    assert "all ways give the same tokens" in ended.stdout
