"""Why an algorithm is chosen: all candidates side by side, with what the model says and what was measured."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.algorithms import Algorithm
from flagcx.errors import ArgumentError
from flagcx.selection import native
from flagcx.selection.candidates import MOST_PLANNED
from flagcx.selection.cost import DEVICE_COSTS, Bottleneck, Prediction, model_of
from flagcx.topology.graph import Topology
from flagcx.transport.timed import Costs, message_nbytes

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
        predicted_us: Time by the model.
        latency_us: The part of it that a message of no bytes would take.
        measured_us: Time as measured, or None.
    """

    name: str
    algorithm: str
    pieces: int
    steps: int
    sent_nbytes: float
    bottleneck: Bottleneck | None
    predicted_us: float
    latency_us: float
    measured_us: float | None = None

    @property
    def time_us(self) -> float:
        """What counts: the measured time where there is one."""
        return self.predicted_us if self.measured_us is None else self.measured_us


@dataclass(frozen=True, slots=True)
class Explanation:
    """A choice with its reasons. Prints as a table; a notebook shows it as one.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        size: Number of ranks.
        topology: Name of the topology.
        rows: The candidates, the chosen one first.
        reason: Why it is chosen, in a sentence.
    """

    collective: str
    nbytes: int
    size: int
    topology: str
    rows: tuple[Row, ...]
    reason: str

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

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text: a row of headings, then one a candidate."""
        table: list[tuple[str, ...]] = [_COLUMNS]
        for row in self.rows:
            table.append(
                (
                    row.name,
                    str(row.steps),
                    format_nbytes(row.sent_nbytes),
                    _busiest(row.bottleneck),
                    f"{row.predicted_us:.1f}",
                    "-" if row.measured_us is None else f"{row.measured_us:.1f}",
                    "<- chosen"
                    if row is self.chosen
                    else f"{row.time_us / self.chosen.time_us:.2f} x"
                    if self.chosen.time_us
                    else "",
                )
            )
        if all(row.measured_us is None for row in self.rows):
            table = [cells[:_MEASURED] + cells[_MEASURED + 1 :] for cells in table]
        return table

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
            "reason": self.reason,
            "candidates": [_row_dict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        left = (0, 3, len(widths) - 1)
        lines = [
            "  ".join(
                text.ljust(width) if column in left else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *lines, self.reason])

    def _repr_html_(self) -> str:
        head, *body = self.cells()
        row = "<tr>{}</tr>".format
        titles = "".join(f"<th>{html.escape(text)}</th>" for text in head)
        lines = [row("".join(f"<td>{html.escape(text)}</td>" for text in cells)) for cells in body]
        return (
            f"<p><b>{html.escape(self.title)}</b></p><table><thead>{row(titles)}</thead>"
            f"<tbody>{''.join(lines)}</tbody></table><p>{html.escape(self.reason)}</p>"
        )


def explain(
    collective: str,
    nbytes: int,
    size: int,
    topology: Topology,
    gpus: Sequence[int] | None = None,
    *,
    root: int | None = None,
    costs: Costs = DEVICE_COSTS,
    measured: Mapping[str, float] | None = None,
) -> Explanation:
    """Compares all candidates of a call and says why the best is chosen.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        size: Number of ranks.
        topology: The machine or cluster that they run on.
        gpus: The GPU of each rank; the first ``size`` by index by default.
        root: The root of a rooted collective; 0 by default.
        costs: What a call costs at its ranks.
        measured: Times in us that were measured, by the candidates' names. A candidate that was measured
            goes before all that were not.

    Raises:
        ArgumentError: There is no such collective, or ``size`` or ``nbytes`` is out of range.
        TopologyError: There are fewer GPUs than ranks, or a GPU is unknown.

    Example:
        >>> from flagcx.topology import preset
        >>> explain("allreduce", 4096, 8, preset("dgx-a100")).chosen.algorithm
        'one_shot'
    """
    if size < 1 or nbytes < 0:
        raise ArgumentError(
            f"size={size!r} ranks and nbytes={nbytes!r}; expected at least 1 rank and 0 bytes"
        )
    known = measured or {}
    found = model_of(topology, size, gpus, costs).compare(collective, nbytes, root)
    rows = [_row(one, known.get(one.candidate.name)) for one in found]
    if collective == "allreduce" and 1 < size <= MOST_PLANNED:
        rows.append(_native(nbytes, topology, size, gpus, known.get(str(Algorithm.NATIVE))))
    rows.sort(key=lambda row: (row.measured_us is None, row.time_us))
    return Explanation(collective, nbytes, size, topology.name, tuple(rows), _reason(rows))


def _row(one: Prediction, measured_us: float | None) -> Row:
    facts = one.candidate
    return Row(
        facts.name,
        str(facts.algorithm),
        facts.pieces,
        one.steps,
        one.sent_nbytes,
        one.bottleneck,
        one.time_us,
        one.latency_us,
        measured_us,
    )


def _native(
    nbytes: int, topology: Topology, size: int, gpus: Sequence[int] | None, measured_us: float | None
) -> Row:
    """NCCL's own all-reduce, which is no schedule: its time by closed forms."""
    chosen = [gpu.index for gpu in topology.gpus[:size]] if gpus is None else gpus
    found = native.ways(topology, chosen)
    at = np.array([0.0, nbytes])
    latency, time = native.predict_us(found, at, native.FITTED).tolist()
    best = min(found, key=lambda way: float(way.time_us(at, native.FITTED)[1]))
    steps = int(sum(count for _, count in best.steps))
    sent = 2 * (size - 1) / size * nbytes if best.name == "ring" else float(nbytes)
    return Row("native", str(Algorithm.NATIVE), 1, steps, sent, None, time, latency, measured_us)


def _busiest(narrow: Bottleneck | None) -> str:
    return "-" if narrow is None else f"{narrow.a} -> {narrow.b} {narrow.busy:.0%}"


def _reason(rows: Sequence[Row]) -> str:
    best = rows[0]
    if not best.steps:
        return f"{best.name}: there is nothing to send."
    steps = "1 step" if best.steps == 1 else f"{best.steps} steps"
    if best.measured_us is not None:
        text = f"{best.name} was measured to be the fastest, {best.measured_us:.1f} us"
    elif best.latency_us > 0.5 * best.predicted_us:
        text = f"{best.name}: latency decides, and its {steps} take {best.latency_us:.1f} us of it"
    elif best.bottleneck is None:
        text = f"{best.name}: bandwidth decides, and it comes nearest to what the links allow"
    else:
        text = (
            f"{best.name}: bandwidth decides, and its busiest link, {best.bottleneck}, is at work for "
            f"{best.bottleneck.busy * best.predicted_us:.1f} of {best.predicted_us:.1f} us"
        )
    others = [row for row in rows[1:] if (row.measured_us is None) == (best.measured_us is None)]
    if not others or not best.time_us:
        return f"{text}."
    return f"{text}; next comes {others[0].name} at {others[0].time_us / best.time_us:.2f} times that."


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


def format_nbytes(nbytes: float) -> str:
    """Bytes for people.

    Example:
        >>> format_nbytes(1536), format_nbytes(64 << 20)
        ('1.5 KiB', '64 MiB')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.4g} {unit}"
    return f"{nbytes:.4g} B"
