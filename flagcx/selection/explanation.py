"""An explanation of a choice: its candidates side by side, as a table, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flagcx.arguments import format_nbytes
from flagcx.cost.model import LinkLoad
from flagcx.cost.simulate import message_nbytes
from flagcx.report import Report, Reported

PLAIN = "Predicted: the GPU's time in a CUDA graph's replay. A plain call of {}, with launch: {:.1f} us."
NAMED_ONLY = "registered by the user: taken where a call names it"
PHASES = "The phases of hierarchical follow each other on a rank; NCCL's own are pipelined."
_COLUMNS = ("candidate", "steps", "sent/rank", "busiest link", "predicted us", "measured us", "")
_MEASURED = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate.

    Attributes:
        name: The candidate's name.
        algorithm: The algorithm as a call names it.
        pieces: Its pieces.
        steps: Steps in which messages are under way.
        sent_nbytes: Bytes that the busiest rank sends.
        bottleneck: The link that is busy longest; None where nothing is sent or it is not known.
        predicted_us: Time by the model; None where it says nothing. On GPUs, the GPU's time of a call that a
            CUDA graph replays.
        low_us: p10 of it: a tenth of the times of other machines were shorter; None where not known.
        high_us: p90 of it.
        plain_us: Time of a call that the host launches; None where not known.
        latency_us: The part of it that a message of no bytes would take.
        measured_us: Time as measured, or None.
        protocol: How the transport moves the data; empty where it has no choice, or chooses itself.
        obstacle: Why it cannot be taken; empty where it can.
        named_only: Whether it is taken only where a call names it: an algorithm of the user's own.
    """

    name: str
    algorithm: str
    pieces: int
    steps: int = 0
    sent_nbytes: float = 0.0
    bottleneck: LinkLoad | None = None
    predicted_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    plain_us: float | None = None
    latency_us: float = 0.0
    measured_us: float | None = None
    protocol: str = ""
    obstacle: str = ""
    named_only: bool = False

    @property
    def time_us(self) -> float | None:
        """What counts: the measured time where there is one."""
        return self.predicted_us if self.measured_us is None else self.measured_us

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        values = asdict(self)
        narrow = values.pop("bottleneck")
        if narrow is not None:
            narrow = {"link": [narrow.pop("a"), narrow.pop("b")], **narrow}
        return {**values, "bottleneck": narrow}


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
        rows = []
        for row in self.rows:
            narrow, sent = row.bottleneck, format_nbytes(row.sent_nbytes)
            link = "-" if narrow is None else f"{narrow.a} -> {narrow.b} {narrow.busy:.0%}"
            steps = (str(row.steps), sent) if row.steps else ("-", "-")
            predicted, measured = (
                "-" if us is None else f"{us:.1f}" for us in (row.predicted_us, row.measured_us)
            )
            rows.append((row.name, *steps, link, predicted, measured, self._verdict(row)))
        notes = [self.reason, *([f"Times: {self.note}."] if self.note else [])]
        stepwise = not self.note  # where hosts' links were measured, the transport pipelines the levels
        if stepwise and any(row.name.startswith("hierarchical") and row.predicted_us for row in self.rows):
            notes.append(PHASES)
        notes += self._intervals()
        notes += [PLAIN.format(row.name, row.plain_us) for row in self.rows if row.plain_us]
        if any(row.measured_us is not None for row in self.rows):
            return Report(self.title, _COLUMNS, rows, (0, 3, 6), notes, bold=(0,))
        unmeasured = [cells[:_MEASURED] + cells[_MEASURED + 1 :] for cells in (_COLUMNS, *rows)]
        return Report(self.title, unmeasured[0], unmeasured[1:], (0, 3, 5), notes, bold=(0,))

    def _intervals(self) -> list[str]:
        """Between how many times the prediction 80% of times lie, for rows of equal intervals together."""
        names: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.low_us is not None and row.high_us is not None and row.predicted_us:
                low, high = row.low_us / row.predicted_us, row.high_us / row.predicted_us
                names.setdefault((f"{low:.2f}", f"{high:.2f}"), []).append(row.name)
        most = max(map(len, names.values()), default=0)
        parts = [
            f"{low} to {high} times {'the others' if len(own) == most > 2 else ' and '.join(own)}"
            for (low, high), own in sorted(names.items(), key=lambda item: len(item[1]))
        ]
        return [f"Likely (p10 to p90): {', '.join(parts)}."] if parts else []

    def _verdict(self, row: Row) -> str:
        if row is self.chosen:
            return "<- chosen"
        if row.obstacle:
            return f"cannot: {row.obstacle}"
        # A time by the model says nothing beside a measured one.
        alike = (row.measured_us is None) == (self.chosen.measured_us is None)
        known = row.time_us and self.chosen.time_us and alike
        words = [f"{(row.time_us or 0) / (self.chosen.time_us or 1):.2f} x"] if known else []
        return "; ".join([*words, *([NAMED_ONLY] if row.named_only else [])])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        chosen = self.chosen
        return {
            **{name: getattr(self, name) for name in ("collective", "nbytes", "size", "topology")},
            "chosen": chosen.name,
            **{name: getattr(chosen, name) for name in ("algorithm", "pieces", "protocol")},
            "reason": self.reason,
            "note": self.note,
            "candidates": [row.to_dict() for row in self.rows],
        }


def in_order(rows: Sequence[Row]) -> list[Row]:
    """What was measured before what was not, each the fastest first; what has no time, then obstacles.

    Algorithms of the user's own come after all that may be chosen.
    """

    def key(row: Row) -> tuple[bool, bool, bool, bool, float]:
        untimed = row.time_us is None
        return bool(row.obstacle), row.named_only, untimed, row.measured_us is None, row.time_us or 0.0

    return sorted(rows, key=key)
