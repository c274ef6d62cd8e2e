"""Ranks that flush subnormal numbers to zero beside ranks that don't are warned of."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import flagcx as fc
from flagcx.dtypes import flushes_subnormals

torch = pytest.importorskip("torch", reason="torch sets the mode of a thread; run with flagcx[torch]")


@pytest.fixture(autouse=True)
def _mode_of_this_thread():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    assert flushes_subnormals()
    torch.set_flush_denormal(False)
    assert not flushes_subnormals()


def messages_of(before: tuple[int, ...], after: tuple[int, ...]) -> list[str]:
    """The warnings of a job of threads, some of which change their mode before or after they join."""

    def job() -> None:
        rank = fc.bootstrap.thread_rank.thread_rank.get().rank
        torch.set_flush_denormal(rank in before)
        comm = fc.init()
        torch.set_flush_denormal(rank in after)
        comm.allgather(np.ones(3))
        comm.allreduce(np.ones(3))
        comm.allreduce(np.ones(4))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fc.launch(job, 3, threads=True)
    return sorted(str(warning.message) for warning in caught)


def test_ranks_of_one_mode_are_not_warned():
    assert messages_of((), ()) == messages_of((0, 1, 2), (0, 1, 2)) == []


def test_every_rank_is_told_which_ranks_flush():
    messages = messages_of((1, 2), (1, 2))
    assert len(messages) == 3
    assert all("of 3 ranks these flush subnormal numbers to zero: 1, 2; " in text for text in messages)


def test_a_rank_whose_mode_changes_later_says_so_once():
    (message,) = messages_of((), (2,))
    assert message.startswith("rank 2 flushes subnormal numbers to zero since its communicator was made")
