"""Chooses by measured times where there are any, else by rule or model; on all ranks by rank 0's findings.

Rank 0 alone looks for tables and at the machine, and the others take its word: for arrays of the host with
the values that the ranks exchange at init, for arrays on GPUs at the first call with one. So ranks choose
alike whatever lies in their own files.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagcx.algorithms.candidate import Candidate, Groups, Order
from flagcx.config import Config
from flagcx.dtypes import flushes_subnormals
from flagcx.errors import ArgumentError, FlagcxError
from flagcx.report import duration
from flagcx.selection.candidates import Request
from flagcx.selection.rules import Rules
from flagcx.selection.table import WIDEST_TIE, Fit, Ranked, Table, read_table, table_path, versions_here

if TYPE_CHECKING:
    from flagcx.bootstrap.store import Store
    from flagcx.cost.peer_memory import GpuLinks
    from flagcx.selection.explain import Explanation
    from flagcx.topology import Topology
    from flagcx.transport.nccl.transport import NcclTransport

Exchange = Callable[[bytes], list[bytes]]

WORTH_A_TRIAL = 1.5
"""Candidates within this factor of the fastest are worth another trial while a job runs."""
MOST_ALTERNATIVES = 3
_MOST_CHOICES = 4096
_MEASURED = "measured, "


@dataclass(frozen=True, slots=True)
class TuningInfo:
    """What rank 0 found out and tells the others.

    Attributes:
        table: Its measured times, or None.
        note: Where these come from, or why there are none.
        live: Whether choices are corrected while the job runs.
        path: The file to write corrections back to; empty if to none.
        order: The ranks along the machine's links, for rings and trees; None where all are equally close.
        predicted: Times of schedules on GPUs by the model of its machine, or None where it says nothing.
        links: How the ranks' GPUs reach each other, or None where there are none.
    """

    table: Table | None = None
    note: str = ""
    live: bool = False
    path: str = ""
    order: Order | None = None
    predicted: Table | None = None
    links: GpuLinks | None = None

    def to_bytes(self) -> bytes:
        """As text, to travel."""
        tables = [table and table.to_json() for table in (self.table, self.predicted)]
        links = self.links and astuple(self.links)
        return json.dumps([*tables, self.note, self.live, self.path, self.order, links]).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> TuningInfo:
        """Back from the text."""
        *texts, note, live, path, order, links = json.loads(raw)
        table, predicted = (text and Table.from_json(text) for text in texts)
        if links is not None:
            from flagcx.cost.peer_memory import GpuLinks

            links = GpuLinks(*links)
        return cls(table, note, live, path, order and tuple(order), predicted, links)


class Selector:
    """Chooses for one communicator and one kind of array. A request that came before is looked up.

    Args:
        rules: What there is to choose from, and the choice where nothing was measured.
        tuning: What rank 0 found out.
        groups: The ranks of each host, for hierarchies; None for the algorithm's default.

    Attributes:
        table: The measured times, or None.
        note: Where the measured times come from, or why there are none.
        live: Whether choices are corrected while the job runs.
        path: The file to write corrections back to; empty if to none.
        order: The ranks along the machine's links; None where all are equally close.
    """

    def __init__(self, rules: Rules, tuning: TuningInfo | None = None, groups: Groups | None = None) -> None:
        tuning = tuning or TuningInfo()
        self.table, self.note, self.live, self.path = tuning.table, tuning.note, tuning.live, tuning.path
        self.rules, self.order, self.groups = rules, tuning.order, groups
        self._fields = rules.fields
        self._made: dict[tuple, Candidate] = {}

    def choose(self, request: Request) -> Candidate:
        """Chooses the algorithm, pieces and protocol of a call, along the machine's links."""
        key = request[: self._fields]
        try:
            return self._made[key]
        except KeyError:
            if len(self._made) >= _MOST_CHOICES:
                self._made.clear()
        choice = self._made[key] = self._choose(request).along(self.order, self.groups)
        return choice

    def _choose(self, request: Request) -> Candidate:
        ranked = self.ranked(request, 1 + WIDEST_TIE)
        return self._settled(*ranked[0], request) if ranked else self.rules.choose(request)

    def _settled(self, candidate: Candidate, time_us: float, request: Request) -> Candidate:
        return candidate.at(request.nbytes, f"{self.rules.source}: about {duration(time_us)}")

    def choose_named(self, algorithm: str, request: Request) -> Candidate:
        """Chooses pieces and protocol for an algorithm that the caller names.

        Raises:
            ArgumentError: The algorithm does not serve the collective.
        """
        choice = self.rules.choose_named(algorithm, request)
        if choice.protocol:
            ranked = (one for one, _ in self.ranked(request) if one.algorithm == algorithm and one.protocol)
            choice = replace(choice, protocol=next(ranked, choice).protocol)
        return choice.along(self.order, self.groups)

    def alternatives(self, request: Request) -> list[Candidate]:
        """The choice, then the candidates that were measured to be nearly as fast."""
        near = self.ranked(request, WORTH_A_TRIAL)[: MOST_ALTERNATIVES + 1]
        return [self._settled(*pair, request).along(self.order, self.groups) for pair in near]

    def ranked(self, request: Request, within: float = math.inf) -> list[Ranked]:
        """The measured candidates that can serve a request, with their times in us; see ``Table.rank``."""
        if self.table is None:
            return []
        obstacle = self.rules.obstacle
        return self.table.rank(
            request.collective, request.nbytes, lambda one: not obstacle(one, request), within
        )

    def explain(self, request: Request) -> Explanation:
        """Says what would carry a call, why, and what each candidate would cost.

        Raises:
            ArgumentError: ``nbytes`` is negative.
        """
        from flagcx.selection.explain import explain_call

        times = {} if self.table is None else self.table.times(request.collective, max(request.nbytes, 1))
        notes = [note for note in (self.note, self.rules.note) if note]
        place = (self.order, self.groups)
        return explain_call(request, self._choose(request), self.rules, times, "; ".join(notes), place)


