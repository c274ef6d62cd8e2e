"""How often each operation ran and how long it took: as data, and as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from flagcx.profiler.records import Record
from flagcx.report import Report, Reported

_HEADINGS = (
    "operation",
    "bytes",
    "sent",
    "algorithm",
    "calls",
    "median us",
    "p95 us",
    "waiting",
    "queued us",
    "GB/s",
)


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """The runs of one operation with one algorithm at one size.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
        algorithm: Name of the algorithm, with its protocol where one was chosen.
        calls: Runs that the records hold.
        median_us: Time of a run, waiting included: the median, in us.
        p95_us: 95 of 100 runs took no longer.
        total_us: Time of all runs, in us.
        waiting_us: The part of it spent waiting for peers.
        moving_us: The rest: copies and sums.
        queued_us: Time that runs waited for other work of this rank: the median.
        gb_per_s: Bytes over the median time, in 10^9 bytes per second.
        sent_nbytes: Bytes that this rank sent in a run, where they were counted: in compressed calls. The
            median; None elsewhere.
    """

    collective: str
    nbytes: int
    algorithm: str
    calls: int
    median_us: float
    p95_us: float
    total_us: float
    waiting_us: float
    moving_us: float
    queued_us: float
    gb_per_s: float
    sent_nbytes: float | None = None

    @classmethod
    def of(cls, key: tuple[str, int, str], records: Sequence[Record]) -> SummaryRow:
        """Sums up the records of one operation."""
        times = sorted(r.elapsed_ns for r in records)
        middle = median(times) / 1e3
        total, waiting = sum(times) / 1e3, sum(r.waiting_ns for r in records) / 1e3
        sent = [r.sent_nbytes for r in records if r.sent_nbytes is not None]
        return cls(
            *key,
            len(times),
            middle,
            times[min(len(times) * 95 // 100, len(times) - 1)] / 1e3,
            total,
            waiting,
            total - waiting,
            median(r.queued_ns for r in records) / 1e3,
            key[1] / middle / 1e3 if middle else 0.0,
            median(sent) if sent else None,
        )

    @property
    def waiting_share(self) -> float:
        """The share of the time that was spent waiting for peers."""
        return self.waiting_us / self.total_us if self.total_us else 0.0

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return (
            self.collective,
            f"{self.nbytes:,}",
            "" if self.sent_nbytes is None else f"{self.sent_nbytes:,.0f}",
            self.algorithm,
            f"{self.calls:,}",
            f"{self.median_us:,.1f}",
            f"{self.p95_us:,.1f}",
            f"{self.waiting_share:.0%}",
            f"{self.queued_us:,.1f}",
            f"{self.gb_per_s:.2f}",
        )


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Reported):
    """The figures of one rank.

    Attributes:
        rank: The rank.
        rows: One for each operation, size and algorithm, in the order of the time that they took in all.
        hints: How calls could have been quicker.
    """

    rank: int
    rows: tuple[SummaryRow, ...]
    hints: tuple[str, ...] = ()

    @classmethod
    def of(cls, rank: int, records: Iterable[Record], hints: Iterable[str] = ()) -> Summary:
        """Groups records by operation, size and algorithm."""
        groups: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
        for record in records:
            groups[key_of(record)].append(record)
        rows = (SummaryRow.of(key, members) for key, members in groups.items())
        return cls(rank, tuple(sorted(rows, key=lambda row: -row.total_us)), tuple(hints))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        rows = [asdict(row) for row in self.rows]
        return {"rank": self.rank, "rows": rows, "hints": list(self.hints)}

    def report(self) -> Report:
        """The figures as a table."""
        return Report(f"rank {self.rank}", _HEADINGS, [row.cells() for row in self.rows], (0, 3), self.hints)


def key_of(record: Record) -> tuple[str, int, str]:
    """The group of a record: collective, bytes, algorithm with its protocol."""
    ran = record.operation
    protocol = f" ({ran.protocol})" if ran.protocol else ""
    return ran.collective, ran.nbytes, f"{ran.algorithm}{protocol}"
