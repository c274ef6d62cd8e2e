"""Process groups of torch over test hosts: flagcx serves them where ranks reach each other by UCX."""

from __future__ import annotations

import pytest

from tests.hosts import run_by_torchrun

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")
pytest.importorskip("ucxx", reason="the extra 'ucx' is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [(), ("1",)])
def test_a_process_group_over_hosts(lacking, test_hosts):
    """Where one rank has no ucxx, all of them keep torch's own backend."""
    codes, printed = run_by_torchrun(
        test_hosts[:2], (1, 2), "tests.interop.host_jobs", *lacking, settings={"UCX_TLS": "tcp,self"}
    )
    assert not any(codes), printed
    why = "rank 1: NumPy arrays travel between hosts by UCX, which needs ucxx"
    assert all((why in text) is bool(lacking) and "told:" in text for text in printed), printed
