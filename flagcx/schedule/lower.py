"""Schedule to schedule: other steps, the same effect.

``levels`` makes any schedule aligned, so that each step can be one group of grouped sends and receives;
``merge_spans``, ``merge_steps`` and ``drop_empty_steps`` make fewer and larger operations of many. What
they return is an ordinary schedule, to be verified like any other. All of them look at every program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flagcx.schedule.leveling import message_levels
from flagcx.schedule.memory import cells
from flagcx.schedule.messages import wire
from flagcx.schedule.model import (
    Program,
    Recv,
    RecvReduce,
    Schedule,
    Send,
    Span,
    Step,
    Transfer,
)


def with_programs(schedule: Schedule, programs: Iterable[Program], aligned: bool) -> Schedule:
    """``schedule`` with these programs."""
    return replace(schedule, make=tuple(programs).__getitem__, aligned=aligned)


def levels(schedule: Schedule) -> Schedule:
    """Puts the two sides of every message into steps of the same number.

    Each step of the result is one group: a transport that issues all of it at once can neither hang nor
    pair the wrong messages, and two schedules on levels can be merged step by step (``beside``). A step
    whose transfers meet different steps elsewhere is split; its transfers keep their order, and what
    they read and reduce into does not change.

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
    wiring, level = message_levels(schedule)
    depth = 1 + max(
        (end for ends in level.ends for end in ends),
        default=-1,
    )
    programs = []
    for program in wiring.programs:
        rank = program.rank
        transfers: list[list[tuple[int, Transfer]]] = [[] for _ in range(depth)]
        local: list[list] = [[] for _ in range(depth)]
        for s, step in enumerate(program.steps):
            for number in wiring.sent[rank][s]:
                index = wiring.messages[number].send_index
                transfers[level.of[number]].append((index, step.transfers[index]))
            for number in wiring.received[rank][s]:
                index = wiring.messages[number].recv_index
                transfers[level.of[number]].append((index, step.transfers[index]))
            if step.local:
                local[level.ends[rank][s]].extend(step.local)
        steps = (
            Step(tuple(t for _, t in sorted(at, key=lambda item: item[0])), tuple(work))
            for at, work in zip(transfers, local, strict=True)
        )
        programs.append(Program(rank, tuple(steps)))
    return with_programs(schedule, programs, aligned=True)


def drop_empty_steps(schedule: Schedule) -> Schedule:
    """Leaves out steps in which nothing happens: on any rank if the schedule is aligned, else on one."""
    programs = tuple(schedule.programs())
    if schedule.aligned:
        busy = [
            any(s.transfers or s.local for s in at) for at in zip(*(p.steps for p in programs), strict=True)
        ]
        kept = (Program(p.rank, tuple(s for s, b in zip(p.steps, busy, strict=True) if b)) for p in programs)
    else:
        kept = (Program(p.rank, tuple(s for s in p.steps if s.transfers or s.local)) for p in programs)
    return with_programs(schedule, kept, schedule.aligned)


def merge_spans(schedule: Schedule) -> Schedule:
    """Makes one message of messages between two ranks that lie side by side at both ends.

    They must be in the same step at both ends and follow each other between these ranks. Composition
    cuts spans where blocks may lie apart; this joins what does lie together.
    """
    wiring = wire(schedule)
    steps: list[list[list[Transfer | None]]] = [[list(s.transfers) for s in p.steps] for p in wiring.programs]
    last = None
    for m in wiring.messages:  # in order for each pair of ranks
        joined = None
        if (
            last is not None
            and _side_by_side(last, m)
            and _order_allows(steps[m.target][m.recv_step], last, m)
        ):
            src = Span(m.src.buffer, last.src.start, m.src.stop)
            dst = Span(m.dst.buffer, last.dst.start, m.dst.stop)
            joined = last._replace(src=src, dst=dst)
            sending, receiving = steps[m.source][m.send_step], steps[m.target][m.recv_step]
            sending[m.send_index] = receiving[m.recv_index] = None
            sending[last.send_index] = Send(src, m.target)
            receiving[last.recv_index] = (RecvReduce if m.reduces else Recv)(dst, m.source)
        last = joined or m
    programs = (
        Program(
            p.rank,
            tuple(
                Step(tuple(t for t in transfers if t is not None), step.local)
                for transfers, step in zip(steps[p.rank], p.steps, strict=True)
            ),
        )
        for p in wiring.programs
    )
    return with_programs(schedule, programs, schedule.aligned)


def _side_by_side(a, b) -> bool:
    return (
        (a.source, a.target, a.send_step, a.recv_step, a.reduces)
        == (b.source, b.target, b.send_step, b.recv_step, b.reduces)
        and (a.src.buffer, a.src.stop) == (b.src.buffer, b.src.start)
        and (a.dst.buffer, a.dst.stop) == (b.dst.buffer, b.dst.start)
    )


def _order_allows(transfers: Sequence[Transfer | None], a, b) -> bool:
    """Whether b may be reduced where a is in the list, with no other reduction of the same chunks between."""
    if not b.reduces:
        return True
    between = transfers[a.recv_index + 1 : b.recv_index]
    return not any(isinstance(t, RecvReduce) and t.dst.overlaps(b.dst) for t in between)


def merge_steps(schedule: Schedule) -> Schedule:
    """Makes one step of two that follow each other, where on no rank the second needs the first.

    Args:
        schedule: A schedule; it is put on levels first.

    Returns:
        An aligned schedule with as many steps or fewer.
    """
    schedule = levels(schedule)
    programs = tuple(schedule.programs())
    places = [[cells(schedule, rank, form) for form in (False, True)] for rank in range(schedule.size)]
    merged: list[list[Step]] = []
    for at in zip(*(p.steps for p in programs), strict=True):
        fits = bool(merged) and all(
            _independent(first, second, place)
            for first, second, forms in zip(merged[-1], at, places, strict=True)
            for place in forms
        )
        if fits:
            pairs = zip(merged[-1], at, strict=True)
            merged[-1] = [Step(a.transfers + b.transfers, a.local + b.local) for a, b in pairs]
        else:
            merged.append(list(at))
    kept = (Program(p.rank, tuple(at[p.rank] for at in merged)) for p in programs)
    return with_programs(schedule, kept, aligned=True)


def _independent(first: Step, second: Step, place) -> bool:
    """Whether the transfers of ``second`` may run along with those of ``first``, before its local work."""

    def ranges(spans: Iterable[Span]) -> list[tuple[int, int]]:
        return [place.range(s) for s in spans]

    def apart(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
        return not any(a < d and c < b for a, b in some for c, d in others)

    def of(step: Step, kind: type) -> list[tuple[int, int]]:
        return ranges(t.src if isinstance(t, Send) else t.dst for t in step.transfers if type(t) is kind)

    landed, reduced = of(first, Recv), of(first, RecvReduce)
    written = ranges(w.dst for w in first.local)
    worked = written + ranges(w.src for w in first.local)
    landing, reducing = of(second, Recv), of(second, RecvReduce)
    return (
        apart(of(second, Send), landed + reduced + written)
        and apart(landing, of(first, Send) + landed + reduced + worked)
        and apart(reducing, landed + worked)
    )
