"""Dissemination: in step k every rank tells the one 2^k further on what it knows. The barrier.

::

    step 0:  r -> r+1     each knows of 2 ranks
    step 1:  r -> r+2     of 4
    step 2:  r -> r+4     of 8, and so on, counted round the end

Ranks may be heard of twice, which does no harm to a barrier.

Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
Programming 17 (1988).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flagcx.algorithms.moves import Move, rounds_to_double, schedule_of
from flagcx.schedule.model import RecvReduce, Schedule, Send


def _moves(size: int, rank: int) -> Iterator[Move]:
    for now in range(rounds_to_double(size)):
        distance = 1 << now
        yield Move(now, Send, 0, 1, (rank + distance) % size)
        yield Move(now, RecvReduce, 0, 1, (rank - distance) % size)


def dissemination_barrier(size: int) -> Schedule:
    """No rank leaves before every rank has come.

    Args:
        size: Number of ranks.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by each rank: one message a step. Any number of
        ranks.
    """
    return schedule_of("barrier", "dissemination", size, 1, rounds_to_double(size), partial(_moves, size))
