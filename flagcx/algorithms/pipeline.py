"""A message in pieces up or down any tree, each piece one round after the one before it.

Shared by the chain, the binary tree and the double binary tree, which differ in the tree alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from flagcx.schedule.compose import ChunkTransfer, recv, recv_reduce, schedule_of, send
from flagcx.schedule.model import Schedule


@dataclass(frozen=True, slots=True)
class TreePosition:
    """One rank's position in a tree.

    Attributes:
        parent: The rank above, or None at the top.
        children: The ranks below, in the order in which their contributions are added.
        depth: Edges between this rank and the top.
    """

    parent: int | None
    children: tuple[int, ...]
    depth: int


Tree = Callable[[int], TreePosition]
"""(rank) -> its position."""


def pipelined(
    collective: str,
    algorithm: str,
    size: int,
    height: int,
    trees: Sequence[Tree],
    pieces: int,
    root: int | None = None,
) -> Schedule:
    """A broadcast down trees, a reduce up, or an allreduce up and down, the two at once for different pieces.

    Args:
        collective: "broadcast", "reduce" or "allreduce".
        algorithm: Name of the algorithm.
        size: Number of ranks.
        height: Depth of the deepest rank of any of the trees.
        trees: Each carries an equal part of the message.
        pieces: Pieces that each part is cut into.
        root: The root, at the top of all trees; None for an allreduce, whose trees may have different tops.
    """
    rises, falls = collective != "broadcast", collective != "reduce"
    rounds = (rises + falls) * height + pieces - 1 if height else 0
    transfers = partial(_transfers, trees, height, pieces, rises, falls)
    return schedule_of(collective, algorithm, size, len(trees) * pieces, rounds, transfers, root)


def _transfers(
    trees: Sequence[Tree], height: int, pieces: int, rises: bool, falls: bool, rank: int
) -> Iterator[ChunkTransfer]:
    for number, tree in enumerate(trees):
        position, chunks = tree(rank), range(number * pieces, (number + 1) * pieces)
        if rises:
            yield from _up(position, height, chunks)
        if falls:
            yield from _down(position, height if rises else 0, chunks)


def _up(position: TreePosition, height: int, chunks: range) -> Iterator[ChunkTransfer]:
    """Adds up towards the top, in ``height + len(chunks) - 1`` rounds."""
    for now, chunk in enumerate(chunks, height - position.depth):
        yield from (recv_reduce(now - 1, child, chunk) for child in position.children)
        if position.parent is not None:
            yield send(now, position.parent, chunk)


def _down(position: TreePosition, first_round: int, chunks: range) -> Iterator[ChunkTransfer]:
    """Sends from the top to all, in ``height + len(chunks) - 1`` rounds from ``first_round`` on."""
    for now, chunk in enumerate(chunks, first_round + position.depth):
        if position.parent is not None:
            yield recv(now - 1, position.parent, chunk)
        yield from (send(now, child, chunk) for child in position.children)
