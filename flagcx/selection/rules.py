"""Chooses the algorithm of a call by rule: the same on every rank, since all see the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flagcx.algorithms import Algorithm, entry
from flagcx.algorithms.candidate import MOST_PIECES, Candidate
from flagcx.cost.peer_memory import NATIVE_WAY, NVLINK, GpuLinks, Way, predict_us

ONE_SHOT_NBYTES = 64 << 10
_PIPELINE_NBYTES = 256 << 10
_ATTACH_NBYTES = 128 << 10
_TINY_REDUCE_NBYTES = 4 << 10
_ATTACH_REDUCE_NBYTES = 1 << 20
_DEVICE_PIECE_NBYTES = 4 << 20
_MOST_DEVICE_PIECES = 8
_MOST_DIRECT = 16
_WORDS = {
    "": "NCCL's own",
    "peer_packets": "one kernel pushes packets to all peers",
    "peer_memory": "one kernel moves chunks through the peers' memory",
}
RING_NBYTES = 10_000_000
"""On GPUs longer messages go round a ring, where neither a measurement nor a model knows better."""
ROUNDS_ONCE = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.DIRECT)
"""The algorithms in which a rank adds up all contributions to an element and rounds once."""


def choose_on_host(
    collective: str, nbytes: int, size: int, uneven: bool = False, attached: bool = True
) -> Candidate:
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
            return Candidate(
                Algorithm.ONE_SHOT, reason="small: one exchange, each rank reads everybody's message"
            )
        return Candidate(
            Algorithm.TWO_SHOT, reason="large: each rank reduces one stripe in the shared memory"
        )
    if collective == "barrier":
        return Candidate(Algorithm.DISSEMINATION, reason="fewest steps")
    if collective == "broadcast" and attached and size > 2 and nbytes >= _ATTACH_NBYTES:
        return Candidate(
            Algorithm.DIRECT, 1, "cross_memory", reason="large: all read the root's memory at once"
        )
    if collective == "reduce":
        return _reduce_on_host(nbytes, size, attached)
    if collective == "broadcast":
        return _broadcast_on_host(nbytes, size)
    if collective == "reduce_scatter" and size == 2 and 2 * nbytes > ONE_SHOT_NBYTES:
        return Candidate(Algorithm.RING, reason="two ranks: each adds up its block as it reads the other's")
    return Candidate(Algorithm.DIRECT, reason="one host: every pair of ranks is one hop apart")


def _reduce_on_host(nbytes: int, size: int, attached: bool) -> Candidate:
    """Measured with 2 and 4 ranks: ``bench/tune_check.py --collectives reduce``."""
    if size == 2:
        way = "slots" if attached and nbytes >= _PIPELINE_NBYTES else ""
        return Candidate(Algorithm.BINOMIAL, 1, way, reason="two ranks: one adds up what the other writes")
    if nbytes <= _TINY_REDUCE_NBYTES:
        return Candidate(Algorithm.TREE, reason="tiny: few steps, and no rank waits for more than two")
    if nbytes < _ATTACH_NBYTES:
        return Candidate(Algorithm.BINOMIAL, reason="small: fewest steps")
    way = ("cross_memory" if nbytes >= _ATTACH_REDUCE_NBYTES else "slots") if attached else ""
    return Candidate(Algorithm.DOUBLE_BINARY_TREE, 1, way, reason="large: two trees share the adding up")


def _broadcast_on_host(nbytes: int, size: int) -> Candidate:
    if nbytes <= _PIPELINE_NBYTES or size == 2:
        return Candidate(Algorithm.BINOMIAL, reason="small: fewest steps")
    return Candidate(
        Algorithm.CHAIN, _pieces(nbytes), reason="large: pieces flow down a chain, every copy busy at once"
    )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What can carry a call on GPUs, besides the schedules, which always can. The same on every rank.

    Attributes:
        native: Whether NCCL's own collective does the call's dtype and operation.
        ways: The algorithms that the transport can carry out without NCCL, each with a protocol; see
            ``NcclTransport.protocols``.
        narrow: Whether results have 8 bits, so that an algorithm that rounds at every hop loses too much.
        flagged: Whether packets have flags, which makes them twice as long.
        reach: How the GPUs reach each other.
    """

    native: bool = False
    ways: frozenset[Way] = frozenset()
    narrow: bool = False
    flagged: bool = False
    reach: GpuLinks = NVLINK

    def predict_us(self, way: Way, collective: str, nbytes: int, size: int) -> float | None:
        """What the model of peer memory says of a way, in us; None where the call has no such way.

        It speaks of NCCL's own too, as far as the two are to be compared.
        """
        if way in self.ways or (way == NATIVE_WAY and self.native and self.ways):
            return predict_us(way, collective, nbytes, size, self.reach, self.flagged)
        return None

    def fastest(self, collective: str, nbytes: int, size: int) -> list[tuple[float, Way]]:
        """The ways that the model knows with their times in us, the fastest first."""
        found = [(self.predict_us(way, collective, nbytes, size), way) for way in {*self.ways, NATIVE_WAY}]
        return sorted((time_us, way) for time_us, way in found if time_us is not None)


