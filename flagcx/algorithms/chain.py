"""Chain: the ranks in a row, the message in pieces from one to the next. For the largest messages.

::

    root --> root+1 --> root+2 --> ... --> root-1        pieces follow each other

Every link carries the message once, so with many pieces a broadcast nears the time of one transfer; the
first piece needs n-1 steps to arrive.

Source: van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm", Concurrency:
Practice and Experience 9 (1997), the pipelined broadcast; NCCL calls it ring broadcast.
"""

from __future__ import annotations

from functools import partial

from flagcx.algorithms import pipeline
from flagcx.algorithms.moves import schedule_of
from flagcx.schedule.model import Schedule


def chain_links(size: int, root: int, rank: int) -> pipeline.Links:
    """The place of ``rank`` in the row that starts at ``root``."""
    depth = (rank - root) % size
    parent = (rank - 1) % size if depth else None
    children = ((rank + 1) % size,) if depth < size - 1 else ()
    return pipeline.Links(parent, children, depth)


def one_way(size: int, pieces: int = 1) -> int:
    """Rounds of a broadcast or a reduce."""
    return pipeline.one_way_rounds(size - 1, pieces)


def both_ways(size: int, pieces: int = 1) -> int:
    """Rounds of an allreduce."""
    return pipeline.both_ways_rounds(size - 1, pieces)


def chain_broadcast(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each rank hands every piece on to the next.

    Args:
        size: Number of ranks.
        root: The rank that has the message.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: n - 2 + pieces. Sent by each rank: the message once (nothing by the last). Any number of
        ranks.
    """
    moves = partial(_down, size, root, pieces)
    return schedule_of("broadcast", "chain", size, pieces, one_way(size, pieces), moves, root)


def chain_reduce(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each rank adds its part to every piece and hands it on towards the root.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: n - 2 + pieces. Sent by each rank: the message once (nothing by the root). Any number of
        ranks.
    """
    moves = partial(_up, size, root, pieces)
    return schedule_of("reduce", "chain", size, pieces, one_way(size, pieces), moves, root)


def chain_allreduce(size: int, pieces: int = 1) -> Schedule:
    """Adds up along the row to rank 0 and sends the result back, piece by piece.

    Args:
        size: Number of ranks.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: 2(n-1) + pieces - 1. Sent by each rank: the message twice at most. Any number of ranks.
    """
    moves = partial(_both, size, pieces)
    return schedule_of("allreduce", "chain", size, pieces, both_ways(size, pieces), moves)


def _down(size: int, root: int, pieces: int, rank: int):
    return pipeline.down(chain_links(size, root, rank), pieces)


def _up(size: int, root: int, pieces: int, rank: int):
    return pipeline.up(chain_links(size, root, rank), size - 1, pieces)


def _both(size: int, pieces: int, rank: int):
    return pipeline.up_and_down(chain_links(size, 0, rank), size - 1, pieces)
