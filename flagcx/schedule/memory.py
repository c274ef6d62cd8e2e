"""Where the spans of one rank lie in one row of cells, so that a call in place is no special case."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Buffer, Schedule, Span


@dataclass(frozen=True, slots=True)
class Cells:
    """The memory of one rank as cells, one a chunk; INPUT and OUTPUT share cells in a call in place.

    Attributes:
        base: The first cell of each buffer, by its number.
        count: Chunks of INPUT and of OUTPUT.
    """

    base: tuple[int, int, int]
    count: tuple[int, int]

    def range(self, span: Span) -> tuple[int, int]:
        """The cells ``(start, stop)`` of a span."""
        base = self.base[span.buffer]
        return base + span.start, base + span.stop

    def shared(self) -> tuple[int, int]:
        """The cells ``(start, stop)`` that INPUT and OUTPUT share; an empty range if none."""
        start = max(self.base[0], self.base[1])
        stop = min(self.base[0] + self.count[0], self.base[1] + self.count[1])
        return start, max(start, stop)


def cells(schedule: Schedule, rank: int, in_place: bool) -> Cells:
    """Lays out the memory of ``rank``.

    Args:
        schedule: The schedule.
        rank: One of its ranks.
        in_place: Whether INPUT and OUTPUT lie over each other where the collective has such a form.
    """
    kind = COLLECTIVES[schedule.collective]
    facts = (rank, schedule.size, schedule.chunks, schedule.root)
    given = kind.buffer_chunks(Buffer.INPUT, *facts)
    result = kind.buffer_chunks(Buffer.OUTPUT, *facts)
    shift = kind.in_place_shift(*facts) if in_place else None
    if shift is None:
        return Cells((0, given, given + result), (given, result))
    over, under = shift
    return Cells((under, over, max(under + given, over + result)), (given, result))