# -- rank 0's findings -----------------------------------------------------------------------------


def look_for_table(
    config: Config, here: Fit, environ: Mapping[str, str], command: str = "flagcx tune"
) -> TuningInfo:
    """Finds the table that fits; one that is there and is of no use is a warning, never an error.

    Args:
        config: Settings.
        here: What the table must fit.
        environ: The process's environment, for the cache directory.
        command: What makes such a table.
    """
    if config.deterministic:
        return TuningInfo(None, "deterministic: the rule alone chooses")
    if not config.tuning:
        return TuningInfo(None, "tuning is switched off")
    path = Path(config.tuning_file) if config.tuning_file else table_path(here, environ)
    try:
        table = read_table(path)
        if config.tuning_file and table.fit.transport != here.transport:
            # One setting for two kinds of array: the file may be meant for the other.
            return TuningInfo(
                None, f"{path} was measured with {table.fit.transport}, this is {here.transport}"
            )
        if difference := table.fit.difference(here):
            return ignored(str(path), difference, command)
    except FileNotFoundError:
        if config.tuning_file:
            return ignored(str(path), "there is no such file", command)
        if here.hosts:
            return TuningInfo(
                None, f"not measured on these hosts; {command} would, where it is started as these ranks are"
            )
        return TuningInfo(None, f"not measured on this machine; {command} -n {here.ranks} would")
    except ArgumentError as error:
        return ignored(str(path), str(error), command)
    # Trials compare the clocks of all ranks, which are not one clock on several hosts.
    live = config.live_tuning and config.profile and not here.hosts
    # A file that the user names is the user's own; that in the cache is ours to keep up to date.
    return TuningInfo(table, f"{_MEASURED}{path}", live, str(path) if live and not config.tuning_file else "")


def ignored(path: str, why: str, command: str = "flagcx tune", warns: bool = True) -> TuningInfo:
    """What is left of a table that is of no use here: the reason.

    Args:
        path: Its file.
        why: The reason.
        command: What makes such a table.
        warns: Whether this rank warns the user.
    """
    note = f"the tuning table {path} is ignored: {why}; make a new one with {command}"
    if warns:
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    return TuningInfo(None, note)


def fitting(found: TuningInfo, hosts: Mapping[str, object], warns: bool) -> TuningInfo:
    """What rank 0 told, without its table where the hosts, or the links between them, are others.

    Args:
        found: What rank 0 told.
        hosts: The hosts; see ``Fit.hosts``.
        warns: Whether this rank warns the user.
    """
    assert found.table is not None
    fit = found.table.fit
    why = fit.difference(replace(fit, hosts=hosts))
    if not why:
        return found
    return replace(ignored(found.note.removeprefix(_MEASURED), why, warns=warns), order=found.order)


