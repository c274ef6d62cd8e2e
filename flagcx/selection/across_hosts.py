"""The rule for NumPy arrays between hosts, where the network is far slower than memory."""

from __future__ import annotations

from collections.abc import Sequence

from flagcx.algorithms import Algorithm
from flagcx.algorithms.candidate import Candidate
from flagcx.selection.rules import pieces_for

_TINY_NBYTES = 4 << 10


def choose_across_hosts(
    collective: str, nbytes: int, groups: Sequence[Sequence[int]], uneven: bool = False
) -> Candidate:
    """Chooses for NumPy arrays between processes of several hosts.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message (of one block, where there is one a rank).
        groups: The ranks of each host.
        uneven: Whether the blocks differ in size.
    """
    if collective == "barrier":
        return Candidate(Algorithm.DISSEMINATION, reason="fewest steps")
    alone = all(len(group) == 1 for group in groups)
    if collective in ("broadcast", "reduce"):
        if nbytes <= _TINY_NBYTES:
            return Candidate(Algorithm.BINOMIAL, reason="tiny: fewest steps")
        pieces = pieces_for(collective, Algorithm.CHAIN, nbytes)
        return Candidate(Algorithm.CHAIN, pieces, reason="pieces flow from host to host, over each link once")
    if collective == "allreduce":
        if nbytes <= _TINY_NBYTES:
            return Candidate(Algorithm.RECURSIVE_DOUBLING, reason="tiny: fewest steps")
        if alone:
            return Candidate(Algorithm.RING, reason="one rank a host: the least traffic over each link")
        return Candidate(
            Algorithm.HIERARCHICAL, reason="within hosts first: the message crosses the network once"
        )
    if collective in ("allgather", "reduce_scatter") and not uneven:
        return Candidate(
            Algorithm.RING, reason="in the order of the hosts: each block crosses each link once"
        )
    return Candidate(Algorithm.DIRECT, reason="every block goes straight to where it belongs")
