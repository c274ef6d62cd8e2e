"""The explanation of a choice: all candidates side by side, as text, table, HTML and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flagcx.arguments import format_nbytes
from flagcx.cost.model import Bottleneck
from flagcx.cost.simulate import message_nbytes
from flagcx.report import Report, Reported

_COLUMNS = ("candidate", "steps", "sent/rank", "busiest link", "predicted us", "measured us", "")
_MEASURED = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate.

    Attributes:
        name: The algorithm with its pieces, order, groups and what runs beside it.
        algorithm: The algorithm's name.
        pieces: Its pieces.
        steps: Steps in which messages are under way.
        sent_nbytes: Bytes that the busiest rank sends.
        bottleneck: The link that is busy longest; None where nothing is sent or it is not known.
        predicted_us: Time by the model; None where it says nothing.
        latency_us: The part of it that a message of no bytes would take.
        measured_us: Time as measured, or None.
        protocol: How the transport moves the data; empty where it has no choice, or chooses itself.
        obstacle: Why it cannot be taken; empty where it can.
    """

    name: str
    algorithm: str
    pieces: int
    steps: int
    sent_nbytes: float
    bottleneck: Bottleneck | None
    predicted_us: float | None
    latency_us: float
    measured_us: float | None = None
    protocol: str = ""
    obstacle: str = ""

    @property
    def time_us(self) -> float | None:
        """What counts: the measured time where there is one."""
        return self.predicted_us if self.measured_us is None else self.measured_us


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Reported):
    """A choice with its reasons. Prints as a table; a notebook shows it as one.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        size: Number of ranks.
        topology: Name of the topology.
        rows: The candidates: the chosen one, the others, then those that cannot be taken.
        reason: Why it is chosen, in a sentence.
        note: Where times come from, or why there are none.
    """

    collective: str
    nbytes: int
    size: int
    topology: str
    rows: tuple[Row, ...]
    reason: str
    note: str = ""

    @property
    def chosen(self) -> Row:
        """The candidate to run."""
        return self.rows[0]

    @property
    def title(self) -> str:
        """What is explained, in a line."""
        where = f" on {self.topology}" if self.topology else ""
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        block = " a block" if message_nbytes(self.collective, 2, 1) > 1 else ""
        return f"{self.collective} of {format_nbytes(self.nbytes)}{block}, {ranks}{where}"

    def report(self) -> Report:
        """The explanation as a table."""
        rows = [
            (
                row.name,
                str(row.steps) if row.steps else "-",
                format_nbytes(row.sent_nbytes) if row.steps else "-",
                _busiest(row.bottleneck),
                _time(row.predicted_us),
                _time(row.measured_us),
                self._verdict(row),
            )
            for row in self.rows
        ]
        shown = list(range(len(_COLUMNS)))
        if all(row.measured_us is None for row in self.rows):
            shown = [i for i in shown if i != _MEASURED]
        notes = [self.reason, *([f"Times: {self.note}."] if self.note else [])]
        return Report(
            self.title,
            [_COLUMNS[i] for i in shown],
            [[cells[i] for i in shown] for cells in rows],
            (0, 3, len(shown) - 1),
            notes,
            bold=(0,),
        )

    def _verdict(self, row: Row) -> str:
        if row is self.chosen:
            return "<- chosen"
        if row.obstacle:
            return f"cannot: {row.obstacle}"
        # A time by the model says nothing beside a measured one.
        alike = (row.measured_us is None) == (self.chosen.measured_us is None)
        if not (row.time_us and self.chosen.time_us and alike):
            return ""
        return f"{row.time_us / self.chosen.time_us:.2f} x"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "collective": self.collective,
            "nbytes": self.nbytes,
            "size": self.size,
            "topology": self.topology,
            "chosen": self.chosen.name,
            "algorithm": self.chosen.algorithm,
            "pieces": self.chosen.pieces,
            "protocol": self.chosen.protocol,
            "reason": self.reason,
            "note": self.note,
            "candidates": [_row_dict(row) for row in self.rows],
        }


def in_order(rows: Sequence[Row]) -> list[Row]:
    """What was measured before what was not, each the fastest first; what has no time, then obstacles."""

    def key(row: Row) -> tuple[bool, bool, bool, float]:
        return bool(row.obstacle), row.time_us is None, row.measured_us is None, row.time_us or 0.0

    return sorted(rows, key=key)


def _busiest(narrow: Bottleneck | None) -> str:
    return "-" if narrow is None else f"{narrow.a} -> {narrow.b} {narrow.busy:.0%}"


def _time(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.1f}"


def _row_dict(row: Row) -> dict[str, Any]:
    narrow = row.bottleneck
    return {
        "name": row.name,
        "algorithm": row.algorithm,
        "pieces": row.pieces,
        "steps": row.steps,
        "sent_nbytes": row.sent_nbytes,
        "predicted_us": row.predicted_us,
        "latency_us": row.latency_us,
        "measured_us": row.measured_us,
        "protocol": row.protocol,
        "obstacle": row.obstacle,
        "bottleneck": None
        if narrow is None
        else {
            "link": [narrow.a, narrow.b],
            "kind": narrow.kind,
            "bandwidth_gb_per_s": narrow.bandwidth_gb_per_s,
            "nbytes": narrow.nbytes,
            "busy": narrow.busy,
        },
    }
