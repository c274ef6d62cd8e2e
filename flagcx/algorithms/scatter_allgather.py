"""Broadcast as scatter and allgather, and its reverse, reduce as reduce_scatter and gather.

The root sends each block once, and all ranks together spread them: a long message leaves the root about
twice instead of once for each child. The scatter is a binomial tree, the allgather is Bruck's, so the
steps stay logarithmic.

Source: van de Geijn and others, "Interprocessor collective communication library (InterCom)", SHPCC 1994;
Barnett, Gupta, Payne, Shuler, van de Geijn and Watts, "Building a high-performance collective communication
library", SC 1994, on long vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from flagcx.algorithms import binomial, bruck
from flagcx.algorithms.moves import Move, later, rounds_to_double, schedule_of
from flagcx.schedule.model import Schedule


def _there(size: int, root: int, rank: int) -> Iterator[Move]:
    second = later(bruck.allgather_moves(size, rank), rounds_to_double(size))
    return chain(binomial.scatter_moves(size, root, rank), second)


def _back(size: int, root: int, rank: int) -> Iterator[Move]:
    second = later(binomial.gather_moves(size, root, rank), rounds_to_double(size))
    return chain(bruck.reduce_scatter_moves(size, rank), second)


def scatter_allgather_broadcast(size: int, root: int = 0) -> Schedule:
    """One block to each rank, then all blocks to all ranks.

    Args:
        size: Number of ranks.
        root: The rank that has the message.

    Returns:
        Steps: 2 ceil(log2 n). Sent by the root: 2(n-1)/n of the message; by others at most 3/2 of it.
        Any number of ranks.
    """
    rounds = 2 * rounds_to_double(size)
    return schedule_of(
        "broadcast", "scatter_allgather", size, size, rounds, partial(_there, size, root), root
    )


def reduce_scatter_gather_reduce(size: int, root: int = 0) -> Schedule:
    """Each rank adds up one block, then all blocks go to the root.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.

    Returns:
        Steps: 2 ceil(log2 n). Sent by each rank: at most 3/2 of the message. Any number of ranks.
    """
    rounds = 2 * rounds_to_double(size)
    return schedule_of(
        "reduce", "reduce_scatter_gather", size, size, rounds, partial(_back, size, root), root
    )
