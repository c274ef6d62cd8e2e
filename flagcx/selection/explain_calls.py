"""Why a communicator's call runs as it does: the choice that would be made, beside all that could be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flagcx.algorithms import Algorithm, entries, entry
from flagcx.algorithms.candidate import Candidate, Order
from flagcx.cost.model import Bottleneck, Model
from flagcx.cost.peer_memory import NATIVE_WAY
from flagcx.cost.shared_memory import MOST_RANKS, predict_on_host
from flagcx.cost.simulate import message_nbytes
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import MOST_PLANNED
from flagcx.selection.explain import native_row
from flagcx.selection.explain_peers import way_row
from flagcx.selection.explanation import Explanation, Row, in_order
from flagcx.selection.measurement import PIECE_NBYTES, forms
from flagcx.selection.measurement_on_device import PIECE_NBYTES as DEVICE_PIECE_NBYTES
from flagcx.selection.on_device import DIRECT_ALGORITHMS, why_not
from flagcx.selection.predicted import mixes_for
from flagcx.selection.rules import Capabilities
from flagcx.topology.graph import Topology
from flagcx.transport.shared_memory.channel import RENDEZVOUS_NBYTES

NOT_ATTACHED = "the system does not let these processes read each other's memory"
NOT_NAMED = "registered by the user: taken only where a call names it"
_CLEARLY = 0.9
"""The model speaks up where it sees at least a tenth less time."""
GROUPED = "needs ranks in groups, such as those of several hosts"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be explained, and what would run.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        size: Number of ranks.
        choice: What would run.
        measured_us: The times of the candidates that were measured.
        note: Where these come from, or why there are none.
        where: What carries the data, in words.
    """

    collective: str
    nbytes: int
    size: int
    choice: Candidate
    measured_us: Mapping[Candidate, float]
    note: str
    where: str

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ArgumentError(f"nbytes={self.nbytes!r}; expected 0 or more")

    def row(self, candidate: Candidate, **found: object) -> Row:
        """A candidate's row; what it costs in steps and bytes by the catalogue's closed forms."""
        candidate = candidate.at(self.nbytes)
        algorithm, pieces = candidate.label, candidate.pieces
        values: dict = {"steps": 0, "sent_nbytes": 0.0, "bottleneck": None, "predicted_us": None}
        values |= {"latency_us": 0.0, "measured_us": self.measured_us.get(candidate)}
        plain = algorithm != Algorithm.NATIVE and candidate.other is None
        if plain and self.size > 1:
            known = entry(self.collective, algorithm)
            if known.allows(self.size):
                values["steps"] = known.steps(self.size, pieces)
                whole = message_nbytes(self.collective, self.size, self.nbytes)
                values["sent_nbytes"] = float(known.sent(self.size, pieces)) * whole
        return Row(
            candidate.name,
            algorithm,
            pieces,
            protocol=candidate.protocol,
            **{**values, **found},
        )

    def explanation(self, rows: Iterable[Row], doubted: bool = True) -> Explanation:
        """All rows, the one that would run first.

        Args:
            rows: The candidates.
            doubted: Whether to say so where the model would take another.
        """
        choice = self.choice
        chosen = (choice.label, choice.pieces, choice.protocol)
        ordered = in_order(list(rows))
        first = [row for row in ordered if (row.algorithm, row.pieces, row.protocol) == chosen]
        others = [row for row in ordered if row not in first]
        doubt = _doubt(first[0], others) if doubted else ""
        reason = f"{first[0].name}: {choice.reason}{doubt}."
        return Explanation(
            self.collective, self.nbytes, self.size, self.where, (*first, *others), reason, self.note
        )


def _doubt(chosen: Row, others: Sequence[Row]) -> str:
    """What the model would take, where it differs from a choice that no measurement backs."""
    if chosen.measured_us is not None or not chosen.predicted_us:
        return ""
    for row in others:
        if row.predicted_us and not row.obstacle and row.predicted_us < _CLEARLY * chosen.predicted_us:
            return f"; the model would take {row.name}, which flagcx tune would settle"
    return ""


def _excluded(asked: Asked, taken: Iterable[str]) -> Iterator[Row]:
    """The algorithms that serve the collective and are not taken at all, with the reason."""
    for known in entries(asked.collective):
        name = str(known.algorithm)
        if name in taken:
            continue
        obstacle = f"it cannot serve {asked.size} ranks; {known.restriction}"
        if not known.trusted:
            obstacle = NOT_NAMED
        elif known.allows(asked.size):
            obstacle = GROUPED if known.grouped else "it has no use here"
        yield asked.row(Candidate(name), obstacle=obstacle)


def explain_on_host(
    asked: Asked,
    protocols: Callable[[str, str, int], Collection[str]],
    attached: bool,
    cores: int | None = None,
) -> Explanation:
    """Explains a call on NumPy arrays between processes of one host.

    Args:
        asked: What, and what would run.
        protocols: ``protocols(collective, algorithm, nbytes)``: the protocols that the transport offers.
        attached: Whether ranks may read each other's private memory.
        cores: Cores that the ranks share; those of this process by default.
    """
    found = dict.fromkeys(
        replace(form.at(asked.nbytes), protocol=protocol)
        for form in forms(asked.collective, asked.nbytes, asked.size, PIECE_NBYTES)
        for protocol in protocols(asked.collective, form.algorithm, asked.nbytes) or ("",)
    )
    found.setdefault(asked.choice)
    rows = [_host_row(asked, candidate, attached, cores) for candidate in found]
    rows += _excluded(asked, {row.algorithm for row in rows})
    if not attached:
        shown = asked.row(
            replace(asked.choice, protocol="cross_memory"), measured_us=None, obstacle=NOT_ATTACHED
        )
        rows.append(shown)
    return asked.explanation(rows)


