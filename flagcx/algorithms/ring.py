"""Ring: every rank sends to the next one alone. The least traffic, the most steps.

::

    0 --> 1 --> 2 --> 3 --+
    ^                     |
    +---------------------+

A block goes once round the ring: it gathers every rank's contribution on the way (reduce_scatter), or
leaves a copy with every rank (allgather). All n blocks are under way at once, one on each link.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from flagcx.schedule.compose import ChunkTransfer, recv, recv_reduce, schedule_of, send, then
from flagcx.schedule.model import Schedule


def _once_round(
    size: int, pieces: int, shift: int, arriving: Callable[..., ChunkTransfer], rank: int
) -> Iterator[ChunkTransfer]:
    """Block b starts at rank b + ``shift`` and ends at the rank before."""
    following, previous = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        sent = (rank - shift - step) % size * pieces
        received = (rank - shift - step - 1) % size * pieces
        for piece in range(pieces):
            now = step * pieces + piece
            yield send(now, following, sent + piece)
            yield arriving(now, previous, received + piece)


def ring_allreduce(size: int, pieces: int = 1) -> Schedule:
    """Reduce_scatter round the ring, then allgather round the ring.

    With several pieces, a piece is reduced while the next is under way.

    Args:
        size: Number of ranks.
        pieces: Pieces that each of the n blocks is cut into.

    Returns:
        Steps: 2(n-1) pieces. Sent by each rank: 2(n-1)/n of the message, the least possible.
        n links carry data, in one direction; 2n(n-1) messages for one piece. Any number of ranks.
    """
    return then(ring_reduce_scatter(size, pieces), ring_allgather(size, pieces))


def ring_reduce_scatter(size: int, pieces: int = 1) -> Schedule:
    """Each block goes round the ring and gathers what every rank adds; it ends at its owner.

    Args:
        size: Number of ranks.
        pieces: Pieces that each block is cut into.

    Returns:
        Steps: (n-1) pieces. Sent by each rank: (n-1)/n of the message, the least possible.
        Any number of ranks; blocks of any sizes.
    """
    transfers = partial(_once_round, size, pieces, 1, recv_reduce)
    return schedule_of("reduce_scatter", "ring", size, size * pieces, (size - 1) * pieces, transfers)


def ring_allgather(size: int, pieces: int = 1) -> Schedule:
    """Each block goes round the ring and leaves a copy everywhere.

    Args:
        size: Number of ranks.
        pieces: Pieces that each block is cut into.

    Returns:
        Steps: (n-1) pieces. Sent by each rank: (n-1)/n of the message, the least possible.
        Any number of ranks; blocks of any sizes.
    """
    transfers = partial(_once_round, size, pieces, 0, recv)
    return schedule_of("allgather", "ring", size, size * pieces, (size - 1) * pieces, transfers)
