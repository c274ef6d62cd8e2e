"""Double binary tree: two trees at once, each with half of the message, so that no link idles.

In one binary tree half of the ranks are leaves and never send (or never receive). Here a rank that is a
leaf of one tree is an inner rank of the other, so all send and receive at full rate, in logarithmic time.

The trees of an allreduce for n = 8; ``b`` is the lowest set bit of a rank::

    0 ---------------+                              +--------------- 7
                     4                              3
             +-------+-------+              +-------+-------+
             2               6              1               5
         +---+---+       +---+---+      +---+---+       +---+---+
         1       3       5       7      0       2       4       6

In the first, rank r has the parent (r - b) | 2b (or r - b where that is n or more), and the children r - b/2
and r + b/2 (halved until it is a rank); odd ranks are leaves. The second is the first with ranks mirrored
(n even: r -> n-1-r) or shifted by one (n odd: r -> r+1).

A broadcast or reduce has one root for both: it is at place 0 of two trees over the other n-1 ranks, whose
places are mirrored (n odd) or shifted (n even) among themselves.

Source: Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009). The numbering of the first tree is NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flagcx.algorithms.pipeline import TreePosition, pipelined
from flagcx.schedule.compose import doublings
from flagcx.schedule.model import Schedule


def first_tree(size: int, place: int) -> TreePosition:
    """The position of a place in the first tree; place 0 is the top.

    Example:
        >>> first_tree(8, 4)
        TreePosition(parent=0, children=(2, 6), depth=1)
    """
    if place == 0:
        return TreePosition(None, (1 << doublings(size) - 1,) if size > 1 else (), 0)
    half = (place & -place) // 2
    children = [place - half] if half else []
    while half and place + half >= size:
        half //= 2
    children += [place + half] if half else []
    return TreePosition(_parent(size, place), tuple(children), _depth(size, place))


def _parent(size: int, place: int) -> int:
    low = place & -place
    above = (place - low) | 2 * low
    return above if above < size else place - low


def _depth(size: int, place: int) -> int:
    """How many ranks are above a place.

    Above r whose lowest set bit is the k-th are, for each j > k, the rank that has r's bits above the j-th,
    the j-th set, and none below; but not those of n and more. These are where r has the same bits above the
    j-th as n - 1, and the j-th of n - 1 is not set.
    """
    if place == 0:
        return 0
    low = (place & -place).bit_length() - 1
    alike = max((place ^ (size - 1)).bit_length() - 1, low)
    return 1 + alike - low + (size - 1 >> alike + 1).bit_count()


def allreduce_tree(size: int, which: int, rank: int) -> TreePosition:
    """The position of ``rank`` in tree 0 or 1 of an allreduce. No rank but 0 is an inner one of both."""
    if which == 0:
        return first_tree(size, rank)
    if size % 2 == 0:
        return _renumber(first_tree(size, size - 1 - rank), lambda place: size - 1 - place)
    return _renumber(first_tree(size, (rank - 1) % size), lambda place: (place + 1) % size)


def rooted_tree(size: int, root: int, which: int, rank: int) -> TreePosition:
    """The position of ``rank`` in tree 0 or 1 under ``root``. No other rank is an inner one of both."""
    number = (rank - root) % size
    place = _other(size, number, -1) if which else number
    return _renumber(first_tree(size, place), lambda p: ((_other(size, p, 1) if which else p) + root) % size)


def _other(size: int, number: int, shift: int) -> int:
    """From places of the second rooted tree to those of the first (shift 1), or back (shift -1)."""
    if number == 0 or size == 1:
        return number
    if size % 2:
        return size - number
    return (number - 1 + shift) % (size - 1) + 1


def _renumber(position: TreePosition, rank_at: Callable[[int], int]) -> TreePosition:
    parent = None if position.parent is None else rank_at(position.parent)
    return TreePosition(parent, tuple(rank_at(child) for child in position.children), position.depth)


def double_binary_tree_allreduce(size: int, pieces: int = 1) -> Schedule:
    """Each half of the message up and down its own tree.

    Args:
        size: Number of ranks.
        pieces: Pieces that each half is cut into.

    Returns:
        Steps: 2 ceil(log2 n) + pieces - 1. Sent by each rank: the message twice at most. Any number of
        ranks.
    """
    trees = [partial(allreduce_tree, size, which) for which in (0, 1)]
    return pipelined("allreduce", "double_binary_tree", size, doublings(size), trees, pieces)


def double_binary_tree_broadcast(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each half of the message down its own tree.

    Args:
        size: Number of ranks.
        root: The rank that has the message.
        pieces: Pieces that each half is cut into.

    Returns:
        Steps: ceil(log2 n) + pieces - 1. Sent by each rank: the message once at most, the least possible.
        Any number of ranks.
    """
    trees = [partial(rooted_tree, size, root, which) for which in (0, 1)]
    return pipelined("broadcast", "double_binary_tree", size, doublings(size), trees, pieces, root)


def double_binary_tree_reduce(size: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Each half of the message added up along its own tree.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.
        pieces: Pieces that each half is cut into.

    Returns:
        Steps: ceil(log2 n) + pieces - 1. Sent by each rank but the root: the message once. Any number of
        ranks.
    """
    trees = [partial(rooted_tree, size, root, which) for which in (0, 1)]
    return pipelined("reduce", "double_binary_tree", size, doublings(size), trees, pieces, root)
