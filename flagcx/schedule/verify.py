"""Proof that a schedule carries out its collective: no hang, no race, every contribution once.

Five questions, in this order, each of which assumes a good answer to those before it:

1. Is every program well formed: spans inside their buffers, peers that exist, INPUT never written?
2. Is the k-th send from a to b matched by a k-th receive of b from a, chunk for chunk of one size?
3. Does every step end, if a send waits for its receive and the other way round (rendezvous)?
4. Is the result the same however the transfers of a step are timed?
5. Does a run on symbols leave in every OUTPUT the contributions of the collective, each once?
6. If asked for: do all ranks of an all-reduce compute one expression, down to the order of operands?

Since no result depends on timing (4), one run (5) in an order that can happen (3) stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.memory import Cells, cells, check_hazards
from flagcx.schedule.messages import Matching, Message, completion_order, fault, match_messages
from flagcx.schedule.model import (
    Buffer,
    Copy,
    Local,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    Span,
    Transfer,
    check_schedule,
)
from flagcx.schedule.symbolic import run

_TRANSFERS = (Send, Recv, RecvReduce)
_LOCAL = (Copy, Reduce)


def verify(
    schedule: Schedule, in_place: bool | None = None, uneven: bool = False, same_bits: bool = False
) -> None:
    """Checks that ``schedule`` can neither hang nor race nor end with a wrong result.

    Args:
        schedule: The schedule to check.
        in_place: Whether INPUT and OUTPUT lie over each other. None checks both forms.
        uneven: Whether the blocks of ranks may differ in size, as in allgatherv or alltoallv. It makes
            no difference to collectives without blocks.
        same_bits: Whether every rank must compute a sum that all ranks get by the same operations on the
            same operands, in the same order. Where only one rank gets each sum there is nothing to ask.

    Raises:
        ArgumentError: This is no schedule.
        ScheduleError: With the rank, the step and the chunk at fault, where they are known.

    Example:
        >>> verify(broken)  # doctest: +SKIP
        ScheduleError: rank 2, step 1, OUTPUT[3:4]: ends wrong: it lacks chunk 3 of rank 0
    """
    check_schedule(schedule)
    _check_facts(schedule)
    programs = tuple(schedule.programs())
    for rank, program in enumerate(programs):
        _check_program(schedule, rank, program, in_place)
    matching = match_messages(schedule, programs)
    _check_sizes(schedule, matching)
    if uneven and COLLECTIVES[schedule.collective].blocks:
        _check_uneven(schedule, matching)
    if schedule.aligned:
        check_aligned(matching)
    order = completion_order(matching)
    for form in _forms(schedule, in_place):
        places = [cells(schedule, rank, form) for rank in range(schedule.size)]
        for program, place in zip(programs, places, strict=True):
            check_hazards(program, place, form)
        run(schedule, matching, order, places, same_bits)


def _forms(schedule: Schedule, in_place: bool | None) -> Sequence[bool]:
    kind = COLLECTIVES[schedule.collective]
    facts = schedule.size, schedule.chunks, schedule.root
    overlaid = any(kind.in_place_shift(rank, *facts) is not None for rank in range(schedule.size))
    if in_place is None:
        return (False, True) if overlaid else (False,)
    return (in_place and overlaid,)


def _check_facts(schedule: Schedule) -> None:
    kind = COLLECTIVES.get(schedule.collective)
    if kind is None:
        known = ", ".join(sorted(COLLECTIVES))
        raise ScheduleError(f"unknown collective {schedule.collective!r}; it must be one of {known}")
    if schedule.size < 1 or schedule.chunks < 1:
        raise ScheduleError(
            f"a schedule needs at least one rank and one chunk, got size={schedule.size}, "
            f"chunks={schedule.chunks}"
        )
    if kind.blocks and schedule.chunks % schedule.size:
        raise ScheduleError(
            f"{kind.name} has a block for each of {schedule.size} ranks, so its chunks must be a multiple of "
            f"{schedule.size}, got {schedule.chunks}"
        )
    if kind.rooted and not (isinstance(schedule.root, int) and 0 <= schedule.root < schedule.size):
        raise ScheduleError(f"{kind.name} needs a root from 0 to {schedule.size - 1}, got {schedule.root}")
    if not kind.rooted and schedule.root is not None:
        raise ScheduleError(f"{kind.name} has no root, got root={schedule.root}; it must be None")


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of the spans of one rank's program."""

    rank: int
    size: int
    place: Cells
    writable: tuple[int, int]
    """The cells of INPUT that may be written: those that are OUTPUT too, in a call in place."""
    period: int

    def check(self, span: Span, step: int, written: bool) -> None:
        """Checks that a span lies in its buffer, and is no INPUT if it is written."""
        limit = None if span.buffer is Buffer.SCRATCH else self.place.count[span.buffer]
        if not 0 <= span.start < span.stop or (limit is not None and span.stop > limit):
            has = "any number of" if limit is None else limit
            text = f"the span is empty or leaves its buffer, which has {has} chunks here"
            raise fault(text, self.rank, step, span)
        if written and span.buffer is Buffer.INPUT:
            start, stop = self.place.range(span)
            if start < self.writable[0] or stop > self.writable[1]:
                raise fault("INPUT must not be written; write to OUTPUT or SCRATCH", self.rank, step, span)

    def check_transfer(self, transfer: Transfer, step: int) -> None:
        """Checks the peer and the span of a transfer."""
        if type(transfer) not in _TRANSFERS:
            raise fault(f"{transfer!r} is no transfer", self.rank, step)
        span = transfer.src if isinstance(transfer, Send) else transfer.dst
        if not 0 <= transfer.peer < self.size or transfer.peer == self.rank:
            text = f"peer {transfer.peer} must be another rank from 0 to {self.size - 1}"
            raise fault(text, self.rank, step, span)
        self.check(span, step, not isinstance(transfer, Send))

    def check_local(self, work: Local, step: int) -> None:
        """Checks the spans of a Copy or Reduce, and that they fit each other."""
        if type(work) not in _LOCAL:
            raise fault(f"{work!r} is no local work", self.rank, step)
        self.check(work.src, step, False)
        self.check(work.dst, step, True)
        if len(work.src) != len(work.dst) or (work.src.start - work.dst.start) % self.period:
            text = f"{type(work).__name__} from {work.src}: {_MISFIT}"
            raise fault(text, self.rank, step, work.dst)


