"""Chooses by measured times where there are any, else by rule; on all ranks by rank 0's table.

Rank 0 alone looks for a table, and its word reaches the others with the cards that the ranks exchange at
init. So ranks choose alike whatever lies in their own files.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from flagcx.algorithms import entry
from flagcx.algorithms.candidate import Candidate
from flagcx.config import Config
from flagcx.errors import ArgumentError
from flagcx.selection.table import Fit, Table, read_table, table_path

Rule = Callable[[str, int, int, bool], Candidate]
Exchange = Callable[[bytes], list[bytes]]

NEAR = 1.5
"""Candidates within this factor of the fastest are worth another trial while a job runs."""
MOST_ALTERNATIVES = 3


@dataclass(frozen=True, slots=True)
class TuningInfo:
    """What rank 0 tells the others.

    Attributes:
        table: Its table, or None.
        note: Where the table comes from, or why there is none.
        live: Whether choices are corrected while the job runs.
        path: The file to write corrections back to; empty if to none.
    """

    table: Table | None
    note: str
    live: bool = False
    path: str = ""

    def to_bytes(self) -> bytes:
        """As text, to travel."""
        text = None if self.table is None else self.table.to_json()
        return json.dumps([text, self.note, self.live, self.path]).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> TuningInfo:
        """Back from the text."""
        text, note, live, path = json.loads(raw)
        return cls(None if text is None else Table.from_json(text), note, live, path)


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
            return _ignored(path, difference, command)
    except FileNotFoundError:
        if config.tuning_file:
            return _ignored(path, "there is no such file", command)
        return TuningInfo(None, f"not measured on this machine; {command} -n {here.ranks} would")
    except ArgumentError as error:
        return _ignored(path, str(error), command)
    live = config.live_tuning and config.profile
    # A file that the user names is his; that in the cache is ours to keep up to date.
    return TuningInfo(table, f"measured, {path}", live, str(path) if live and not config.tuning_file else "")


def _ignored(path: Path, why: str, command: str) -> TuningInfo:
    note = f"the tuning table {path} is ignored: {why}; make a new one with {command}"
    warnings.warn(note, RuntimeWarning, stacklevel=2)
    return TuningInfo(None, note)


class PiggybackExchange:
    """An exchange that takes rank 0's word along with the first values that it carries.

    Args:
        exchange: Sends bytes to all ranks and returns everybody's, in rank order.
        mine: What rank 0 tells; nothing on the other ranks.
    """

    def __init__(self, exchange: Exchange, mine: TuningInfo | None) -> None:
        self._exchange = exchange
        self._mine = b"" if mine is None else mine.to_bytes()
        self.told: TuningInfo | None = None

    def __call__(self, value: bytes) -> list[bytes]:
        """Exchanges values, as the exchange it stands for does."""
        if self.told is not None:
            return self._exchange(value)
        length = len(self._mine).to_bytes(8, "little")
        everybodys = self._exchange(length + self._mine + value)
        lengths = [int.from_bytes(raw[:8], "little") for raw in everybodys]
        self.told = TuningInfo.from_bytes(everybodys[0][8 : 8 + lengths[0]])
        return [raw[8 + length :] for raw, length in zip(everybodys, lengths, strict=True)]


class Selector:
    """Chooses for one communicator. What it was asked before it answers from memory.

    Args:
        told: What rank 0 told.
        rule: What chooses where nothing was measured.
        protocols: ``protocols(collective, algorithm, nbytes)``: the protocols that the transport offers.

    Attributes:
        note: Where the measured times come from, or why there are none.
        live: Whether choices are corrected while the job runs.
        path: The file to write corrections back to; empty if to none.
    """

    def __init__(
        self, told: TuningInfo, rule: Rule, protocols: Callable[[str, str, int], Collection[str]]
    ) -> None:
        self.table, self.note, self.live, self.path = told.table, told.note, told.live, told.path
        self._rule, self._protocols = rule, protocols
        self._made: dict[tuple[str, int, int, bool], Candidate] = {}

    def choose(self, collective: str, nbytes: int, size: int, uneven: bool = False) -> Candidate:
        """Chooses the algorithm, pieces and protocol of a call.

        Args:
            collective: Name of the collective.
            nbytes: Bytes of the message (of one block, where there is one a rank).
            size: Number of ranks.
            uneven: Whether the blocks differ in size.
        """
        key = (collective, nbytes, size, uneven)
        choice = self._made.get(key)
        if choice is None:
            if len(self._made) >= 4096:
                self._made.clear()
            choice = self._made[key] = self._choose(collective, nbytes, size, uneven)
        return choice

    def _choose(self, collective: str, nbytes: int, size: int, uneven: bool) -> Candidate:
        ranked = self.ranked(collective, nbytes, size, uneven)
        if not ranked:
            return self._rule(collective, nbytes, size, uneven)
        return self._choice(*ranked[0], nbytes)

    def alternatives(self, collective: str, nbytes: int, size: int) -> list[Candidate]:
        """The choice, then those that were measured to be nearly as fast."""
        ranked = self.ranked(collective, nbytes, size, False)
        near = [(c, t) for c, t in ranked if t <= NEAR * ranked[0][1]][: MOST_ALTERNATIVES + 1]
        return [self._choice(candidate, time_us, nbytes) for candidate, time_us in near]

    def ranked(
        self, collective: str, nbytes: int, size: int, uneven: bool = False
    ) -> list[tuple[Candidate, float]]:
        """The measured candidates that can serve a call, with their times in us; see ``Table.rank``."""
        if self.table is None:
            return []
        return self.table.rank(
            collective, nbytes, lambda candidate: self._serves(candidate, collective, nbytes, size, uneven)
        )

    def _serves(self, candidate: Candidate, collective: str, nbytes: int, size: int, uneven: bool) -> bool:
        """Whether a candidate of a file exists here, and may be used."""
        try:
            known = entry(collective, candidate.algorithm)
        except ArgumentError:
            return False
        pieces = candidate.pieces_at(nbytes)
        return (
            known.trusted
            and not known.grouped
            and known.allows(size)
            and (known.uneven or not uneven)
            and (known.pipelined or pieces == 1)
            and candidate.protocol in (self._protocols(collective, candidate.algorithm, nbytes) or ("",))
        )

    @staticmethod
    def _choice(candidate: Candidate, time_us: float, nbytes: int) -> Candidate:
        return candidate.at(nbytes, f"measured on this machine: about {time_us:.3g} us")
