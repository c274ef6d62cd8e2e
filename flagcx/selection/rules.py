"""Chooses by rule where nothing was measured: the same on every rank, since all see the same numbers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from flagcx.algorithms import Algorithm, entry
from flagcx.algorithms.candidate import MOST_PIECES, Candidate, Groups
from flagcx.selection.candidates import Request, schedules, why_not
from flagcx.transport.shared_memory import CROSS_MEMORY, SLOTS, STEP_NBYTES

if TYPE_CHECKING:
    from flagcx.cost.model import Prediction
    from flagcx.transport.base import Transport

ONE_SHOT_NBYTES = 64 << 10
_EXCHANGED_NBYTES = 256 << 10
"""The longest message that goes through shared memory in one exchange, and the longest block of a
reduce-scatter of two ranks."""
PIECE_NBYTES = (64 << 10, 256 << 10, 1 << 20)
"""The lengths of piece that pipelined algorithms are compared with on hosts, besides none at all."""

NOT_ATTACHED = "the system does not let these processes read each other's memory"
_PIPELINE_NBYTES = 256 << 10
_ATTACH_NBYTES = 128 << 10
_TINY_NBYTES = 4 << 10
_WORTH_SHARING_NBYTES = 1 << 20
_ATTACH_REDUCE_NBYTES = 1 << 20
_STRIPED_RANKS, _STRIPED_NBYTES = 4, 128 << 10
"""From so many ranks on, whose messages have so many bytes together; measured on 16 cores of a Xeon."""


class Rules(ABC):
    """What there is to choose from for one kind of array, and the choice where nothing was measured.

    Attributes:
        where: What carries the data, in words.
        source: Where measured times come from, in words.
        note: What else a user should know of the choices; empty if nothing.
        fields: How many fields of a request choices depend on.
    """

    where = ""
    source = "measured on this machine"
    note = ""
    fields = 4

    @abstractmethod
    def choose(self, request: Request) -> Candidate:
        """The choice where nothing was measured."""

    def choose_named(self, algorithm: str, request: Request) -> Candidate:
        """The choice where the caller names an algorithm, or two; see ``Candidate.parse``."""
        return named(algorithm, request, pieces_for)

    def obstacle(self, candidate: Candidate, request: Request) -> str:
        """Why a candidate cannot serve a request; empty where it can."""
        return why_not(candidate, request)

    def candidates(self, request: Request) -> Iterable[Candidate]:
        """All that could serve a request, settled for its size."""
        return (one.at(request.nbytes) for one in schedules(request, PIECE_NBYTES))

    def unavailable(self, choice: Candidate) -> Candidate | None:
        """What would be a choice here if the system let it."""
        return None

    def predict(self, candidate: Candidate, request: Request) -> Prediction | None:
        """What the model says of a candidate that is placed; None where it says nothing."""
        return None

    def doubts(self, request: Request) -> bool:
        """Whether a model that did not choose may say that it would choose otherwise."""
        return True


class HostRules(Rules):
    """For NumPy arrays between processes of one host.

    Args:
        transport: What carries the arrays.
        host: Name of the host.
        cores: Cores that the ranks share; those of this process by default.
    """

    def __init__(self, transport: Transport, host: str = "", cores: int | None = None) -> None:
        self._transport, self._cores = transport, cores
        self.where = f"{transport.name.replace('_', ' ')} of {host.partition('/')[0]}"

    def _protocols(self, candidate: Candidate, request: Request) -> Collection[str]:
        return self._transport.protocols(request.collective, candidate.label, request.nbytes) or ("",)

    def choose(self, request: Request) -> Candidate:
        """The choice where nothing was measured."""
        transport = self._transport
        striped = transport.modelled and request.size <= (self._cores or os.cpu_count() or 1)
        return choose_on_host(request, transport.cross_memory, striped)

    def obstacle(self, candidate: Candidate, request: Request) -> str:
        """Why a candidate cannot serve a request; empty where it can."""
        if candidate.protocol == CROSS_MEMORY and not self._transport.cross_memory:
            return NOT_ATTACHED
        obstacle = why_not(candidate, request)
        if not obstacle and candidate.protocol not in self._protocols(candidate, request):
            return f"the transport has no protocol {candidate.protocol!r} for {candidate.label} here"
        return obstacle

    def candidates(self, request: Request) -> Iterable[Candidate]:
        """All that could serve a request, each with every protocol."""
        for one in super().candidates(request):
            for protocol in self._protocols(one, request):
                yield replace(one, protocol=protocol)

    def unavailable(self, choice: Candidate) -> Candidate | None:
        """The choice by cross-memory attach, where the system does not allow it."""
        transport = self._transport
        attachable = transport.modelled and not transport.cross_memory
        return replace(choice, protocol=CROSS_MEMORY) if attachable else None

    def predict(self, candidate: Candidate, request: Request) -> Prediction | None:
        """What the model of cores and memory says, of a transport that it knows."""
        from flagcx.cost.shared_memory import MOST_RANKS, predict_on_host

        collective, nbytes, size, *_ = request
        if not self._transport.modelled or not 1 < size <= MOST_RANKS:
            return None
        attached = self._transport.cross_memory
        if not candidate.protocol and attached and nbytes >= STEP_NBYTES:
            candidate = replace(candidate, protocol=CROSS_MEMORY)
        return predict_on_host(collective, candidate, nbytes, size, cores=self._cores, attached=attached)


class MultiHostRules(Rules):
    """For NumPy arrays between hosts, where the network is far slower than memory.

    Args:
        groups: The ranks of each host.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.where = f"{len(groups)} hosts"

    def choose(self, request: Request) -> Candidate:
        """The choice: nothing is measured between hosts."""
        return choose_across_hosts(request, self._groups)

    def choose_named(self, algorithm: str, request: Request) -> Candidate:
        """The choice where the caller names an algorithm. The transport cuts hierarchies into pieces."""
        found = super().choose_named(algorithm, request)
        return replace(found, pieces=1) if found.algorithm == Algorithm.HIERARCHICAL else found


