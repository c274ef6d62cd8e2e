"""Binary tree: two children each, the message in pieces. Few steps for messages of middle size.

::

                root+0
               /      \\
          root+1      root+2          the rank at place v (counted from the root) has the
          /    \\      /    \\          children 2v+1 and 2v+2, and the parent (v-1)//2
        +3     +4   +5     +6

Source: Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009), on the single pipelined tree.
"""

from __future__ import annotations

from functools import partial

from flagcx.algorithms.pipeline import TreePosition, pipelined
from flagcx.schedule.model import Schedule


def tree_height(size: int) -> int:
    """Edges between the root and the deepest rank."""
    return size.bit_length() - 1


def tree_position(size: int, root: int, rank: int) -> TreePosition:
    """The position of ``rank`` in the complete binary tree under ``root``."""
    place = (rank - root) % size
    parent = ((place - 1) // 2 + root) % size if place else None
    below = range(2 * place + 1, min(2 * place + 3, size))
    return TreePosition(parent, tuple((p + root) % size for p in below), (place + 1).bit_length() - 1)


def tree_broadcast(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each rank sends every piece to its two children.

    Args:
        size: Number of ranks.
        root: The rank that has the message.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: floor(log2 n) + pieces - 1. Sent by each inner rank: the message once for each child. Any
        number of ranks.
    """
    tree = partial(tree_position, size, root)
    return pipelined("broadcast", "tree", size, tree_height(size), [tree], pieces, root)


def tree_reduce(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each rank adds the pieces of its two children to its own and sends the sums to its parent.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: floor(log2 n) + pieces - 1. Sent by each rank but the root: the message once. Any number
        of ranks.
    """
    tree = partial(tree_position, size, root)
    return pipelined("reduce", "tree", size, tree_height(size), [tree], pieces, root)


def tree_allreduce(size: int, pieces: int = 1) -> Schedule:
    """Adds up to rank 0 and sends the result back down, piece by piece, both directions at once.

    Args:
        size: Number of ranks.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: 2 floor(log2 n) + pieces - 1. Sent by each inner rank: the message up to three times (once
        up, twice down). Any number of ranks.
    """
    return pipelined("allreduce", "tree", size, tree_height(size), [partial(tree_position, size, 0)], pieces)
