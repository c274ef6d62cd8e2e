"""Counts of schedules whose costs are known."""

from __future__ import annotations

import pytest

from flagcx.schedule.statistics import (
    links,
    messages_sent,
    received_chunks,
    reduced_chunks,
    sent_chunks,
    steps,
)
from tests.schedule.samples import binomial_broadcast, one_shot, ring_allreduce, two_shot


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
def test_ring(n):
    ring = ring_allreduce(n)
    assert steps(ring) == 2 * (n - 1)
    for rank in range(n):
        assert sent_chunks(ring, rank) == received_chunks(ring, rank) == 2 * (n - 1)
        assert messages_sent(ring, rank) == 2 * (n - 1)
        assert reduced_chunks(ring, rank) == n - 1
    assert links(ring) == {(r, (r + 1) % n): 2 * (n - 1) for r in range(n) if n > 1}


@pytest.mark.parametrize("n", [2, 3, 8])
def test_direct(n):
    assert (steps(one_shot(n)), steps(two_shot(n))) == (1, 2)
    assert sent_chunks(one_shot(n), 0) == reduced_chunks(one_shot(n), 0) == n - 1
    assert sent_chunks(two_shot(n), 0) == 2 * (n - 1)
    assert len(links(one_shot(n))) == n * (n - 1)


def test_tree():
    tree = binomial_broadcast(8, root=3)
    assert steps(tree) == 3
    assert [sent_chunks(tree, r) for r in (3, 4, 2)] == [3, 0, 0]
    assert sum(received_chunks(tree, r) for r in range(8)) == 7