def choose_on_device(
    collective: str, nbytes: int, size: int, uneven: bool = False, possible: Capabilities | None = None
) -> Candidate:
    """Chooses for arrays on GPUs, where nothing was measured.

    Where the ranks reach each other's memory, that is what ``flagcx.cost.peer_memory`` takes for the
    fastest, NCCL's own collective included; else NCCL's own where it does the call.

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
    possible = possible or Capabilities()
    if possible.ways and not uneven:
        return _in_peer_memory(collective, nbytes, size, possible)
    if possible.native:
        return Candidate(Algorithm.NATIVE, reason="NCCL's own collective does this")
    if collective == "allreduce":
        return _allreduce_on_device(nbytes, size, possible.narrow)
    if collective == "barrier":
        return Candidate(Algorithm.DISSEMINATION, reason="fewest steps")
    if collective in ("broadcast", "reduce") and size > _MOST_DIRECT:
        return Candidate(Algorithm.BINOMIAL, reason="many ranks: fewest steps")
    return Candidate(Algorithm.DIRECT, reason="one group")


def _in_peer_memory(collective: str, nbytes: int, size: int, possible: Capabilities) -> Candidate:
    """The fastest by the model."""
    ranked = possible.fastest(collective, nbytes, size)
    time_us, (algorithm, protocol) = ranked[0]
    reason = f"{_WORDS[protocol]}; by the model of peer memory about {time_us:.3g} us"
    if len(ranked) > 1:
        reason += f", {ranked[1][0] / time_us:.2f} times that the next way"
    return Candidate(algorithm, 1, protocol, reason=reason)


def choose_named(
    algorithm: str,
    collective: str,
    nbytes: int,
    size: int,
    uneven: bool,
    possible: Capabilities,
) -> Candidate:
    """How an algorithm that the caller names moves arrays on GPUs, where nothing was measured.

    That is the fastest of the transport's ways for it; sends and receives through NCCL where it has none.

    Args:
        algorithm: Name of the algorithm.
        collective: Name of the collective.
        nbytes: Bytes of the message (of one block, where there is one a rank).
        size: Number of ranks.
        uneven: Whether the blocks differ in size.
        possible: What can carry the call.

    Example:
        >>> ways = frozenset({("one_shot", "peer_memory"), ("one_shot", "peer_packets")})
        >>> choose_named("one_shot", "allreduce", 4096, 2, False, Capabilities(ways=ways)).protocol
        'peer_packets'
    """
    if not uneven:
        for _, (name, protocol) in possible.fastest(collective, nbytes, size):
            if name == algorithm and protocol:
                return Candidate(algorithm, 1, protocol, reason=f"named by the caller; {_WORDS[protocol]}")
    return _named(collective, algorithm, nbytes, pieces_on_device)


def _allreduce_on_device(nbytes: int, size: int, narrow: bool) -> Candidate:
    if nbytes <= ONE_SHOT_NBYTES and size <= _MOST_DIRECT:
        return Candidate(Algorithm.ONE_SHOT, reason="tiny: one group and one launch")
    if narrow and size <= _MOST_DIRECT:
        return Candidate(Algorithm.TWO_SHOT, reason="8 bits: sums are rounded once")
    if nbytes > RING_NBYTES:
        return Candidate(Algorithm.RING, reason="above 10 MB: the least traffic, to one neighbour alone")
    if size == 2:
        return Candidate(Algorithm.TWO_SHOT, reason="two ranks: each adds up one half")
    pieces = pieces_on_device("allreduce", Algorithm.DOUBLE_BINARY_TREE, nbytes)
    return Candidate(
        Algorithm.DOUBLE_BINARY_TREE, pieces, reason="small or middle: few steps at full bandwidth"
    )


def choose_named_on_host(collective: str, algorithm: str, nbytes: int) -> Candidate:
    """How an algorithm that the caller names carries NumPy arrays."""
    return _named(collective, algorithm, nbytes, pieces_for)


def _named(collective: str, algorithm: str, nbytes: int, pieces: Callable[[str, str, int], int]) -> Candidate:
    found = Candidate.parse(collective, algorithm)
    cut = 1 if found.other is not None else pieces(collective, algorithm, nbytes)
    return replace(found, pieces=cut, reason="named by the caller")


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
    if algorithm in (Algorithm.RING, Algorithm.NATIVE) or not entry(collective, algorithm).pipelined:
        return 1
    return max(min(nbytes // _DEVICE_PIECE_NBYTES, _MOST_DEVICE_PIECES), 1)


def _pieces(nbytes: int) -> int:
    return max(min(-(-nbytes // _PIPELINE_NBYTES), MOST_PIECES), 1)
