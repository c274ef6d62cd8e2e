"""Ranks with arrays on GPUs end a communicator at once, and go on without a rank that was lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.bootstrap.processes import REPOSITORY
from tests.gpu import recovery_jobs
from tests.gpu.conftest import GPUS

ELASTIC = ("-m", "flagcx.cli", "run", "-n", "3", "--elastic", "--max-restarts", "0", "--min-ranks", "2")
OWN = pytest.param(
    True, marks=pytest.mark.skipif(GPUS < 3, reason="MPS ends all clients with one that is killed")
)


@pytest.mark.parametrize("peer_memory", [True, False])
@pytest.mark.parametrize("kill", [False, OWN])
def test_ranks_go_on_without_one_that_was_lost(request, peer_memory, kill):
    if not kill:
        request.getfixturevalue("ranks")  # whose daemon lets the ranks share a GPU
    done = subprocess.run(
        [sys.executable, *ELASTIC, "-m", "tests.gpu.recovery_jobs", str(peer_memory), str(kill)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = re.findall(r"rank (.) of 2, lost \(1,\), right (\w+): (\S+) (\S+)", done.stdout)
    assert done.returncode == 0 and sorted(rank for rank, *_ in found) == ["0", "1"], done
    for _, right, noticed_s, took_s in found:
        assert right == "True" and float(noticed_s) < 5 and float(took_s) < 15, done


@pytest.mark.parametrize("peer_memory", [True, False])
def test_an_abort_frees_the_stream_that_waits(ranks, peer_memory):
    told = ranks(2, recovery_jobs.abort_from_a_thread, peer_memory)
    assert "AbortedError" in told[0][0] and "enough" in told[0][0], told
    for _, took_s, right in told:
        assert took_s < 4 and right, told
