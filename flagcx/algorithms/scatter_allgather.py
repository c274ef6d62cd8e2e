"""Broadcast as scatter and allgather, and its reverse, reduce as reduce_scatter and gather.

The root sends each block once, and all ranks together spread them: a long message leaves the root about
twice instead of once for each child. The scatter is a binomial tree, the allgather is Bruck's, so the
steps stay logarithmic.

Source: van de Geijn and others, "Interprocessor collective communication library (InterCom)", SHPCC 1994;
Barnett, Gupta, Payne, Shuler, van de Geijn and Watts, "Building a high-performance collective communication
library", SC 1994, on long vectors.
"""

from __future__ import annotations

from flagcx.algorithms.binomial import binomial_gather, binomial_scatter
from flagcx.algorithms.bruck import bruck_allgather, bruck_reduce_scatter
from flagcx.schedule.compose import then
from flagcx.schedule.model import Schedule


def scatter_allgather_broadcast(size: int, root: int = 0) -> Schedule:
    """One block to each rank, then all blocks to all ranks.

    Args:
        size: Number of ranks.
        root: The rank that has the message.

    Returns:
        Steps: 2 ceil(log2 n). Sent by the root: 2(n-1)/n of the message; by others at most 3/2 of it.
        Any number of ranks.
    """
    return then(binomial_scatter(size, root), bruck_allgather(size), algorithm="scatter_allgather")


def reduce_scatter_gather_reduce(size: int, root: int = 0) -> Schedule:
    """Each rank adds up one block, then all blocks go to the root.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.

    Returns:
        Steps: 2 ceil(log2 n). Sent by each rank: at most 3/2 of the message. Any number of ranks.
    """
    return then(bruck_reduce_scatter(size), binomial_gather(size, root), algorithm="reduce_scatter_gather")
