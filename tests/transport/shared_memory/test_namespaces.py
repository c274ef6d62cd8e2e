"""Ranks in PID namespaces of their own, as in two containers, map no memory of each other's neighbours."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from flagcx.bootstrap.store import StoreServer
from tests.bootstrap.processes import REPOSITORY, launched_environment

_RANK = """
import numpy as np, flagcx as fc
try:
    comm = fc.init(timeout_s=10, init_timeout_s=20)
    print("sum", comm.allreduce(np.ones(100_000))[0])
except fc.FlagcxError as error:
    print(type(error).__name__, error)
"""
_UNSHARE = ("unshare", "--pid", "--fork")


def _may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_UNSHARE, "--mount-proc", "true"], capture_output=True).returncode == 0


def _outputs(*prefixes: tuple[str, ...]) -> list[str]:
    """What ranks print that are started in these ways."""
    with StoreServer(len(prefixes)) as server:
        ranks = [
            subprocess.Popen(
                [*prefix, sys.executable, "-c", _RANK],
                env=launched_environment(server, rank),
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, prefix in enumerate(prefixes)
        ]
        return [rank.communicate(timeout=60)[0] for rank in ranks]


@pytest.mark.skipif(not _may_unshare(), reason="needs the right to make a PID namespace (root, or a user's)")
@pytest.mark.parametrize("proc", [("--mount-proc",), ()], ids=["its own /proc", "the host's /proc"])
def test_ranks_in_namespaces_of_their_own_are_told(proc):
    for said in _outputs((*_UNSHARE, *proc), (*_UNSHARE, *proc)):
        assert said.startswith("BootstrapError") and "different PID namespaces" in said, said
        assert "docker run --pid=host" in said


@pytest.mark.skipif(not _may_unshare(), reason="needs the right to make a PID namespace (root, or a user's)")
def test_one_rank_in_a_namespace_of_its_own():
    for said in _outputs((), (*_UNSHARE, "--mount-proc")):
        assert said.startswith("BootstrapError") and "different PID namespaces" in said, said
