"""What ran how often and how long: figures as data, as a table in a terminal and in a notebook."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import median
from typing import Any

from flagcx.profiler.records import Record

_HEADINGS = (
    "operation",
    "bytes",
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
        total_us: Time of all runs.
        waiting_us: The part of it spent waiting for peers.
        moving_us: The rest: copies and sums.
        queued_us: Time that runs waited behind other work of this rank: the median.
        gb_per_s: Bytes over the median time, in 10^9 bytes per second.
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

    @classmethod
    def of(cls, key: tuple[str, int, str], records: Sequence[Record]) -> SummaryRow:
        """Sums up the records of one operation."""
        times = sorted(r.elapsed_ns for r in records)
        middle = median(times) / 1e3
        total, waiting = sum(times) / 1e3, sum(r.waiting_ns for r in records) / 1e3
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
            self.algorithm,
            f"{self.calls:,}",
            f"{self.median_us:,.1f}",
            f"{self.p95_us:,.1f}",
            f"{self.waiting_share:.0%}",
            f"{self.queued_us:,.1f}",
            f"{self.gb_per_s:.2f}",
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one rank.

    Attributes:
        rank: The rank.
        rows: One for each operation, size and algorithm; what took longest first.
    """

    rank: int
    rows: tuple[SummaryRow, ...]

    @classmethod
    def of(cls, rank: int, records: Iterable[Record]) -> Summary:
        """Groups records by operation, size and algorithm."""
        groups: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
        for record in records:
            groups[key_of(record)].append(record)
        rows = (SummaryRow.of(key, members) for key, members in groups.items())
        return cls(rank, tuple(sorted(rows, key=lambda row: -row.total_us)))

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {"rank": self.rank, "rows": [asdict(row) for row in self.rows]}

    def __rich__(self) -> Any:
        from rich.markup import escape as plain
        from rich.table import Table

        table = Table(title=f"rank {self.rank}", title_justify="left")
        for i, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="left" if i in (0, 2) else "right")
        for row in self.rows:
            table.add_row(*(plain(cell) for cell in row.cells()))
        return table

    def __str__(self) -> str:
        rows = [_HEADINGS, *(row.cells() for row in self.rows)]
        widths = [max(len(cells[i]) for cells in rows) for i in range(len(_HEADINGS))]

        def line(cells: Sequence[str]) -> str:
            placed = (
                c.ljust(w) if i in (0, 2) else c.rjust(w)
                for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            )
            return "  ".join(placed).rstrip()

        return "\n".join([f"rank {self.rank}", *map(line, rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(r.cells(), "td") for r in self.rows)
        return f"<table><caption>rank {self.rank}</caption>{row(_HEADINGS, 'th')}{body}</table>"


def key_of(record: Record) -> tuple[str, int, str]:
    """What a record is counted under: collective, bytes, algorithm with its protocol."""
    what = record.operation
    way = f" ({what.protocol})" if what.protocol else ""
    return what.collective, what.nbytes, f"{what.algorithm}{way}"
