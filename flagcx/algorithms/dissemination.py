"""Dissemination: in step k every rank sends all that it knows to the rank 2^k further on. The barrier.

::

    step 0:  r -> r+1     each knows of 2 ranks
    step 1:  r -> r+2     of 4
    step 2:  r -> r+4     of 8, and so on; rank 0 follows the last

A rank may hear of another twice, which does no harm to a barrier.

Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
Programming 17 (1988).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flagcx.schedule.compose import ChunkTransfer, doublings, recv_reduce, schedule_of, send
from flagcx.schedule.model import Schedule


def _transfers(size: int, rank: int) -> Iterator[ChunkTransfer]:
    for now in range(doublings(size)):
        distance = 1 << now
        yield send(now, (rank + distance) % size, 0)
        yield recv_reduce(now, (rank - distance) % size, 0)


def dissemination_barrier(size: int) -> Schedule:
    """No rank leaves before every rank has come.

    Args:
        size: Number of ranks.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by each rank: one message a step. Any number of
        ranks.
    """
    return schedule_of("barrier", "dissemination", size, 1, doublings(size), partial(_transfers, size))
