"""From a schedule to an aligned one: both sides of every message in steps of the same number.

The result is an ordinary schedule with the same effect, to be verified like any other. All ranks' programs
are made for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.memory import Cells, cells
from flagcx.schedule.messages import Matching, completion_order, match_messages
from flagcx.schedule.model import (
    Buffer,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Span,
    Step,
    Transfer,
)


def levels(schedule: Schedule) -> Schedule:
    """Puts the two sides of every message into steps of the same number.

    Each step of the result is one group: a transport that issues all of it at once can neither hang nor
    pair the wrong messages, and two schedules on levels can be merged step by step (``beside``). A step
    whose transfers meet different steps elsewhere is split. Where that would change the operands of a
    reduction or their order, data that arrives early waits in SCRATCH and is reduced when the step ends.

    Args:
        schedule: A schedule that cannot hang.

    Returns:
        An aligned schedule; ``schedule`` itself if it is aligned already.

    Raises:
        ScheduleError: ``schedule`` has unmatched messages or a deadlock.

    Example:
        >>> levels(schedule).aligned  # doctest: +SKIP
        True
    """
    if schedule.aligned:
        return schedule
    matching = match_messages(schedule)
    level_of, ends = _levels(matching)
    early = {
        (matching.messages[second].target, matching.messages[second].recv_step)
        for first, second in _ordered(schedule, matching)
        if level_of[first] > level_of[second]
    }
    if early:
        matching = match_messages(_put_aside(schedule, matching, early))  # its messages keep their numbers
    depth = 1 + max((end for program in ends for end in program), default=-1)
    programs = []
    for program in matching.programs:
        rank = program.rank
        transfers: list[list[tuple[int, Transfer]]] = [[] for _ in range(depth)]
        local: list[list] = [[] for _ in range(depth)]
        for s, step in enumerate(program.steps):
            for number in matching.sent[rank][s]:
                index = matching.messages[number].send_index
                transfers[level_of[number]].append((index, step.transfers[index]))
            for number in matching.received[rank][s]:
                index = matching.messages[number].recv_index
                transfers[level_of[number]].append((index, step.transfers[index]))
            if step.local:
                local[ends[rank][s]].extend(step.local)
        steps = (
            Step(tuple(t for _, t in sorted(at, key=itemgetter(0))), tuple(work))
            for at, work in zip(transfers, local, strict=True)
        )
        programs.append(Program(rank, tuple(steps)))
    return replace(schedule, make=tuple(programs).__getitem__, aligned=True)


def _levels(matching: Matching) -> tuple[list[int], list[list[int]]]:
    """The first level on which each message can be, such that the steps of every rank keep their order.

    Returns:
        The level of each message, by its number; and for each rank and step the level on which the step has
        ended, at the end of which its local work is done.
    """
    level_of = [-1] * len(matching.messages)
    ends = [[-1] * len(p.steps) for p in matching.programs]
    for rank, step in completion_order(matching):
        end = ends[rank][step - 1] if step else -1
        for number in matching.sent[rank][step] + matching.received[rank][step]:
            if level_of[number] < 0:
                m = matching.messages[number]
                a = ends[m.source][m.send_step - 1] if m.send_step else -1
                b = ends[m.target][m.recv_step - 1] if m.recv_step else -1
                level_of[number] = max(a, b) + 1
            end = max(end, level_of[number])
        if end < 0 and matching.programs[rank].steps[step].local:
            end = 0
        ends[rank][step] = end
    return level_of, ends


def _ordered(schedule: Schedule, matching: Matching) -> Iterator[tuple[int, int]]:
    """Pairs of messages of one step, of which the second, a reduction, must not be on an earlier level.

    A send goes before a reduction into the span that it reads; reductions into the same chunks keep their
    order.
    """
    for program in matching.programs:
        rank = program.rank
        forms = [cells(schedule, rank, form) for form in (False, True)]
        for s in range(len(program.steps)):
            reduced = [n for n in matching.received[rank][s] if matching.messages[n].reduces]
            for i, second in enumerate(reduced):
                dst = matching.messages[second].dst
                for first in matching.sent[rank][s]:
                    if _meet(matching.messages[first].src, dst, forms):
                        yield first, second
                for first in reduced[:i]:
                    if _meet(matching.messages[first].dst, dst, forms):
                        yield first, second


def _meet(one: Span, other: Span, forms: list[Cells]) -> bool:
    """Whether two spans have memory in common, in place or not."""
    pairs = [(place.range(one), place.range(other)) for place in forms]
    return any(a < d and c < b for (a, b), (c, d) in pairs)


def _put_aside(schedule: Schedule, matching: Matching, early: set[tuple[int, int]]) -> Schedule:
    """Receives into SCRATCH, and reduces at the end, in these steps, given as (rank, step)."""
    programs = []
    for program in matching.programs:
        changed = [
            _aside(schedule, program, step) if (program.rank, s) in early else step
            for s, step in enumerate(program.steps)
        ]
        programs.append(Program(program.rank, tuple(changed)))
    return replace(schedule, make=tuple(programs).__getitem__)


def _aside(schedule: Schedule, program: Program, step: Step) -> Step:
    chunks = schedule.chunks
    layer = -(-program.scratch_chunks // chunks)
    kind = COLLECTIVES[schedule.collective]
    outputs = kind.buffer_chunks(Buffer.OUTPUT, program.rank, schedule.size, chunks, schedule.root)
    transfers: list = []
    late: list[Reduce] = []
    for t in step.transfers:
        if not isinstance(t, RecvReduce):
            transfers.append(t)
            continue
        one_block = t.dst.buffer is Buffer.OUTPUT and outputs < chunks
        first = t.dst.start + (program.rank * outputs if one_block else 0)
        length = len(t.dst)
        start = layer * chunks + first % chunks
        aside = Span(Buffer.SCRATCH, start, start + length)
        layer += -(-(first % chunks + length) // chunks)
        transfers.append(Recv(aside, t.peer))
        late.append(Reduce(aside, t.dst))
    return Step(tuple(transfers), tuple(late) + step.local)