def _check_program(schedule: Schedule, rank: int, program: Program, in_place: bool | None) -> None:
    if program.rank != rank:
        raise fault(f"make({rank}) returned the program of rank {program.rank}", rank)
    place = cells(schedule, rank, in_place=True)
    period = COLLECTIVES[schedule.collective].per_block(schedule.size, schedule.chunks)
    limits = _Limits(rank, schedule.size, place, place.shared() if in_place else (0, 0), period)
    for number, step in enumerate(program.steps):
        for transfer in step.transfers:
            limits.check_transfer(transfer, number)
        for work in step.local:
            limits.check_local(work, number)


_MISFIT = (
    "both spans must have the same length and begin with the same chunk of the message (of a block, where "
    "there are blocks), because chunks of different number may differ by an element in size"
)


def _check_sizes(schedule: Schedule, matching: Matching) -> None:
    period = COLLECTIVES[schedule.collective].per_block(schedule.size, schedule.chunks)
    for m in matching.messages:
        if (m.src.start - m.dst.start) % period:
            raise _mismatch(m, _MISFIT)


def _mismatch(m: Message, why: str) -> ScheduleError:
    text = f"sends to rank {m.target}, which receives it as {m.dst} in its step {m.recv_step}: {why}"
    return fault(text, m.source, m.send_step, m.src)


def check_aligned(matching: Matching) -> None:
    """Checks the assertion ``Schedule.aligned``.

    Raises:
        ScheduleError: A message is sent and received in steps of different number, or programs differ
            in their number of steps.
    """
    for m in matching.messages:
        if m.send_step != m.recv_step:
            text = (
                f"the schedule says it is aligned, but rank {m.target} receives this message in its step "
                f"{m.recv_step}; make both steps the same or set aligned=False"
            )
            raise fault(text, m.source, m.send_step, m.src)
    steps = len(matching.programs[0].steps)
    for program in matching.programs:
        if len(program.steps) != steps:
            text = (
                f"the schedule says it is aligned, but this program has {len(program.steps)} steps and that "
                f"of rank 0 has {steps}; add empty steps or set aligned=False"
            )
            raise fault(text, program.rank)


_UNEVEN = "these are chunks of different blocks, which differ in size when blocks are uneven"


def _check_uneven(schedule: Schedule, matching: Matching) -> None:
    for m in matching.messages:
        if _block(schedule, m.source, m.src) != _block(schedule, m.target, m.dst):
            raise _mismatch(m, _UNEVEN)
    for program in matching.programs:
        for number, step in enumerate(program.steps):
            for work in step.local:
                if _block(schedule, program.rank, work.src) != _block(schedule, program.rank, work.dst):
                    text = f"{type(work).__name__} from {work.src}: {_UNEVEN}"
                    raise fault(text, program.rank, number, work.dst)


def _block(schedule: Schedule, rank: int, span: Span) -> tuple[int, int]:
    """The block that a span begins in, as (source, target); one of the two where a block has one rank."""
    kind, size = COLLECTIVES[schedule.collective], schedule.size
    is_input = span.buffer is Buffer.INPUT
    where = {Buffer.INPUT: kind.before, Buffer.OUTPUT: kind.after}.get(span.buffer)
    block = rank if where == "each" else span.start // (schedule.chunks // size) % size
    if schedule.collective != "alltoall":
        return block, block
    return (rank, block) if is_input else (block, rank)
