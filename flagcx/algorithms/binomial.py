"""Binomial tree: the ranks that have the message double in every step. The fewest steps from one root.

::

    step 0:  0 ------------> 4           places are counted from the root; place v has its
    step 1:  0 ----> 2       4 ----> 6   parent at v without its lowest set bit
    step 2:  0 > 1   2 > 3   4 > 5   6 > 7

Run backwards it is a reduction; with blocks instead of the whole message, a scatter or a gather.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), on broadcast and reduce of short messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flagcx.schedule.compose import ChunkTransfer, arc, doublings, recv, reverse, schedule_of, send, then
from flagcx.schedule.model import Schedule


def _hands(size: int, root: int, rank: int) -> Iterator[tuple]:
    """The transfers of one rank on the way from the root to all.

    Yields:
        ``(send or recv, round, peer, place, count)``: the receiver's place and how many places it stands for.
    """
    place = (rank - root) % size
    rounds = doublings(size)
    for now in range(rounds):
        half = 1 << (rounds - 1 - now)
        if place % (2 * half) == 0 and place + half < size:
            yield send, now, (rank + half) % size, place + half, min(half, size - place - half)
        elif place % (2 * half) == half:
            yield recv, now, (rank - half) % size, place, min(half, size - place)


def _broadcast(size: int, root: int, rank: int) -> Iterator[ChunkTransfer]:
    return (transfer(now, peer, 0) for transfer, now, peer, _, _ in _hands(size, root, rank))


def _scatter(size: int, root: int, rank: int) -> Iterator[ChunkTransfer]:
    """To every rank its own block; an inner rank passes on those of the places that it stands for."""
    for transfer, now, peer, place, count in _hands(size, root, rank):
        for start, stop in arc(place + root, count, size):
            yield transfer(now, peer, start, stop)


def binomial_broadcast(size: int, root: int = 0) -> Schedule:
    """Every rank that has the message sends it to one that has not.

    Args:
        size: Number of ranks.
        root: The rank that has the message.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by the root: the message once a step; by others
        less. Any number of ranks.
    """
    transfers = partial(_broadcast, size, root)
    return schedule_of("broadcast", "binomial", size, 1, doublings(size), transfers, root)


def binomial_reduce(size: int, root: int = 0) -> Schedule:
    """Half of the ranks that still have a part send it to the other half, which add it up.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by each rank but the root: the message once. Any
        number of ranks.
    """
    return reverse(binomial_broadcast(size, root))


def binomial_allreduce(size: int) -> Schedule:
    """Reduce to rank 0, then broadcast from rank 0.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 ceil(log2 n). Sent by each rank: the message ceil(log2 n) times at most. Any number of
        ranks.
    """
    return then(binomial_reduce(size), binomial_broadcast(size))


def binomial_barrier(size: int) -> Schedule:
    """An allreduce of nothing: rank 0 hears that all ranks have come, and tells them.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 ceil(log2 n), with n - 1 messages each way, the least possible. Any number of ranks.
    """
    return then(binomial_reduce(size), binomial_broadcast(size), collective="barrier")


def binomial_scatter(size: int, root: int = 0) -> Schedule:
    """The root sends half of the blocks to one rank, which does the same with its half.

    Args:
        size: Number of ranks.
        root: The rank that has all blocks.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by the root: (n-1)/n of the message, the least
        possible; by others at most half of it. Inner ranks keep blocks of others in SCRATCH. Any number
        of ranks; blocks of any sizes.
    """
    transfers = partial(_scatter, size, root)
    return schedule_of("scatter", "binomial", size, size, doublings(size), transfers, root)


def binomial_gather(size: int, root: int = 0) -> Schedule:
    """Half of the ranks send all that they have to the other half, again and again.

    Args:
        size: Number of ranks.
        root: The rank that gets all blocks.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by each rank: at most half of the message. Inner
        ranks keep blocks of others in SCRATCH. Any number of ranks; blocks of any sizes.
    """
    return reverse(binomial_scatter(size, root))
