"""A message in pieces up or down any tree, each piece one level behind the one before it.

Shared by the chain, the binary tree and the double binary tree, which differ in the tree alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagcx.algorithms.moves import Move
from flagcx.schedule.model import Recv, RecvReduce, Send


@dataclass(frozen=True, slots=True)
class Links:
    """One rank's place in a tree.

    Attributes:
        parent: The rank above, or None at the top.
        children: The ranks below, in the order in which their contributions are added.
        depth: Links between this rank and the top.
    """

    parent: int | None
    children: tuple[int, ...]
    depth: int


def up(links: Links, height: int, pieces: int, first: int = 0, start: int = 0) -> Iterator[Move]:
    """Adds up chunks ``first`` to ``first + pieces`` towards the top, in ``height + pieces - 1`` rounds.

    Args:
        links: The rank's place.
        height: Depth of the deepest rank of the tree.
        pieces: Number of chunks.
        first: The first chunk.
        start: The first round.
    """
    for piece in range(pieces):
        chunk = first + piece
        sent = start + piece + height - links.depth
        for child in links.children:
            yield Move(sent - 1, RecvReduce, chunk, chunk + 1, child)
        if links.parent is not None:
            yield Move(sent, Send, chunk, chunk + 1, links.parent)


def down(links: Links, pieces: int, first: int = 0, start: int = 0) -> Iterator[Move]:
    """Sends chunks ``first`` to ``first + pieces`` from the top to all, in ``height + pieces - 1`` rounds."""
    for piece in range(pieces):
        chunk = first + piece
        sent = start + piece + links.depth
        if links.parent is not None:
            yield Move(sent - 1, Recv, chunk, chunk + 1, links.parent)
        for child in links.children:
            yield Move(sent, Send, chunk, chunk + 1, child)


def up_and_down(links: Links, height: int, pieces: int, first: int = 0) -> Iterator[Move]:
    """Adds up to the top and sends back down, both at once once the top has the first piece."""
    yield from up(links, height, pieces, first)
    yield from down(links, pieces, first, start=height)


def one_way_rounds(height: int, pieces: int) -> int:
    """Rounds of ``up`` or ``down``."""
    return height + pieces - 1 if height else 0


def both_ways_rounds(height: int, pieces: int) -> int:
    """Rounds of ``up_and_down``."""
    return 2 * height + pieces - 1 if height else 0
