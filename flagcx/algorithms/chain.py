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

from flagcx.algorithms.pipeline import TreePosition, pipelined
from flagcx.schedule.model import Schedule


def chain_position(size: int, root: int, rank: int) -> TreePosition:
    """The position of ``rank`` in the row that starts at ``root``."""
    depth = (rank - root) % size
    parent = (rank - 1) % size if depth else None
    children = ((rank + 1) % size,) if depth < size - 1 else ()
    return TreePosition(parent, children, depth)


def chain_broadcast(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each rank passes every piece on to the next.

    Args:
        size: Number of ranks.
        root: The rank that has the message.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: n - 2 + pieces. Sent by each rank: the message once (nothing by the last). Any number of
        ranks.
    """
    row = partial(chain_position, size, root)
    return pipelined("broadcast", "chain", size, size - 1, [row], pieces, root)


def chain_reduce(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each rank adds its part to every piece and passes it on towards the root.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: n - 2 + pieces. Sent by each rank: the message once (nothing by the root). Any number of
        ranks.
    """
    return pipelined("reduce", "chain", size, size - 1, [partial(chain_position, size, root)], pieces, root)


def chain_allreduce(size: int, pieces: int = 1) -> Schedule:
    """Adds up along the row to rank 0 and sends the result back, piece by piece.

    Args:
        size: Number of ranks.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: 2(n-1) + pieces - 1. Sent by each rank: the message twice at most. Any number of ranks.
    """
    return pipelined("allreduce", "chain", size, size - 1, [partial(chain_position, size, 0)], pieces)