class PiggybackExchange:
    """An exchange that carries rank 0's findings and all ranks' floating-point modes with the first values.

    Args:
        exchange: Sends bytes to all ranks and returns every rank's, in rank order.
        mine: What rank 0 tells; None on the other ranks.

    Attributes:
        told: What rank 0 told; None until values were exchanged.
        flushes: For each rank, whether it flushes subnormal numbers to zero.
    """

    def __init__(self, exchange: Exchange, mine: TuningInfo | None) -> None:
        self._exchange = exchange
        self._mine = b"" if mine is None else mine.to_bytes()
        self.told: TuningInfo | None = None
        self.flushes: list[bool] = []

    def __call__(self, value: bytes) -> list[bytes]:
        """Exchanges values, as the exchange it stands for does."""
        if self.told is not None:
            return self._exchange(value)
        # The highest bit of the length is the mode.
        length = (len(self._mine) | flushes_subnormals() << 63).to_bytes(8, "little")
        every_rank = self._exchange(length + self._mine + value)
        words = [int.from_bytes(raw[:8], "little") for raw in every_rank]
        self.flushes = [bool(word >> 63) for word in words]
        lengths = [word & ~(1 << 63) for word in words]
        self.told = TuningInfo.from_bytes(every_rank[0][8 : 8 + lengths[0]])
        return [raw[8 + length :] for raw, length in zip(every_rank, lengths, strict=True)]


def device_selector(
    store: Store,
    transport: NcclTransport,
    config: Config,
    environ: Mapping[str, str],
    detect: Callable[[], Topology],
) -> Selector:
    """The selector for arrays on GPUs, by what rank 0 finds out. All ranks must call it.

    Args:
        store: The communicator's part of the store.
        transport: What carries the arrays.
        config: Settings.
        environ: The process's environment, for the cache directory.
        detect: Looks at the machine.
    """
    from flagcx.cost.peer_memory import NVLINK
    from flagcx.selection.device_rules import DeviceRules

    found = agree(store, transport, config, environ, detect)
    looks = detect if config.topology_detection else None
    return Selector(DeviceRules(transport, found.links or NVLINK, found.predicted, looks), found)


def agree(
    store: Store,
    transport: NcclTransport,
    config: Config,
    environ: Mapping[str, str],
    detect: Callable[[], Topology],
) -> TuningInfo:
    """Rank 0 looks for a table and at the machine; all ranks take its word. See ``device_selector``."""
    found = b""
    if store.rank == 0:
        found = _look(transport, config, environ, detect).to_bytes()
    return TuningInfo.from_bytes(store.exchange("device/choices", found, config.init_timeout_s)[0])


def _look(
    transport: NcclTransport, config: Config, environ: Mapping[str, str], detect: Callable[[], Topology]
) -> TuningInfo:
    from flagcx.cost.peer_memory import links_of
    from flagcx.selection.placement import gpus_of, plan_order
    from flagcx.selection.predicted import predicted_table

    identities = transport.identities
    fit = fit_on_device(transport)
    found = replace(look_for_table(config, fit, environ, "flagcx tune --gpu"), links=links_of(identities))
    one_host = len({identity.host for identity in identities}) == 1
    if not (config.topology_detection and transport.size > 1 and one_host):
        return found  # What rank 0 sees is its own host.
    with contextlib.suppress(FlagcxError):  # a machine that cannot be read has no order and no model
        topology = detect()
        bus_ids = [identity.pci_bus_id for identity in identities]
        found = replace(found, order=plan_order(topology, bus_ids))
        if not config.deterministic:
            distinct = gpus_of(topology, list(dict.fromkeys(bus_ids)))
            found = replace(found, links=links_of(identities, topology, distinct))
            gpus = gpus_of(topology, bus_ids)
            if gpus is not None:
                found = replace(found, predicted=predicted_table(topology, gpus, found.order, fit))
    return found


def fit_on_device(transport: NcclTransport) -> Fit:
    """What a measured table must fit here."""
    found = transport.surroundings()
    versions = {**versions_here(), **{name: str(value) for name, value in found["versions"].items()}}
    return Fit(dict(found["machine"]), transport.size, transport.name, versions, {})
