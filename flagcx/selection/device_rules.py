"""Chooses for arrays on GPUs where nothing was measured: the peers' memory, NCCL's own, or a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flagcx.algorithms import Algorithm, entry
from flagcx.algorithms.candidate import Candidate
from flagcx.cost import nccl, peer_memory
from flagcx.cost.model import Model, Prediction
from flagcx.cost.peer_memory import NATIVE, NVLINK, GpuLinks
from flagcx.errors import FlagcxError
from flagcx.kernels.peer import PEER_MEMORY, PEER_PACKETS, may_be_bare
from flagcx.report import duration
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import Request, schedules, split_messages, why_not
from flagcx.selection.placement import MOST_PLANNED, gpus_of
from flagcx.selection.predicted import PIECE_NBYTES
from flagcx.selection.rules import ONE_SHOT_NBYTES, Rules, named
from flagcx.selection.table import Table
from flagcx.transport.nccl.native import native_form

if TYPE_CHECKING:
    from flagcx.topology import Topology
    from flagcx.transport.nccl.transport import NcclTransport

DIRECT_ALGORITHMS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.DIRECT)
"""The algorithms that a protocol for the peers' memory may carry out, in place of NCCL; also those in which a
rank adds up all contributions to an element and rounds once."""
_CARRIED = (*DIRECT_ALGORITHMS, Algorithm.DISSEMINATION)
"""The algorithms in whose place a protocol may come; a dissemination carries nothing, in whatever steps."""
RING_NBYTES = 10_000_000
"""Longer messages go round a ring, where neither a measurement nor a model knows better."""
_PIECE_NBYTES = 4 << 20
_MOST_PIECES = 8
_MOST_DIRECT = 16
_WORDS = {
    "": "NCCL's own",
    PEER_PACKETS: "one kernel pushes packets to all peers",
    PEER_MEMORY: "one kernel moves the data through the peers' memory",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What can carry a call on GPUs, besides the schedules, which always can. The same on every rank.

    Attributes:
        native: Whether NCCL's own collective does the call's dtype and operation.
        peers: The algorithms that the transport can carry out without NCCL, each with a protocol.
        narrow: Whether results have 8 bits, so that an algorithm that rounds at every hop loses too much.
        flagged: Whether packets have flags, which makes them twice as long.
        links: How the GPUs reach each other.
    """

    native: bool = False
    peers: frozenset[Candidate] = frozenset()
    narrow: bool = False
    flagged: bool = False
    links: GpuLinks = NVLINK

    def fastest(self, request: Request) -> list[tuple[float, Candidate]]:
        """What goes through the peers' memory, and NCCL's own, with times in us by the model, in order."""
        found = {*self.peers, NATIVE} if self.native and self.peers else self.peers
        collective, nbytes, size, *_ = request
        times = [
            (peer_memory.predict_us(one, collective, nbytes, size, self.links, self.flagged), one)
            for one in found
        ]
        return sorted(times, key=lambda pair: (pair[0], pair[1].algorithm, pair[1].protocol))


