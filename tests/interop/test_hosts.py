"""Process groups of torch over test hosts: flagcx serves them where ranks reach each other by UCX."""

from __future__ import annotations

import pytest

from tests.hosts import run_by_torchrun

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")
pytest.importorskip("ucxx", reason="the extra 'ucx' is not installed")


@pytest.mark.slow
def test_a_process_group_over_hosts(test_hosts):
    """Where one rank has no ucxx, all of them keep torch's own backend."""
    codes, printed = run_by_torchrun(
        test_hosts[:2], (1, 2), "tests.interop.host_jobs", settings={"UCX_TLS": "tcp,self"}, timeout_s=120
    )
    assert not any(codes), printed
    why = "rank 1: NumPy arrays travel between hosts by UCX, which needs ucxx"
    for text in printed:
        without, with_ucxx = (line for line in text.splitlines() if line.startswith("told:"))
        assert why in without and "torch's own" not in with_ucxx, printed
