"""The memory of a rank, and races of transfers for it inside one step.

All spans of a rank are ranges of one row of cells, so that a call in place is no special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.messages import fault
from flagcx.schedule.model import Buffer, Program, Recv, RecvReduce, Schedule, Send, Span, Step


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
    inputs = kind.buffer_chunks(Buffer.INPUT, *facts)
    outputs = kind.buffer_chunks(Buffer.OUTPUT, *facts)
    shift = kind.in_place_shift(*facts) if in_place else None
    if shift is None:
        return Cells((0, inputs, inputs + outputs), (inputs, outputs))
    over, under = shift
    return Cells((under, over, max(under + inputs, over + outputs)), (inputs, outputs))


def check_hazards(program: Program, place: Cells, in_place: bool) -> None:
    """Checks every step of a rank's program.

    Args:
        program: The program.
        place: The rank's memory, in place or not.
        in_place: Whether the call is in place; for the message.

    Raises:
        ScheduleError: A span that a Recv lands in is touched by another transfer of its step, or the
            spans of a Copy or Reduce overlap and are not the same.
    """
    for number, step in enumerate(program.steps):
        if len(step.transfers) > 1:
            _check_transfers(program.rank, number, step, place, in_place)
        for work in step.local:
            a, b = place.range(work.src)
            c, d = place.range(work.dst)
            if a < d and c < b and a != c:
                text = f"{type(work).__name__} from {work.src} to {work.dst}, which overlap{_form(in_place)}"
                raise fault(text, program.rank, number, work.dst)


def _check_transfers(rank: int, number: int, step: Step, place: Cells, in_place: bool) -> None:
    """A Recv must not overlap any other transfer; sends and reductions may overlap each other."""
    if not any(isinstance(t, Recv) for t in step.transfers):
        return
    spans = ((*place.range(t.src if isinstance(t, Send) else t.dst), t) for t in step.transfers)
    furthest: tuple = (-1, None)  # the end of the transfer that reaches furthest so far, and of the Recv
    landing: tuple = (-1, None)
    for start, stop, transfer in sorted(spans, key=itemgetter(0)):
        lands = isinstance(transfer, Recv)
        end, other = furthest if lands else landing
        if start < end:
            pair: tuple[Any, Any] = (transfer, other) if lands else (other, transfer)
            raise _race(rank, number, *pair, in_place)
        furthest = max(furthest, (stop, transfer), key=itemgetter(0))
        if lands:
            landing = furthest


def _race(
    rank: int, number: int, recv: Recv, other: Send | Recv | RecvReduce, in_place: bool
) -> ScheduleError:
    span = other.src if isinstance(other, Send) else other.dst
    does = {"Send": "sends from", "Recv": "receives into", "RecvReduce": "reduces into"}[type(other).__name__]
    text = (
        f"a Recv from rank {recv.peer} lands in it at any time of the step, in which a "
        f"{type(other).__name__} with rank {other.peer} {does} {span}{_form(in_place)}; "
        "receive elsewhere or use another step"
    )
    return fault(text, rank, number, recv.dst)


def _form(in_place: bool) -> str:
    return " (in a call in place, where INPUT and OUTPUT share memory)" if in_place else ""
