"""The ring uses each of its links, and no other."""

from __future__ import annotations

from collections import Counter

import pytest

from flagcx.algorithms.ring import ring_allgather, ring_allreduce, ring_reduce_scatter
from flagcx.schedule.model import Send


def links(schedule) -> Counter:
    """Messages on every directed link."""
    return Counter(
        (program.rank, transfer.peer)
        for program in schedule.programs()
        for step in program.steps
        for transfer in step.transfers
        if isinstance(transfer, Send)
    )


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
def test_allreduce_sends_2n_n_minus_1_messages_over_n_links(size):
    used = links(ring_allreduce(size))
    assert used == {(rank, (rank + 1) % size): 2 * (size - 1) for rank in range(size)}
    assert len(used) == size
    assert sum(used.values()) == 2 * size * (size - 1)


@pytest.mark.parametrize("function", [ring_allgather, ring_reduce_scatter])
def test_each_half_sends_n_minus_1_messages_a_link(function):
    assert set(links(function(5)).values()) == {4}


def test_every_link_carries_a_message_in_every_step():
    for program in ring_allreduce(6, pieces=3).programs():
        first, *others = program.steps
        assert not first.transfers
        assert all(len(step.transfers) == 2 for step in others)
        assert len(others) == 2 * 5 * 3


def test_a_program_is_made_without_the_others():
    """A rank of many makes its own program alone, by arithmetic."""
    program = ring_allreduce(16_384).program(11_000)
    assert len(program.steps) == 1 + 2 * 16_383
