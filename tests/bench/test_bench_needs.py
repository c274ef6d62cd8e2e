"""Scripts for GPUs say in a line what to install, where CuPy is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "bench").glob("gpu_*.py") if "def main" in path.read_text())
WITHOUT_CUPY = """
import runpy, sys
sys.modules["cupy"] = None
sys.path.insert(0, "bench")
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_cupy_it_says_what_to_install(script):
    command = [sys.executable, "-c", WITHOUT_CUPY, f"bench/{script}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "pip install cupy-cuda" in line