class DeviceRules(Rules):
    """For arrays on GPUs.

    Args:
        transport: What carries the arrays.
        links: How the GPUs reach each other.
        predicted: Times of schedules by the model of rank 0's machine, or None where it says nothing.
        detect: Looks at this rank's machine for explanations; None where it must not.
    """

    source = "measured on these GPUs"
    fields = 6

    def __init__(
        self,
        transport: NcclTransport,
        links: GpuLinks = NVLINK,
        predicted: Table | None = None,
        detect: Callable[[], Topology] | None = None,
    ) -> None:
        self._transport, self.links, self.predicted, self._detect = transport, links, predicted, detect
        self._model: Model | None = None
        self._known: tuple[Request, Capabilities] | None = None

    @property
    def note(self) -> str:  # type: ignore[override]
        """Why peer memory is not used; empty where it is."""
        why = self._transport.no_peers
        return f"peer memory is not used: {why}" if why else ""

    def capabilities(self, request: Request) -> Capabilities:
        """What can carry a call; the same on all ranks."""
        if self._known is None or self._known[0] != request:
            self._known = request, self._capabilities(request)
        return self._known[1]

    def _capabilities(self, request: Request) -> Capabilities:
        collective, nbytes, _, uneven, dtype, op = request
        assert dtype is not None
        if uneven:  # Of an alltoall each rank knows its own blocks alone, and the largest counts as empty.
            nbytes = max(nbytes, 1)
        peers = frozenset(
            Candidate(algorithm, 1, protocol)
            for algorithm in _CARRIED
            for protocol in self._transport.protocols(collective, algorithm, nbytes, dtype, op)
        )
        reduces = COLLECTIVES[collective].reduces
        if uneven and not reduces:  # One kernel moves such blocks, whether they are small or large.
            peers = frozenset(one for one in peers if one.protocol == PEER_MEMORY)
        return Capabilities(
            native_form(collective, dtype, op, self._transport.nccl_version) is not None,
            peers,
            reduces and dtype.name.startswith("float8"),
            not (reduces and may_be_bare("one_shot", dtype)),
            self.links,
        )

    def choose(self, request: Request) -> Candidate:
        """By the model of peer memory or NCCL's own; where that leaves a schedule, by the machine's model."""
        possible = self.capabilities(request)
        by_rule = choose_on_device(request, possible)
        if self.predicted is None or by_rule.protocol or by_rule.algorithm == Algorithm.NATIVE:
            return by_rule
        ranked = self.predicted.rank(
            request.collective, request.nbytes, lambda one: not obstacle_on_device(one, request, possible)
        )
        if not ranked:
            return by_rule
        best, time_us = ranked[0]
        return best.at(request.nbytes, f"by the model of this machine: about {duration(time_us)}")

    def choose_named(self, algorithm: str, request: Request) -> Candidate:
        """An algorithm that the caller names goes through the peers' memory where the transport can."""
        return choose_named_on_device(algorithm, request, self.capabilities(request))

    def obstacle(self, candidate: Candidate, request: Request) -> str:
        """Why a candidate cannot serve a request; empty where it can."""
        return obstacle_on_device(candidate, request, self.capabilities(request))

    def candidates(self, request: Request) -> Iterable[Candidate]:
        """NCCL's own, the schedules, and those that protocols for the peers' memory might carry."""
        plain = [one.at(request.nbytes) for one in schedules(request, PIECE_NBYTES)]
        yield NATIVE
        yield from plain
        yield from split_messages(request.collective, request.size)
        for one in plain:
            if one.label in _CARRIED and one.pieces == 1:
                for protocol in (PEER_MEMORY, PEER_PACKETS):
                    yield Candidate(one.algorithm, 1, protocol)

    def predict(self, candidate: Candidate, request: Request) -> Prediction | None:
        """What the model of peer memory, of NCCL, or of schedules on the machine says."""
        collective, nbytes, size, *_ = request
        model = self._machine()
        if candidate == NATIVE:
            links = self.links if self.capabilities(request).peers else None
            topology, gpus = (None, None) if model is None else (model.topology, model.gpus)
            return nccl.predict(collective, nbytes, size, topology, gpus, links)
        if candidate.protocol:
            flagged = self.capabilities(request).flagged
            return peer_memory.predict(candidate, collective, nbytes, size, self.links, flagged)
        if model is None or not 1 < size <= MOST_PLANNED:
            return None
        return model.predict(collective, candidate, nbytes)

    def doubts(self, request: Request) -> bool:
        """Whether the model did not choose: among the peers' memory and NCCL, it did."""
        return not self.capabilities(request).peers

    @property
    def where(self) -> str:  # type: ignore[override]
        """The name of the machine, where it is known."""
        model = self._machine()
        return (model and model.topology.name) or "GPUs"

    def _machine(self) -> Model | None:
        """The model of the machine as this rank sees it; None where it is not known, or ranks share GPUs."""
        if self._model is None and self._detect is not None:
            detect, self._detect = self._detect, None
            identities = self._transport.identities
            if len({identity.host for identity in identities}) == 1:
                try:
                    topology = detect()
                except FlagcxError:
                    return None
                gpus = gpus_of(topology, [identity.pci_bus_id for identity in identities])
                self._model = None if gpus is None else Model(topology, gpus)
        return self._model


