"""Ranks with arrays on GPUs end a communicator at once, and go on without a rank that was lost."""

from __future__ import annotations

import pytest

import flagcx as fc
from tests.gpu import recovery_jobs
from tests.gpu.conftest import GPUS


@pytest.mark.parametrize("peer_memory", [True, False])
@pytest.mark.parametrize(
    "kill", [False, pytest.param(True, marks=pytest.mark.skipif(GPUS < 3, reason="MPS"))]
)
def test_ranks_go_on_without_one_that_was_lost(ranks, tmp_path, peer_memory, kill):
    """Killed where each has a GPU of its own: MPS ends all clients of a GPU with one that is killed."""
    run = fc.launch if kill else ranks
    file = str(tmp_path / "rank")
    with pytest.raises(fc.LaunchError, match="rank 1"):
        run(
            *(
                (recovery_jobs.lose_one, 3, (file, peer_memory, True))
                if kill
                else (3, recovery_jobs.lose_one, file, peer_memory, False)
            )
        )
    for old, new in ((0, 0), (2, 1)):
        rank, size, lost, right, noticed_s, took_s = (tmp_path / f"rank.{old}").read_text().split()
        assert (rank, size, lost, right) == (str(new), "2", "(1,)", "True")
        assert float(noticed_s) < 5 and float(took_s) < 10


@pytest.mark.parametrize("peer_memory", [True, False])
def test_an_abort_frees_the_stream_that_waits(ranks, peer_memory):
    told = ranks(2, recovery_jobs.abort_from_a_thread, peer_memory)
    assert "AbortedError" in told[0][0] and "enough" in told[0][0], told
    for _, took_s, right in told:
        assert took_s < 4 and right, told