def _host_row(asked: Asked, candidate: Candidate, attached: bool, cores: int | None) -> Row:
    if not 1 < asked.size <= MOST_RANKS:
        return asked.row(candidate)
    laid = candidate
    if not candidate.protocol and attached and asked.nbytes >= RENDEZVOUS_NBYTES:
        laid = replace(candidate, protocol="cross_memory")
    what = (asked.collective, laid)
    timing, network = predict_on_host(*what, asked.nbytes, asked.size, cores=cores, attached=attached)
    latency, _ = predict_on_host(*what, 0, asked.size, cores=cores, attached=attached)
    worst = int(timing.link_busy.argmax()) if timing.link_busy.any() else None
    narrow = None
    if worst is not None:
        narrow = Bottleneck(
            *network.names[worst],
            network.kinds[worst],
            float(network.bandwidth_gb_per_s[worst]),
            float(timing.link_nbytes[worst]),
            float(timing.link_busy[worst]),
        )
    return asked.row(
        candidate,
        steps=timing.steps,
        sent_nbytes=float(timing.sent_nbytes.max(initial=0)),
        bottleneck=narrow,
        predicted_us=timing.time_us,
        latency_us=latency.time_us,
    )


def explain_between_hosts(asked: Asked) -> Explanation:
    """Explains a call on NumPy arrays between hosts, about whose network nothing is known."""
    found = dict.fromkeys(
        form.at(asked.nbytes) for form in forms(asked.collective, asked.nbytes, asked.size, PIECE_NBYTES)
    )
    found.setdefault(asked.choice)
    rows = [asked.row(candidate) for candidate in found]
    rows += _excluded(asked, {row.algorithm for row in rows})
    return asked.explanation(rows)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the ranks' GPUs are.

    Attributes:
        topology: The machine.
        gpus: The GPU of each rank.
        order: The ranks along the machine's links, or None.
    """

    topology: Topology
    gpus: Sequence[int]
    order: Order | None


def explain_on_device(
    asked: Asked, possible: Capabilities, machine: Machine | None = None, known: Iterable[str] = ()
) -> Explanation:
    """Explains a call on arrays on GPUs.

    Args:
        asked: What, and what would run.
        possible: What can carry the call.
        machine: Where the ranks' GPUs are; None where it is not known, or ranks share GPUs.
        known: Protocols that the transport has for some calls.
    """
    schedules = [
        form.at(asked.nbytes)
        for form in forms(asked.collective, asked.nbytes, asked.size, DEVICE_PIECE_NBYTES)
    ]
    protocols = sorted({protocol for _, protocol in possible.ways} | set(known))
    found = dict.fromkeys([Candidate(str(Algorithm.NATIVE)), *schedules])
    found |= dict.fromkeys(mixes_for(asked.collective, asked.size))
    found |= dict.fromkeys(
        Candidate(form.algorithm, 1, protocol)
        for form in schedules
        if form.algorithm in DIRECT_ALGORITHMS and form.pieces == 1
        for protocol in protocols
    )
    found |= dict.fromkeys(asked.measured_us)
    found.setdefault(asked.choice)
    model = None
    if machine is not None and 1 < asked.size <= MOST_PLANNED:
        model = Model(machine.topology, machine.gpus)
    rows = [_device_row(asked, candidate, possible, machine, model) for candidate in found]
    rows += _excluded(asked, {row.algorithm for row in rows})
    # What chose among the peers' memory and NCCL was the model itself; that of schedules is another.
    return asked.explanation(rows, doubted=not possible.ways)


def _device_row(
    asked: Asked, candidate: Candidate, possible: Capabilities, machine: Machine | None, model: Model | None
) -> Row:
    obstacle = why_not(candidate, asked.collective, asked.nbytes, asked.size, False, possible)
    if candidate.algorithm == Algorithm.NATIVE:
        return _native(asked, machine, possible, obstacle)
    if candidate.protocol and not obstacle:
        way = candidate.algorithm, candidate.protocol
        time_us = asked.measured_us.get(candidate)
        what = (asked.collective, asked.nbytes, asked.size, possible.reach, possible.flagged)
        return way_row(way, *what, time_us)
    if model is None or candidate.protocol or obstacle:
        return asked.row(candidate, obstacle=obstacle)
    root = 0 if COLLECTIVES[asked.collective].rooted else None
    order = None if machine is None else machine.order
    one = model.predict(asked.collective, candidate.along(order), asked.nbytes, root)
    return asked.row(
        candidate,
        steps=one.steps,
        sent_nbytes=one.sent_nbytes,
        bottleneck=one.bottleneck,
        predicted_us=one.time_us,
        latency_us=one.latency_us,
    )


def _native(asked: Asked, machine: Machine | None, possible: Capabilities, obstacle: str) -> Row:
    """NCCL's own collective; what it does inside is known of the all-reduce alone.

    Where it stands against the peers' memory, the model that compares the two says how long it takes.
    """
    own = Candidate(str(Algorithm.NATIVE))
    small = 1 < asked.size <= MOST_PLANNED
    if machine is None or asked.collective != "allreduce" or obstacle or not small:
        row = asked.row(own, obstacle=obstacle)
    else:
        measured_us = asked.measured_us.get(own)
        row = native_row(asked.nbytes, machine.topology, asked.size, machine.gpus, measured_us)
    predicted_us = possible.predict_us(NATIVE_WAY, asked.collective, asked.nbytes, asked.size)
    if predicted_us is None:
        return row
    latency_us = possible.predict_us(NATIVE_WAY, asked.collective, 0, asked.size) or 0.0
    return replace(row, predicted_us=predicted_us, latency_us=latency_us)
