"""Chooses the algorithm of a call by rule: the same on every rank, since all see the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.algorithms import Algorithm, entry

ONE_SHOT_NBYTES = 64 << 10
_PIPELINE_NBYTES = 256 << 10
_ATTACH_NBYTES = 128 << 10
_MOST_PIECES = 64
_DEVICE_PIECE_NBYTES = 4 << 20
_MOST_DEVICE_PIECES = 8
_MOST_DIRECT = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        algorithm: Name of the algorithm.
        pieces: How many pieces each block is cut into, so that they flow behind one another.
        reason: Why, in a sentence.
        protocol: How the transport moves the data; empty for its own rule.
    """

    algorithm: str
    pieces: int
    reason: str
    protocol: str = ""


def choose_on_host(
    collective: str, nbytes: int, size: int, uneven: bool = False, attached: bool = True
) -> Choice:
    """Chooses for NumPy arrays between processes of one host.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message (of one block, where there is one a rank).
        size: Number of ranks.
        uneven: Whether the blocks differ in size.
        attached: Whether ranks may read each other's private memory.
    """
    if collective == "allreduce":
        if nbytes <= ONE_SHOT_NBYTES:
            return Choice(Algorithm.ONE_SHOT, 1, "small: one exchange, each rank reads everybody's message")
        return Choice(Algorithm.TWO_SHOT, 1, "large: each rank reduces one stripe in the shared memory")
    if collective == "barrier":
        return Choice(Algorithm.DISSEMINATION, 1, "fewest steps")
    if collective == "broadcast" and attached and size > 2 and nbytes >= _ATTACH_NBYTES:
        return Choice(Algorithm.DIRECT, 1, "large: all read the root's memory at once", "cross_memory")
    if collective in ("broadcast", "reduce"):
        return _rooted(nbytes, size)
    return Choice(Algorithm.DIRECT, 1, "one host: every pair of ranks is one hop apart")


def _rooted(nbytes: int, size: int) -> Choice:
    if nbytes <= _PIPELINE_NBYTES or size == 2:
        return Choice(Algorithm.BINOMIAL, 1, "small: fewest steps")
    return Choice(
        Algorithm.CHAIN, _pieces(nbytes), "large: pieces flow down a chain, every copy busy at once"
    )


def choose_on_device(collective: str, nbytes: int, size: int, uneven: bool = False) -> Choice:
    """Chooses for arrays on GPUs, where NCCL's own collective does not serve.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message (of one block, where there is one a rank).
        size: Number of ranks.
        uneven: Whether the blocks differ in size.
    """
    if collective == "allreduce":
        if nbytes <= ONE_SHOT_NBYTES:
            return Choice(Algorithm.ONE_SHOT, 1, "small: one group and one launch")
        if size <= _MOST_DIRECT:
            return Choice(Algorithm.TWO_SHOT, 1, "two groups, and sums rounded once")
        return Choice(Algorithm.RING, 1, "many ranks: the least traffic, to one neighbour alone")
    if collective == "barrier":
        return Choice(Algorithm.DISSEMINATION, 1, "fewest steps")
    if collective in ("broadcast", "reduce") and size > _MOST_DIRECT:
        return Choice(Algorithm.BINOMIAL, 1, "many ranks: fewest steps")
    return Choice(Algorithm.DIRECT, 1, "one group")


def pieces_for(collective: str, algorithm: str, nbytes: int) -> int:
    """How many pieces a message is cut into for an algorithm that the caller names.

    Args:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        nbytes: Bytes of the message or block.
    """
    return _pieces(nbytes) if entry(collective, algorithm).pipelined else 1


def pieces_on_device(collective: str, algorithm: str, nbytes: int) -> int:
    """How many pieces a message on a GPU is cut into, for an algorithm that the caller names.

    A step costs a group and a launch, and all blocks of a ring are under way at once as it is; only where
    the whole message travels from rank to rank do large pieces pay.

    Args:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        nbytes: Bytes of the message or block.
    """
    if algorithm == Algorithm.RING or not entry(collective, algorithm).pipelined:
        return 1
    return max(min(nbytes // _DEVICE_PIECE_NBYTES, _MOST_DEVICE_PIECES), 1)


def _pieces(nbytes: int) -> int:
    return max(min(-(-nbytes // _PIPELINE_NBYTES), _MOST_PIECES), 1)
