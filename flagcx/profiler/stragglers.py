"""Stragglers: when the ranks began each call, compared on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from flagcx.profiler.records import NO_CALL, Record
from flagcx.report import Report, Reported

LATE_NS = 100_000
"""A rank that begins a call less than this after the first is not late: schedulers delay it as much."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """One rank's part in the calls that all ranks' records hold.

    Attributes:
        rank: The rank.
        calls: Calls compared.
        late: Calls in which it was the last to begin, and late.
        typical_us: How long after the first rank it then began: the median, in us.
        worst_us: The longest such time.
        caused_us: Time that all other ranks together waited for it.
    """

    rank: int
    calls: int
    late: int
    typical_us: float
    worst_us: float
    caused_us: float


@dataclass(frozen=True, slots=True, repr=False)
class StragglerReport(Reported):
    """How often each rank was late, and by how much.

    Attributes:
        ranks: One entry for each rank, the most often late first.
    """

    ranks: tuple[Lateness, ...]

    @property
    def worst(self) -> int | None:
        """The rank for which the others waited longest, or None where no rank was late."""
        worst = max(self.ranks, key=lambda entry: entry.caused_us, default=None)
        return worst.rank if worst is not None and worst.late else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"worst": self.worst, "ranks": [asdict(entry) for entry in self.ranks]}

    def report(self) -> Report:
        """The figures of every rank as a table."""
        calls = self.ranks[0].calls if self.ranks else 0
        rows = [
            (str(e.rank), str(e.late), _time(e.typical_us), _time(e.worst_us), _time(e.caused_us))
            for e in self.ranks
        ]
        columns = ("rank", "last and late", "median", "worst", "the others waited")
        bold = [place for place, e in enumerate(self.ranks) if e.rank == self.worst]
        return Report(f"late ranks in {calls} calls", columns, rows, words=(), bold=bold)

    def __str__(self) -> str:
        if not self.ranks or not self.ranks[0].calls:
            return "no call is in the records of all ranks"
        late = [entry for entry in self.ranks if entry.late]
        if not late:
            return f"no rank was late in {self.ranks[0].calls} calls"
        return "\n".join(
            f"rank {e.rank} was last in {e.late} of {e.calls} calls, by {_time(e.typical_us)} (median; at "
            f"worst {_time(e.worst_us)}); the others waited {_time(e.caused_us)} for it in all"
            for e in late
        )

    __repr__ = __str__


def find_stragglers(records: Sequence[Sequence[Record]], offsets_ns: Sequence[int]) -> StragglerReport:
    """Compares when the ranks began each call.

    Each rank has its records, and the time by which its clock is ahead of rank 0's.
    """
    late_ns: dict[int, list[int]] = {rank: [] for rank in range(len(records))}
    caused_ns = dict.fromkeys(late_ns, 0)
    calls = 0
    for starts in _common_calls(records, offsets_ns):
        calls += 1
        last = max(range(len(starts)), key=starts.__getitem__)
        if starts[last] - min(starts) >= LATE_NS:
            late_ns[last].append(starts[last] - min(starts))
            caused_ns[last] += sum(starts[last] - start for start in starts)
    entries = (
        Lateness(
            rank,
            calls,
            len(times),
            median(times) / 1e3 if times else 0.0,
            max(times, default=0) / 1e3,
            caused_ns[rank] / 1e3,
        )
        for rank, times in late_ns.items()
    )
    return StragglerReport(tuple(sorted(entries, key=lambda entry: (-entry.late, entry.rank))))


def _common_calls(records: Sequence[Sequence[Record]], offsets_ns: Sequence[int]) -> Iterator[list[int]]:
    """For each call that all ranks recorded: when each began it, on rank 0's clock."""
    by_call: list[Mapping[int, int]] = [
        {r.sequence: r.start_ns - offset for r in mine if r.sequence != NO_CALL}
        for mine, offset in zip(records, offsets_ns, strict=True)
    ]
    common = set(by_call[0]).intersection(*by_call[1:])
    for sequence in sorted(common):
        yield [starts[sequence] for starts in by_call]


def _time(time_us: float) -> str:
    return f"{time_us / 1e3:.2f} ms" if time_us >= 1e3 else f"{time_us:.0f} us"
