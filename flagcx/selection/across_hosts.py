"""The rule for NumPy arrays between hosts, where the network is far slower than memory."""

from __future__ import annotations

from collections.abc import Sequence

from flagcx.algorithms import Algorithm
from flagcx.selection.rules import Choice, pieces_for

_TINY_NBYTES = 4 << 10


def choose_across_hosts(
    collective: str, nbytes: int, groups: Sequence[Sequence[int]], uneven: bool = False
) -> Choice:
    """Chooses for NumPy arrays between processes of several hosts.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message (of one block, where there is one a rank).
        groups: The ranks of each host.
        uneven: Whether the blocks differ in size.
    """
    if collective == "barrier":
        return Choice(Algorithm.DISSEMINATION, 1, "fewest steps")
    alone = all(len(group) == 1 for group in groups)
    if collective in ("broadcast", "reduce"):
        if nbytes <= _TINY_NBYTES:
            return Choice(Algorithm.BINOMIAL, 1, "tiny: fewest steps")
        pieces = pieces_for(collective, Algorithm.CHAIN, nbytes)
        return Choice(Algorithm.CHAIN, pieces, "pieces flow from host to host, over each link once")
    if collective == "allreduce":
        if nbytes <= _TINY_NBYTES:
            return Choice(Algorithm.RECURSIVE_DOUBLING, 1, "tiny: fewest steps")
        if alone:
            return Choice(Algorithm.RING, 1, "one rank a host: the least traffic over each link")
        return Choice(Algorithm.HIERARCHICAL, 1, "within hosts first: the message crosses the network once")
    if collective in ("allgather", "reduce_scatter") and not uneven:
        return Choice(Algorithm.RING, 1, "in the order of the hosts: each block crosses each link once")
    return Choice(Algorithm.DIRECT, 1, "every block goes straight to where it belongs")
