"""Chooses the algorithm of a call by rule: the same on every rank, since all see the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.algorithms import Algorithm, entry
from flagcx.selection.mixes import mix_of

ONE_SHOT_NBYTES = 64 << 10
_PIPELINE_NBYTES = 256 << 10
_ATTACH_NBYTES = 128 << 10
_TINY_REDUCE_NBYTES = 4 << 10
_ATTACH_REDUCE_NBYTES = 1 << 20
_MOST_PIECES = 64
_DEVICE_PIECE_NBYTES = 4 << 20
_MOST_DEVICE_PIECES = 8
_MOST_DIRECT = 16
_PEER_ONE_SHOT_NBYTES = 1 << 20
RING_NBYTES = 10_000_000
"""On GPUs longer messages go round a ring, where neither a measurement nor a model knows better."""
ROUNDS_ONCE = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.DIRECT)
"""The algorithms in which a rank adds up all contributions to an element and rounds once."""


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
    if collective == "reduce":
        return _reduce_on_host(nbytes, size, attached)
    if collective == "broadcast":
        return _broadcast_on_host(nbytes, size)
    if collective == "reduce_scatter" and size == 2:
        return Choice(Algorithm.RING, 1, "two ranks: each adds up its block as it reads the other's")
    return Choice(Algorithm.DIRECT, 1, "one host: every pair of ranks is one hop apart")


def _reduce_on_host(nbytes: int, size: int, attached: bool) -> Choice:
    """Measured with 2 and 4 ranks: ``bench/tune_check.py --collectives reduce``."""
    if size == 2:
        way = "slots" if attached and nbytes >= _PIPELINE_NBYTES else ""
        return Choice(Algorithm.BINOMIAL, 1, "two ranks: one adds up what the other writes", way)
    if nbytes <= _TINY_REDUCE_NBYTES:
        return Choice(Algorithm.TREE, 1, "tiny: few steps, and no rank waits for more than two")
    if nbytes < _ATTACH_NBYTES:
        return Choice(Algorithm.BINOMIAL, 1, "small: fewest steps")
    way = ("cross_memory" if nbytes >= _ATTACH_REDUCE_NBYTES else "slots") if attached else ""
    return Choice(Algorithm.DOUBLE_BINARY_TREE, 1, "large: two trees share the adding up", way)


def _broadcast_on_host(nbytes: int, size: int) -> Choice:
    if nbytes <= _PIPELINE_NBYTES or size == 2:
        return Choice(Algorithm.BINOMIAL, 1, "small: fewest steps")
    return Choice(
        Algorithm.CHAIN, _pieces(nbytes), "large: pieces flow down a chain, every copy busy at once"
    )


@dataclass(frozen=True, slots=True)
class Possible:
    """What can carry a call on GPUs, besides the schedules, which always can. The same on every rank.

    Attributes:
        native: Whether NCCL's own collective does the call's dtype and operation.
        protocols: The transport's own ways for this call; see ``NcclTransport.protocols``.
        narrow: Whether results have 8 bits, so that an algorithm that rounds at every hop loses too much.
    """

    native: bool = False
    protocols: frozenset[str] = frozenset()
    narrow: bool = False


def choose_on_device(
    collective: str, nbytes: int, size: int, uneven: bool = False, possible: Possible | None = None
) -> Choice:
    """Chooses for arrays on GPUs, where nothing was measured.

    That is the ranks' own memory where it serves, else NCCL's own collective where that does.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message (of one block, where there is one a rank).
        size: Number of ranks.
        uneven: Whether the blocks differ in size.
        possible: What can carry the call; schedules alone by default.

    Example:
        >>> str(choose_on_device("allreduce", 64 << 20, 8).algorithm)
        'ring'
    """
    possible = possible or Possible()
    if possible.protocols and not uneven:
        return _in_peer_memory(collective, nbytes * (size - 1), possible.protocols)
    if possible.native:
        return Choice(Algorithm.NATIVE, 1, "NCCL's own collective does this")
    if collective == "allreduce":
        return _allreduce_on_device(nbytes, size, possible.narrow)
    if collective == "barrier":
        return Choice(Algorithm.DISSEMINATION, 1, "fewest steps")
    if collective in ("broadcast", "reduce") and size > _MOST_DIRECT:
        return Choice(Algorithm.BINOMIAL, 1, "many ranks: fewest steps")
    return Choice(Algorithm.DIRECT, 1, "one group")


def _in_peer_memory(collective: str, sent_nbytes: int, protocols: frozenset[str]) -> Choice:
    """Measured on one and two H200: ``bench/gpu_peer_memory.py``.

    Args:
        collective: Name of the collective.
        sent_nbytes: What a rank sends to all peers if it sends each the message, or a block.
        protocols: Those that can carry the call.
    """
    algorithm = Algorithm.ONE_SHOT if collective == "allreduce" else Algorithm.DIRECT
    if "peer_packets" in protocols:
        return Choice(algorithm, 1, "small: one kernel pushes packets to all peers", "peer_packets")
    if collective == "allreduce" and sent_nbytes > _PEER_ONE_SHOT_NBYTES:
        algorithm = Algorithm.TWO_SHOT
    return Choice(algorithm, 1, "one kernel in the peers' memory", "peer_memory")


def _allreduce_on_device(nbytes: int, size: int, narrow: bool) -> Choice:
    if nbytes <= ONE_SHOT_NBYTES and size <= _MOST_DIRECT:
        return Choice(Algorithm.ONE_SHOT, 1, "tiny: one group and one launch")
    if narrow and size <= _MOST_DIRECT:
        return Choice(Algorithm.TWO_SHOT, 1, "8 bits: sums are rounded once")
    if nbytes > RING_NBYTES:
        return Choice(Algorithm.RING, 1, "above 10 MB: the least traffic, to one neighbour alone")
    if size == 2:
        return Choice(Algorithm.TWO_SHOT, 1, "two ranks: each adds up one half")
    pieces = pieces_on_device("allreduce", Algorithm.DOUBLE_BINARY_TREE, nbytes)
    return Choice(Algorithm.DOUBLE_BINARY_TREE, pieces, "small or middle: few steps at full bandwidth")


def pieces_for(collective: str, algorithm: str, nbytes: int) -> int:
    """How many pieces a message is cut into for an algorithm that the caller names.

    Args:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        nbytes: Bytes of the message or block.
    """
    if mix_of(collective, algorithm) is not None:
        return 1
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
    if algorithm in (Algorithm.RING, Algorithm.NATIVE) or mix_of(collective, algorithm) is not None:
        return 1
    if not entry(collective, algorithm).pipelined:
        return 1
    return max(min(nbytes // _DEVICE_PIECE_NBYTES, _MOST_DEVICE_PIECES), 1)


def _pieces(nbytes: int) -> int:
    return max(min(-(-nbytes // _PIPELINE_NBYTES), _MOST_PIECES), 1)
