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

from collections.abc import Iterator
from functools import partial
from itertools import chain

from flagcx.algorithms.moves import Move, later, schedule_of
from flagcx.schedule.model import Recv, RecvReduce, Schedule, Send


def ring_rounds(size: int, pieces: int = 1) -> int:
    """Rounds in which every block goes once round the ring."""
    return (size - 1) * pieces


def reduce_scatter_moves(size: int, pieces: int, rank: int) -> Iterator[Move]:
    """Block b starts at rank b + 1 and ends, complete, at rank b."""
    yield from _once_round(size, pieces, rank, rank - 1, RecvReduce)


def allgather_moves(size: int, pieces: int, rank: int) -> Iterator[Move]:
    """Block b starts at rank b and ends at rank b - 1."""
    yield from _once_round(size, pieces, rank, rank, Recv)


def _once_round(size: int, pieces: int, rank: int, first: int, arriving: type) -> Iterator[Move]:
    following, previous = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        sent = (first - step) % size * pieces
        received = (first - step - 1) % size * pieces
        for piece in range(pieces):
            now = step * pieces + piece
            yield Move(now, Send, sent + piece, sent + piece + 1, following)
            yield Move(now, arriving, received + piece, received + piece + 1, previous)


def _allreduce_moves(size: int, pieces: int, rank: int) -> Iterator[Move]:
    second = later(allgather_moves(size, pieces, rank), ring_rounds(size, pieces))
    return chain(reduce_scatter_moves(size, pieces, rank), second)


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
    moves = partial(_allreduce_moves, size, pieces)
    return schedule_of("allreduce", "ring", size, size * pieces, 2 * ring_rounds(size, pieces), moves)


def ring_reduce_scatter(size: int, pieces: int = 1) -> Schedule:
    """Each block goes round the ring and gathers what every rank adds; it ends at its owner.

    Args:
        size: Number of ranks.
        pieces: Pieces that each block is cut into.

    Returns:
        Steps: (n-1) pieces. Sent by each rank: (n-1)/n of the message, the least possible.
        Any number of ranks; blocks of any sizes.
    """
    moves = partial(reduce_scatter_moves, size, pieces)
    return schedule_of("reduce_scatter", "ring", size, size * pieces, ring_rounds(size, pieces), moves)


def ring_allgather(size: int, pieces: int = 1) -> Schedule:
    """Each block goes round the ring and leaves a copy everywhere.

    Args:
        size: Number of ranks.
        pieces: Pieces that each block is cut into.

    Returns:
        Steps: (n-1) pieces. Sent by each rank: (n-1)/n of the message, the least possible.
        Any number of ranks; blocks of any sizes.
    """
    moves = partial(allgather_moves, size, pieces)
    return schedule_of("allgather", "ring", size, size * pieces, ring_rounds(size, pieces), moves)
