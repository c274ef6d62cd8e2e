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
from itertools import chain

from flagcx.algorithms.moves import Move, arc, backwards, later, rounds_to_double, schedule_of
from flagcx.schedule.model import Recv, RecvReduce, Schedule, Send


def _hands(size: int, root: int, rank: int) -> Iterator[tuple[int, bool, int, int, int]]:
    """The hand-overs of one rank on the way from the root to all.

    Yields:
        ``(round, sends, peer, place, count)``: the receiver's place and how many places it stands for.
    """
    place = (rank - root) % size
    rounds = rounds_to_double(size)
    for now in range(rounds):
        half = 1 << (rounds - 1 - now)
        if place % (2 * half) == 0 and place + half < size:
            yield now, True, (rank + half) % size, place + half, min(half, size - place - half)
        elif place % (2 * half) == half:
            yield now, False, (rank - half) % size, place, min(half, size - place)


def broadcast_moves(size: int, root: int, rank: int, chunks: int = 1) -> Iterator[Move]:
    """The whole message, of ``chunks`` chunks, from the root to all."""
    for now, sends, peer, _, _ in _hands(size, root, rank):
        yield Move(now, Send if sends else Recv, 0, chunks, peer)


def scatter_moves(size: int, root: int, rank: int) -> Iterator[Move]:
    """To every rank its own block; an inner rank passes on those of the places that it stands for."""
    for now, sends, peer, place, count in _hands(size, root, rank):
        for start, stop in arc(place + root, count, size):
            yield Move(now, Send if sends else Recv, start, stop, peer)


def reduce_moves(size: int, root: int, rank: int) -> Iterator[Move]:
    """The broadcast backwards."""
    return backwards(broadcast_moves(size, root, rank), rounds_to_double(size), RecvReduce)


def gather_moves(size: int, root: int, rank: int) -> Iterator[Move]:
    """The scatter backwards."""
    return backwards(scatter_moves(size, root, rank), rounds_to_double(size), Recv)


def _allreduce_moves(size: int, rank: int) -> Iterator[Move]:
    down = later(broadcast_moves(size, 0, rank), rounds_to_double(size))
    return chain(reduce_moves(size, 0, rank), down)


def binomial_broadcast(size: int, root: int = 0) -> Schedule:
    """Every rank that has the message sends it to one that has not.

    Args:
        size: Number of ranks.
        root: The rank that has the message.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by the root: the message once a step; by others
        less. Any number of ranks.
    """
    moves = partial(broadcast_moves, size, root)
    return schedule_of("broadcast", "binomial", size, 1, rounds_to_double(size), moves, root)


def binomial_reduce(size: int, root: int = 0) -> Schedule:
    """Half of the ranks that still have a part send it to the other half, which add it up.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by each rank but the root: the message once. Any
        number of ranks.
    """
    moves = partial(reduce_moves, size, root)
    return schedule_of("reduce", "binomial", size, 1, rounds_to_double(size), moves, root)


def binomial_allreduce(size: int) -> Schedule:
    """Reduce to rank 0, then broadcast from rank 0.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 ceil(log2 n). Sent by each rank: the message ceil(log2 n) times at most. Any number of
        ranks.
    """
    rounds = 2 * rounds_to_double(size)
    return schedule_of("allreduce", "binomial", size, 1, rounds, partial(_allreduce_moves, size))


def binomial_barrier(size: int) -> Schedule:
    """An allreduce of nothing: word to rank 0 that all have come, and word back.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 ceil(log2 n), with n - 1 messages each way, the least possible. Any number of ranks.
    """
    rounds = 2 * rounds_to_double(size)
    return schedule_of("barrier", "binomial", size, 1, rounds, partial(_allreduce_moves, size))


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
    moves = partial(scatter_moves, size, root)
    return schedule_of("scatter", "binomial", size, size, rounds_to_double(size), moves, root)


def binomial_gather(size: int, root: int = 0) -> Schedule:
    """Half of the ranks send all that they have to the other half, again and again.

    Args:
        size: Number of ranks.
        root: The rank that gets all blocks.

    Returns:
        Steps: ceil(log2 n), the least possible. Sent by each rank: at most half of the message. Inner
        ranks keep blocks of others in SCRATCH. Any number of ranks; blocks of any sizes.
    """
    moves = partial(gather_moves, size, root)
    return schedule_of("gather", "binomial", size, size, rounds_to_double(size), moves, root)
