"""Chooses for arrays on GPUs, alike on all ranks: by rank 0's measured times, else by rule or by its model.

Rank 0 alone looks for a measured table and at the machine. What it finds travels to all ranks as tables of
times, and every rank looks up the same numbers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from flagcx.algorithms import Algorithm
from flagcx.algorithms.candidate import Candidate, Order
from flagcx.bootstrap.store import Store
from flagcx.config import Config
from flagcx.cost.peer_memory import NVLINK, GpuLinks, reach_of
from flagcx.errors import ArgumentError, FlagcxError
from flagcx.selection.placement import gpus_of, plan_order
from flagcx.selection.predicted import modelled_table
from flagcx.selection.rules import ROUNDS_ONCE, Capabilities, choose_named, choose_on_device
from flagcx.selection.selector import TuningInfo, look_for_table
from flagcx.selection.table import Fit, Table, versions_here
from flagcx.transport.device import DeviceIdentity

if TYPE_CHECKING:
    from flagcx.topology import Topology

DIRECT_ALGORITHMS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.DIRECT)
"""The algorithms that a protocol of the transport's own may carry out, in place of NCCL."""
_MOST_CHOICES = 4096

Rule = Callable[[str, int, int, bool, Capabilities], Candidate]


class DeviceTransport(Protocol):
    """What the choice asks of a transport for arrays on GPUs."""

    name: str
    size: int

    @property
    def identities(self) -> Sequence[DeviceIdentity]:
        """Every rank's process and GPU."""

    def surroundings(self) -> Mapping[str, Mapping[str, Any]]:
        """What measured times depend on: ``machine`` and ``versions``."""


def fit_on_device(transport: DeviceTransport) -> Fit:
    """What a measured table must fit here."""
    found = transport.surroundings()
    versions = {**versions_here(), **{name: str(value) for name, value in found["versions"].items()}}
    return Fit(dict(found["machine"]), transport.size, transport.name, versions, {})


@dataclass(frozen=True, slots=True)
class SharedDecision:
    """What rank 0 found out, as all ranks have it.

    Attributes:
        measured: Its measured times, or why there are none.
        modelled: Times of schedules by the model of its machine, or None where it says nothing.
        order: The ranks along the machine's links, or None where all are equally close.
        reach: How the GPUs reach each other.
    """

    measured: TuningInfo
    modelled: Table | None = None
    order: Order | None = None
    reach: GpuLinks = NVLINK

    def to_bytes(self) -> bytes:
        """As text, to travel."""
        modelled = None if self.modelled is None else self.modelled.to_json()
        told = self.measured.to_bytes().decode()
        return json.dumps([told, modelled, self.order, astuple(self.reach)]).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> SharedDecision:
        """Back from the text."""
        measured, modelled, order, reach = json.loads(raw)
        return cls(
            TuningInfo.from_bytes(measured.encode()),
            None if modelled is None else Table.from_json(modelled),
            None if order is None else tuple(order),
            GpuLinks(*reach),
        )


def agree(
    store: Store,
    transport: DeviceTransport,
    config: Config,
    environ: Mapping[str, str],
    detect: Callable[[], Topology],
) -> SharedDecision:
    """Rank 0 looks for a table and at the machine; all ranks take its word. All must call it.

    Args:
        store: The communicator's part of the store.
        transport: What carries the arrays.
        config: Settings.
        environ: The process's environment, for the cache directory.
        detect: Looks at the machine.
    """
    found = b""
    if store.rank == 0:
        found = _look(transport, config, environ, detect).to_bytes()
    return SharedDecision.from_bytes(store.exchange("device/choices", found, config.init_timeout_s)[0])


def _look(
    transport: DeviceTransport, config: Config, environ: Mapping[str, str], detect: Callable[[], Topology]
) -> SharedDecision:
    fit = fit_on_device(transport)
    measured = look_for_table(config, fit, environ, "flagcx tune --gpu")
    one_host = len({identity.host for identity in transport.identities}) == 1
    order, modelled, reach = None, None, reach_of(transport.identities)
    if not (config.topology_detection and transport.size > 1 and one_host):
        return SharedDecision(measured, reach=reach)  # What rank 0 sees is its own host.
    with contextlib.suppress(FlagcxError):  # a machine that cannot be read has no order and no model
        topology = detect()
        bus_ids = [identity.pci_bus_id for identity in transport.identities]
        order = plan_order(topology, bus_ids)
        gpus = gpus_of(topology, bus_ids)
        if not config.deterministic:
            reach = reach_of(transport.identities, topology)
            if gpus is not None:
                modelled = modelled_table(topology, gpus, order, fit)
    return SharedDecision(measured, modelled, order, reach)