def choose_on_device(request: Request, possible: Capabilities | None = None) -> Candidate:
    """Chooses for arrays on GPUs, where nothing was measured.

    Where the ranks reach each other's memory, that is what ``flagcx.cost.peer_memory`` takes for the
    fastest, NCCL's own collective included; else NCCL's own where it does the call, or a schedule.

    Example:
        >>> choose_on_device(Request("allreduce", 64 << 20, 8)).algorithm
        'ring'
    """
    possible = possible or Capabilities()
    collective, nbytes, size, *_ = request
    if possible.peers:
        (time_us, best), *others = possible.fastest(request)
        reason = f"{_WORDS[best.protocol]}; by the model of peer memory about {duration(time_us)}"
        if others:
            reason += f", and the next {others[0][0] / time_us:.2f} times that"
        return best.at(nbytes, reason)
    if possible.native:
        return NATIVE.at(nbytes, "NCCL's own collective does this")
    if collective == "allreduce":
        return _allreduce_on_device(nbytes, size, possible.narrow)
    if collective == "barrier":
        return Candidate(Algorithm.DISSEMINATION, reason="fewest steps")
    if collective in ("broadcast", "reduce") and size > _MOST_DIRECT:
        return Candidate(Algorithm.BINOMIAL, reason="many ranks: fewest steps")
    return Candidate(Algorithm.DIRECT, reason="one group")


def choose_named_on_device(algorithm: str, request: Request, possible: Capabilities) -> Candidate:
    """How an algorithm that the caller names moves arrays on GPUs, where nothing was measured.

    That is the fastest of the transport's protocols for it; else sends and receives through NCCL.

    Example:
        >>> peers = frozenset(Candidate("one_shot", 1, name) for name in ("peer_memory", "peer_packets"))
        >>> request = Request("allreduce", 4096, 2)
        >>> choose_named_on_device("one_shot", request, Capabilities(peers=peers)).protocol
        'peer_packets'
    """
    for _, one in possible.fastest(request):
        if one.algorithm == algorithm and one.protocol:
            return one.at(request.nbytes, f"named by the caller; {_WORDS[one.protocol]}")
    return named(algorithm, request, pieces_on_device)


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
    reason = "small or middle: few steps at full bandwidth"
    return Candidate(Algorithm.DOUBLE_BINARY_TREE, pieces, reason=reason)


def pieces_on_device(collective: str, algorithm: str, nbytes: int) -> int:
    """How many pieces a message on a GPU is cut into, for an algorithm that the caller names.

    A step costs a group and a launch, and all blocks of a ring are under way at once as it is; only where
    the whole message travels from rank to rank do large pieces pay.
    """
    if algorithm in (Algorithm.RING, Algorithm.NATIVE) or not entry(collective, algorithm).pipelined:
        return 1
    return max(min(nbytes // _PIECE_NBYTES, _MOST_PIECES), 1)


def obstacle_on_device(candidate: Candidate, request: Request, possible: Capabilities) -> str:
    """Why a candidate, perhaps from a file, cannot serve a request on GPUs; empty where it can."""
    label, protocol = candidate.label, candidate.protocol
    if label == Algorithm.NATIVE:
        return "" if possible.native and not protocol else "NCCL's own does not do this call"
    obstacle = why_not(candidate, request)
    if protocol and label not in _CARRIED:
        obstacle = f"{protocol} carries {', '.join(map(str, _CARRIED))} alone"
    elif protocol and Candidate(label, 1, protocol) not in possible.peers:
        obstacle = f"the transport has no {protocol} for {label} of this call"
    elif not obstacle and possible.narrow and label not in DIRECT_ALGORITHMS:
        obstacle = f"{label} would round 8-bit sums at every hop"
    return obstacle
