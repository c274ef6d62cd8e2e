"""Double binary tree: two trees at once, each with half of the message, so that no link idles.

In one binary tree half of the ranks are leaves and never send (or never receive). Here a rank that is a
leaf of one tree is an inner rank of the other, so all send and receive at full rate, in logarithmic time.

The first tree in order of rank, for n = 8; ``b`` is the lowest set bit of a rank::

    0 ---------------+
                     4               rank r has the parent (r - b) | 2b (or r - b where that is
             +-------+-------+       n or more), and the children r - b/2 and r + b/2 (halved
             2               6       until it is a rank)
         +---+---+       +---+---+
         1       3       5       7   odd ranks are leaves

The second is the first with ranks mirrored (n even: r -> n-1-r) or shifted by one (n odd).

A broadcast or reduce has one root for both: it stands at place 0 of two trees over the other n-1 ranks,
whose places are mirrored (n odd) or shifted (n even) among themselves.

Source: Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009). The numbering of the first tree is NCCL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flagcx.algorithms import pipeline
from flagcx.algorithms.moves import Move, rounds_to_double, schedule_of
from flagcx.schedule.model import Schedule


def place_links(size: int, place: int) -> pipeline.Links:
    """The parent and children of a place in the first tree; place 0 is the top.

    Example:
        >>> place_links(8, 4)
        Links(parent=0, children=(2, 6), depth=1)
    """
    if place == 0:
        top = 1 << (size - 1).bit_length() - 1 if size > 1 else 0
        return pipeline.Links(None, (top,) if size > 1 else (), 0)
    low = place & -place
    half = low // 2
    children = [place - half] if half else []
    while half and place + half >= size:
        half //= 2
    children += [place + half] if half else []
    return pipeline.Links(_parent(size, place), tuple(children), _depth(size, place))


def _parent(size: int, place: int) -> int:
    low = place & -place
    above = (place - low) | 2 * low
    return above if above < size else place - low


def _depth(size: int, place: int) -> int:
    depth = 0
    while place:
        place, depth = _parent(size, place), depth + 1
    return depth


def tree_height(size: int) -> int:
    """Links between the top and the deepest rank of either tree."""
    return rounds_to_double(size)


def one_way(size: int, pieces: int = 1) -> int:
    """Rounds of a broadcast or a reduce."""
    return pipeline.one_way_rounds(tree_height(size), pieces)


def both_ways(size: int, pieces: int = 1) -> int:
    """Rounds of an allreduce."""
    return pipeline.both_ways_rounds(tree_height(size), pieces)


def allreduce_links(size: int, which: int, rank: int) -> pipeline.Links:
    """The place of ``rank`` in tree 0 or 1 of an allreduce. No rank but 0 is an inner one of both."""
    if which == 0:
        return place_links(size, rank)
    if size % 2 == 0:
        return _renumber(place_links(size, size - 1 - rank), lambda place: size - 1 - place)
    return _renumber(place_links(size, (rank - 1) % size), lambda place: (place + 1) % size)


def rooted_links(size: int, root: int, which: int, rank: int) -> pipeline.Links:
    """The place of ``rank`` in tree 0 or 1 under ``root``. No other rank is an inner one of both."""
    number = (rank - root) % size

    def of_place(place: int) -> int:
        return (_other(size, place, 1) if which else place) + root

    place = _other(size, number, -1) if which else number
    return _renumber(place_links(size, place), lambda p: of_place(p) % size)


def _other(size: int, number: int, shift: int) -> int:
    """From places of the second rooted tree to those of the first (shift 1), or back (shift -1)."""
    if number == 0 or size == 1:
        return number
    if size % 2:
        return size - number
    return (number - 1 + shift) % (size - 1) + 1


def _renumber(links: pipeline.Links, rank_at) -> pipeline.Links:
    parent = None if links.parent is None else rank_at(links.parent)
    return pipeline.Links(parent, tuple(rank_at(child) for child in links.children), links.depth)


def double_binary_tree_allreduce(size: int, pieces: int = 1) -> Schedule:
    """Each half of the message up and down its own tree.

    Args:
        size: Number of ranks.
        pieces: Pieces that each half is cut into.

    Returns:
        Steps: 2 ceil(log2 n) + pieces - 1. Sent by each rank: the message twice at most. Any number of
        ranks.
    """
    rounds = both_ways(size, pieces)
    moves = partial(_both, size, pieces)
    return schedule_of("allreduce", "double_binary_tree", size, 2 * pieces, rounds, moves)


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
    rounds = one_way(size, pieces)
    moves = partial(_down, size, root, pieces)
    return schedule_of("broadcast", "double_binary_tree", size, 2 * pieces, rounds, moves, root)


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
    rounds = one_way(size, pieces)
    moves = partial(_up, size, root, pieces)
    return schedule_of("reduce", "double_binary_tree", size, 2 * pieces, rounds, moves, root)


def _both(size: int, pieces: int, rank: int) -> Iterator[Move]:
    for which in (0, 1):
        links = allreduce_links(size, which, rank)
        yield from pipeline.up_and_down(links, tree_height(size), pieces, which * pieces)


def _down(size: int, root: int, pieces: int, rank: int) -> Iterator[Move]:
    for which in (0, 1):
        yield from pipeline.down(rooted_links(size, root, which, rank), pieces, which * pieces)


def _up(size: int, root: int, pieces: int, rank: int) -> Iterator[Move]:
    for which in (0, 1):
        links = rooted_links(size, root, which, rank)
        yield from pipeline.up(links, tree_height(size), pieces, which * pieces)
