"""From a schedule to an aligned one: both sides of every message in steps of the same number.

On which level a message can be is a longest path through what must come before what. What this makes is an
ordinary schedule with the same effect, to be verified like any other. It looks at the programs of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    matching, level = _message_levels(schedule)
    depth = 1 + max((end for ends in level.ends for end in ends), default=-1)
    programs = []
    for program in matching.programs:
        rank = program.rank
        transfers: list[list[tuple[int, Transfer]]] = [[] for _ in range(depth)]
        local: list[list] = [[] for _ in range(depth)]
        for s, step in enumerate(program.steps):
            for number in matching.sent[rank][s]:
                index = matching.messages[number].send_index
                transfers[level.of[number]].append((index, step.transfers[index]))
            for number in matching.received[rank][s]:
                index = matching.messages[number].recv_index
                transfers[level.of[number]].append((index, step.transfers[index]))
            if step.local:
                local[level.ends[rank][s]].extend(step.local)
        steps = (
            Step(tuple(t for _, t in sorted(at, key=lambda item: item[0])), tuple(work))
            for at, work in zip(transfers, local, strict=True)
        )
        programs.append(Program(rank, tuple(steps)))
    return replace(schedule, make=tuple(programs).__getitem__, aligned=True)


@dataclass(frozen=True, slots=True)
class _Levels:
    """Levels of messages.

    Attributes:
        of: By the message's number.
        ends: ``ends[rank][step]`` is the level on which the step has ended; its local work is done there.
    """

    of: list[int]
    ends: list[list[int]]


def _message_levels(schedule: Schedule) -> tuple[Matching, _Levels]:
    """Gives each message a level, such that the steps of every rank keep their order.

    All messages of a step come after those of the steps before it, on both ranks. Within a step, a
    send comes no later than a reduction into what it reads, and reductions into the same chunks
    keep their order. Where these wishes contradict each other, what arrives early is put aside in
    SCRATCH and reduced when the step ends.

    Returns:
        The messages of the schedule (with such changes), and their levels.

    Raises:
        ScheduleError: The schedule has unmatched messages or a deadlock.
    """
    matching = match_messages(schedule)
    order = completion_order(matching)
    found = _simple(matching, order)
    wishes = list(_wishes(schedule, matching))
    if all(found.of[first] <= found.of[second] for first, second in wishes):
        return matching, found
    levels, knots = _longest_path(matching, order, wishes)
    if levels is not None:
        return matching, levels
    return _message_levels(_put_aside(schedule, matching, knots))


def _simple(matching: Matching, order: list[tuple[int, int]]) -> _Levels:
    of = [-1] * len(matching.messages)
    ends = [[-1] * len(p.steps) for p in matching.programs]
    for rank, step in order:
        end = ends[rank][step - 1] if step else -1
        for number in matching.sent[rank][step] + matching.received[rank][step]:
            if of[number] < 0:
                m = matching.messages[number]
                a = ends[m.source][m.send_step - 1] if m.send_step else -1
                b = ends[m.target][m.recv_step - 1] if m.recv_step else -1
                of[number] = max(a, b) + 1
            end = max(end, of[number])
        if end < 0 and matching.programs[rank].steps[step].local:
            end = 0
        ends[rank][step] = end
    return _Levels(of, ends)


def _wishes(schedule: Schedule, matching: Matching) -> Iterator[tuple[int, int]]:
    """Pairs of messages of one step, of which the first must not be on a later level than the second."""
    for program in matching.programs:
        rank = program.rank
        forms: list[Cells] = []
        for s in range(len(program.steps)):
            reduced = [n for n in matching.received[rank][s] if matching.messages[n].reduces]
            if not reduced:
                continue
            forms = forms or [cells(schedule, rank, form) for form in (False, True)]
            for i, second in enumerate(reduced):
                dst = matching.messages[second].dst
                for first in matching.sent[rank][s]:
                    if _meet(matching.messages[first].src, dst, forms):
                        yield first, second
                for first in reduced[:i]:
                    if _meet(matching.messages[first].dst, dst, forms):
                        yield first, second


def _meet(one: Span, other: Span, forms: list[Cells]) -> bool:
    for place in forms:
        (a, b), (c, d) = place.range(one), place.range(other)
        if a < d and c < b:
            return True
    return False


def _longest_path(
    matching: Matching, order: list[tuple[int, int]], wishes: list[tuple[int, int]]
) -> tuple[_Levels | None, set[int]]:
    """Levels that heed the wishes; or None and the messages whose wishes contradict the order of steps."""
    import networkx

    graph = networkx.DiGraph()
    for rank, program in enumerate(matching.programs):
        for s, step in enumerate(program.steps):
            numbers = matching.sent[rank][s] + matching.received[rank][s]
            if s:
                graph.add_edge((rank, s - 1), (rank, s), weight=0)
            if step.local:
                graph.add_edge("start", (rank, s), weight=1)
            for number in numbers:
                graph.add_edge((rank, s - 1) if s else "start", number, weight=1)
                graph.add_edge(number, (rank, s), weight=0)
    graph.add_edges_from(wishes, weight=0)
    whole = networkx.condensation(graph)
    knots = set()
    for part in whole:
        members = whole.nodes[part]["members"]
        if any(not isinstance(node, int) for node in members) and len(members) > 1:
            knots |= {second for first, second in wishes if first in members and second in members}
    if knots:
        return None, knots
    level: dict = {}
    for part in networkx.topological_sort(whole):
        members = whole.nodes[part]["members"]
        before = [
            level[p] + graph.edges[p, node]["weight"]
            for node in members
            for p in graph.predecessors(node)
            if p not in members
        ]
        for node in members:
            level[node] = max(before, default=-1)
    of = [level[n] for n in range(len(matching.messages))]
    return _Levels(
        of, [[level.get((p.rank, s), -1) for s in range(len(p.steps))] for p in matching.programs]
    ), knots


def _put_aside(schedule: Schedule, matching: Matching, knots: set[int]) -> Schedule:
    """Receives into SCRATCH, and reduces at the end, in the steps in which ``knots`` arrive."""
    steps = {(matching.messages[n].target, matching.messages[n].recv_step) for n in knots}
    programs = []
    for program in matching.programs:
        changed = [
            _aside(schedule, program, step) if (program.rank, s) in steps else step
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
