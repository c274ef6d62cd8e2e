"""Chooses by rule where nothing was measured: the same on every rank, since all see the same numbers."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from flagcx.algorithms import Algorithm, entries, entry
from flagcx.algorithms.candidate import MOST_PIECES, Candidate, Groups
from flagcx.report import duration
from flagcx.selection.candidates import Request, schedules, why_not
from flagcx.transport.network import CROSSED
from flagcx.transport.shared_memory import CROSS_MEMORY, SHARED_TAKE, SLOTS, STEP_NBYTES

if TYPE_CHECKING:
    from flagcx.cost.hosts import HostLinks
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
_CROSSES_ONCE = "within hosts first: the message crosses the network once"
MOST_MODELLED_RANKS, _MOST_MODELLED = 64, 256
"""Up to so many ranks on several hosts the model chooses; and how many of its choices are kept."""
CLEARLY = 0.9
"""The model speaks up where it sees at least a tenth less time."""
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

    Where the links were measured, the model of both levels chooses, if it sees clearly less time than that of
    the choice by rule.

    Args:
        groups: The ranks of each host.
        links: What messages take; None where that was not measured.
        shared: Whether the ranks of each host share memory.
    """

    source = "measured on these hosts"

    def __init__(self, groups: Groups, links: HostLinks | None = None, shared: bool = True) -> None:
        self._groups, self._links, self._shared = groups, links, shared
        self._order = tuple(rank for group in groups for rank in group)
        self.where = f"{len(groups)} hosts"
        self._modelled = lru_cache(_MOST_MODELLED)(self._by_model)

    def choose(self, request: Request) -> Candidate:
        """The choice by rule, or by the model where that sees clearly less time."""
        choice = choose_across_hosts(request, self._groups, self._shared)
        if self._links is None or request.uneven or not 1 < request.size <= MOST_MODELLED_RANKS:
            return choice
        # All lengths between two powers of two are chosen for alike.
        nbytes = 1 << max(request.nbytes - 1, 0).bit_length()
        better = self._modelled(request.collective, nbytes, request.size)
        return choice if better is None else better.at(request.nbytes)

    def _by_model(self, collective: str, nbytes: int, size: int) -> Candidate | None:
        request = Request(collective, nbytes, size)
        choice = choose_across_hosts(request, self._groups, self._shared)
        rivals = [one for one in serving_over_hosts(request) if not one.reason]
        times = {one: self._time_us(one, request) for one in [choice, *rivals]}
        best = min(rivals, key=times.__getitem__, default=choice)
        if times[best] > CLEARLY * times[choice]:
            return None
        reason = (
            f"by the links' measured times about {duration(times[best])}, beside {duration(times[choice])}"
        )
        return replace(best, reason=f"{reason} by {choice.name}")

    def _time_us(self, candidate: Candidate, request: Request) -> float:
        found = self.predict(candidate.along(self._order, self._groups), request)
        return math.inf if found is None else found.time_us

    def predict(self, candidate: Candidate, request: Request) -> Prediction | None:
        """What the model of both levels says; nothing where links were not measured."""
        from flagcx.cost.hosts import predict_over_hosts

        if self._links is None or not 1 < request.size <= MOST_MODELLED_RANKS:
            return None
        placed = candidate.at(request.nbytes)
        shared = self._shared
        return predict_over_hosts(
            request.collective, placed, request.nbytes, self._groups, self._links, shared=shared
        )

    def candidates(self, request: Request) -> Iterable[Candidate]:
        """All that could serve a request, settled for its size."""
        return (one.at(request.nbytes) for one in serving_over_hosts(request))

    def obstacle(self, candidate: Candidate, request: Request) -> str:
        """Why a candidate cannot serve a request; empty where it can."""
        return "" if candidate.algorithm == Algorithm.HIERARCHICAL else super().obstacle(candidate, request)

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
            reason += f"; arrays that come from comm.empty are not copied, which took {SHARED_TAKE}"
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


def serving_over_hosts(request: Request) -> list[Candidate]:
    """All that could serve a request between hosts, with the pieces that differ at its size."""
    found = schedules(request, PIECE_NBYTES)
    if any(one.grouped and one.trusted for one in entries(request.collective)):
        found.append(Candidate(Algorithm.HIERARCHICAL))
    return found


def choose_across_hosts(request: Request, groups: Groups, shared: bool = True) -> Candidate:
    """Chooses for NumPy arrays between several hosts, which have these ranks.

    Args:
        request: What is called.
        groups: The ranks of each host.
        shared: Whether the ranks of each host share memory.
    """
    collective, nbytes, *_ = request
    single = all(len(group) == 1 for group in groups)
    if collective == "barrier":
        return Candidate(Algorithm.DISSEMINATION, reason="fewest steps")
    if collective == "allreduce":
        if nbytes <= _TINY_NBYTES and single:
            return Candidate(Algorithm.RECURSIVE_DOUBLING, reason="tiny: fewest steps")
        return Candidate(Algorithm.HIERARCHICAL, reason=_CROSSES_ONCE)
    if collective in CROSSED and shared and not single:
        return Candidate(Algorithm.HIERARCHICAL, reason=_CROSSES_ONCE)
    if collective in ("broadcast", "reduce"):
        if nbytes <= _TINY_NBYTES:
            return Candidate(Algorithm.BINOMIAL, reason="tiny: fewest steps")
        reason = "pieces flow from host to host, over each link once"
        return Candidate(Algorithm.CHAIN, _pieces(nbytes), reason=reason)
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