class DeviceSelector:
    """Chooses for one communicator's arrays on GPUs.

    What was measured goes before all else. Then comes the rule, which knows of NCCL's own collectives and of
    the peers' memory; where it is left with a schedule, the model may know a better one.

    Args:
        agreed: What rank 0 found out.
        rule: What chooses where nothing was measured.

    Attributes:
        note: Where the measured times come from, or why there are none.
        reach: How the GPUs reach each other.
    """

    def __init__(self, agreed: SharedDecision, rule: Rule = choose_on_device) -> None:
        self.measured, self.note = agreed.measured.table, agreed.measured.note
        self.modelled, self.reach = agreed.modelled, agreed.reach
        self._rule = rule
        self._made: dict[tuple, Candidate] = {}

    def choose(
        self, collective: str, nbytes: int, size: int, uneven: bool, possible: Capabilities
    ) -> Candidate:
        """Chooses the algorithm, pieces and protocol of a call.

        Args:
            collective: Name of the collective.
            nbytes: Bytes of the message (of one block, where there is one a rank).
            size: Number of ranks.
            uneven: Whether the blocks differ in size.
            possible: What can carry the call; the same on every rank.
        """
        key = (collective, nbytes, size, uneven, possible)
        choice = self._made.get(key)
        if choice is None:
            if len(self._made) >= _MOST_CHOICES:
                self._made.clear()
            choice = self._made[key] = self._choose(*key)
        return choice

    def _choose(
        self, collective: str, nbytes: int, size: int, uneven: bool, possible: Capabilities
    ) -> Candidate:
        ranked = self.ranked(self.measured, collective, nbytes, size, uneven, possible)
        if ranked:
            return _settled(*ranked[0], nbytes, "measured on these GPUs")
        by_rule = self._rule(collective, nbytes, size, uneven, possible)
        if by_rule.algorithm == Algorithm.NATIVE or by_rule.protocol:
            return by_rule
        ranked = self.ranked(self.modelled, collective, nbytes, size, uneven, possible)
        return _settled(*ranked[0], nbytes, "by the model of this machine") if ranked else by_rule

    def choose_named(
        self, algorithm: str, collective: str, nbytes: int, size: int, uneven: bool, possible: Capabilities
    ) -> Candidate:
        """Chooses how an algorithm that the caller names moves the data; see ``selector.choose_named``.

        Args:
            algorithm: Name of the algorithm.
            collective: Name of the collective.
            nbytes: Bytes of the message (of one block, where there is one a rank).
            size: Number of ranks.
            uneven: Whether the blocks differ in size.
            possible: What can carry the call; the same on every rank.
        """
        choice = choose_named(algorithm, collective, nbytes, size, uneven, possible)
        if not choice.protocol:
            return choice
        ranked = self.ranked(self.measured, collective, nbytes, size, uneven, possible)
        own = [c for c, _ in ranked if c.algorithm == algorithm and c.protocol]
        return replace(choice, protocol=own[0].protocol) if own else choice

    @staticmethod
    def ranked(
        table: Table | None, collective: str, nbytes: int, size: int, uneven: bool, possible: Capabilities
    ) -> list[tuple[Candidate, float]]:
        """A table's candidates that can serve a call, with their times in us; see ``Table.rank``."""
        if table is None:
            return []
        return table.rank(
            collective,
            nbytes,
            lambda candidate: not why_not(candidate, collective, nbytes, size, uneven, possible),
        )


def why_not(
    candidate: Candidate, collective: str, nbytes: int, size: int, uneven: bool, possible: Capabilities
) -> str:
    """Why a candidate cannot serve a call on GPUs; empty where it can.

    Args:
        candidate: Any, also from a file.
        collective: Name of the collective.
        nbytes: Bytes of the message or block.
        size: Number of ranks.
        uneven: Whether the blocks differ in size.
        possible: What can carry the call.
    """
    if candidate.algorithm == Algorithm.NATIVE:
        return "" if possible.native and not candidate.protocol else "NCCL's own does not do this call"
    try:
        parts = candidate.entries(collective)
    except ArgumentError as error:
        return str(error)
    if candidate.protocol and candidate.label not in DIRECT_ALGORITHMS:
        return f"{candidate.protocol} carries {', '.join(map(str, DIRECT_ALGORITHMS))} alone"
    if candidate.protocol and (candidate.label, candidate.protocol) not in possible.ways:
        return f"the transport has no {candidate.protocol} for {candidate.label} of this call"
    if candidate.protocol and uneven:
        return f"{candidate.protocol} needs blocks of one size"
    if not all(part.trusted and not part.grouped and part.allows(size) for part in parts):
        return f"{candidate.label} is not used for {size} ranks"
    if uneven and not candidate.serves_uneven(collective):
        return f"{candidate.label} needs blocks of one size"
    if candidate.pieces_at(nbytes) > 1 and not (len(parts) == 1 and parts[0].pipelined):
        return f"{candidate.label} is not pipelined"
    if possible.narrow and candidate.label not in ROUNDS_ONCE:
        return f"{candidate.label} would round 8-bit sums at every hop"
    return ""


def _settled(candidate: Candidate, time_us: float, nbytes: int, source: str) -> Candidate:
    return candidate.at(nbytes, f"{source}: about {time_us:.3g} us")