def choose_on_host(request: Request, attached: bool = True, striped: bool = False) -> Candidate:
    """Chooses for NumPy arrays on one host.

    Args:
        request: What is called.
        attached: Whether ranks read each other's private memory.
        striped: Whether every rank has a core, so that a second exchange is cheap.
    """
    collective, nbytes, size, *_ = request
    if collective == "allreduce":
        if nbytes <= ONE_SHOT_NBYTES:
            if striped and size >= _STRIPED_RANKS and nbytes * size >= _STRIPED_NBYTES:
                reason = "small, of many ranks: each rank reduces one stripe in the shared memory"
                return Candidate(Algorithm.TWO_SHOT, reason=reason)
            reason = "small: one exchange, each rank reads every rank's message"
            return Candidate(Algorithm.ONE_SHOT, reason=reason)
        reason = "large: each rank reduces one stripe in the shared memory"
        if nbytes >= _WORTH_SHARING_NBYTES:
            reason += "; arrays that come from comm.empty are not copied, which takes 0.3 to 0.6 of the time"
        return Candidate(Algorithm.TWO_SHOT, reason=reason)
    if collective == "barrier":
        return Candidate(Algorithm.DISSEMINATION, reason="fewest steps")
    if (
        collective == "broadcast"
        and attached
        and nbytes >= (_ATTACH_NBYTES if size > 2 else ONE_SHOT_NBYTES + 1)
    ):
        reason = "large: all read the root's memory at once"
        return Candidate(Algorithm.DIRECT, 1, CROSS_MEMORY, reason=reason)
    if collective == "reduce":
        return _reduce_on_host(nbytes, size, attached)
    if collective == "broadcast":
        return _broadcast_on_host(nbytes, size)
    if collective == "reduce_scatter" and size == 2 and nbytes > _EXCHANGED_NBYTES and not attached:
        reason = "two ranks: each adds up its block as it reads the other's"
        return Candidate(Algorithm.RING, reason=reason)
    return Candidate(Algorithm.DIRECT, reason="one host: every pair of ranks is one hop apart")


def _reduce_on_host(nbytes: int, size: int, attached: bool) -> Candidate:
    """Measured with 2 and 4 ranks: ``bench/tune_check.py --collectives reduce``."""
    if size == 2:
        return Candidate(Algorithm.BINOMIAL, reason="two ranks: one adds up what the other writes")
    if nbytes <= _TINY_NBYTES:
        return Candidate(Algorithm.TREE, reason="tiny: few steps, and no rank waits for more than two")
    if nbytes < _ATTACH_NBYTES:
        return Candidate(Algorithm.BINOMIAL, reason="small: fewest steps")
    protocol = (CROSS_MEMORY if nbytes >= _ATTACH_REDUCE_NBYTES else SLOTS) if attached else ""
    return Candidate(Algorithm.DOUBLE_BINARY_TREE, 1, protocol, reason="large: two trees share the adding up")


def _broadcast_on_host(nbytes: int, size: int) -> Candidate:
    if nbytes <= ONE_SHOT_NBYTES:
        return Candidate(Algorithm.DIRECT, reason="small: the root leaves it once, and all read it")
    if nbytes <= _PIPELINE_NBYTES or size == 2:
        return Candidate(Algorithm.BINOMIAL, reason="small: fewest steps")
    reason = "large: pieces flow down a chain, every copy busy at once"
    return Candidate(Algorithm.CHAIN, _pieces(nbytes), reason=reason)


def choose_across_hosts(request: Request, groups: Groups) -> Candidate:
    """Chooses for NumPy arrays between several hosts, which have these ranks."""
    collective, nbytes, *_ = request
    if collective == "barrier":
        return Candidate(Algorithm.DISSEMINATION, reason="fewest steps")
    if collective in ("broadcast", "reduce"):
        if nbytes <= _TINY_NBYTES:
            return Candidate(Algorithm.BINOMIAL, reason="tiny: fewest steps")
        reason = "pieces flow from host to host, over each link once"
        return Candidate(Algorithm.CHAIN, _pieces(nbytes), reason=reason)
    if collective == "allreduce":
        if nbytes <= _TINY_NBYTES and all(len(group) == 1 for group in groups):
            return Candidate(Algorithm.RECURSIVE_DOUBLING, reason="tiny: fewest steps")
        reason = "within hosts first: the message crosses the network once"
        return Candidate(Algorithm.HIERARCHICAL, reason=reason)
    if collective in ("allgather", "reduce_scatter") and not request.uneven:
        reason = "in the order of the hosts: each block crosses each link once"
        return Candidate(Algorithm.RING, reason=reason)
    return Candidate(Algorithm.DIRECT, reason="every block goes straight to where it belongs")


def named(algorithm: str, request: Request, pieces: Callable[[str, str, int], int]) -> Candidate:
    """The candidate that a caller names, cut as ``pieces(collective, algorithm, nbytes)`` says."""
    found = Candidate.parse(algorithm)
    cut = pieces(request.collective, found.algorithm, request.nbytes) if found.other is None else 1
    return replace(found, pieces=cut, reason="named by the caller")


def pieces_for(collective: str, algorithm: str, nbytes: int) -> int:
    """How many pieces a message on a host is cut into, for an algorithm that the caller names."""
    return _pieces(nbytes) if entry(collective, algorithm).pipelined else 1


def _pieces(nbytes: int) -> int:
    return max(min(-(-nbytes // _PIPELINE_NBYTES), MOST_PIECES), 1)
