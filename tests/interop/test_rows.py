"""The operators for all-reduces of rows: against torch's own norms, eager and compiled, on the CPU."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")

from tests.interop import row_jobs


@pytest.mark.parametrize("enhance", [True, False], ids=["enhanced", "plain"])
@pytest.mark.parametrize(("dtype", "last"), [("float32", 1e-5), ("bfloat16", 4e-2)])
def test_operators(tmp_path, dtype, last, enhance):
    for faults in run_ranks(row_jobs.operators, 2, str(tmp_path / "store"), dtype, last, enhance):
        assert faults == []


@pytest.mark.slow
def test_a_compiled_model(tmp_path):
    for faults in run_ranks(row_jobs.compiled, 2, str(tmp_path / "store")):
        assert faults == []


@pytest.mark.slow
def test_layers_that_are_fused(tmp_path):
    for faults in run_ranks(row_jobs.fused_layers, 2, str(tmp_path / "store")):
        assert faults == []
