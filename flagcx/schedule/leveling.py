"""On which level each message of a schedule can be: a longest path through what must come before what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.memory import Cells, cells
from flagcx.schedule.messages import Wiring, completion_order, wire
from flagcx.schedule.model import Buffer, Program, Recv, RecvReduce, Reduce, Schedule, Span, Step


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of messages.

    Attributes:
        of: By the message's number.
        ends: ``ends[rank][step]`` is the level on which the step has ended; its local work is done there.
    """

    of: list[int]
    ends: list[list[int]]


def message_levels(schedule: Schedule) -> tuple[Wiring, Levels]:
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
    wiring = wire(schedule)
    order = completion_order(wiring)
    found = _simple(wiring, order)
    wishes = list(_wishes(schedule, wiring))
    if all(found.of[first] <= found.of[second] for first, second in wishes):
        return wiring, found
    levels, knots = _longest_path(wiring, order, wishes)
    if levels is not None:
        return wiring, levels
    return message_levels(_put_aside(schedule, wiring, knots))


def _simple(wiring: Wiring, order: list[tuple[int, int]]) -> Levels:
    of = [-1] * len(wiring.messages)
    ends = [[-1] * len(p.steps) for p in wiring.programs]
    for rank, step in order:
        end = ends[rank][step - 1] if step else -1
        for number in wiring.sent[rank][step] + wiring.received[rank][step]:
            if of[number] < 0:
                m = wiring.messages[number]
                a = ends[m.source][m.send_step - 1] if m.send_step else -1
                b = ends[m.target][m.recv_step - 1] if m.recv_step else -1
                of[number] = max(a, b) + 1
            end = max(end, of[number])
        if end < 0 and wiring.programs[rank].steps[step].local:
            end = 0
        ends[rank][step] = end
    return Levels(of, ends)


def _wishes(schedule: Schedule, wiring: Wiring) -> Iterator[tuple[int, int]]:
    """Pairs of messages of one step, of which the first must not be on a later level than the second."""
    for program in wiring.programs:
        rank = program.rank
        forms: list[Cells] = []
        for s in range(len(program.steps)):
            reduced = [n for n in wiring.received[rank][s] if wiring.messages[n].reduces]
            if not reduced:
                continue
            forms = forms or [cells(schedule, rank, form) for form in (False, True)]
            for i, second in enumerate(reduced):
                dst = wiring.messages[second].dst
                for first in wiring.sent[rank][s]:
                    if _meet(wiring.messages[first].src, dst, forms):
                        yield first, second
                for first in reduced[:i]:
                    if _meet(wiring.messages[first].dst, dst, forms):
                        yield first, second


def _meet(one: Span, other: Span, forms: list[Cells]) -> bool:
    for place in forms:
        (a, b), (c, d) = place.range(one), place.range(other)
        if a < d and c < b:
            return True
    return False


def _longest_path(
    wiring: Wiring, order: list[tuple[int, int]], wishes: list[tuple[int, int]]
) -> tuple[Levels | None, set[int]]:
    """Levels that heed the wishes; or None and the messages whose wishes contradict the order of steps."""
    import networkx

    graph = networkx.DiGraph()
    for rank, program in enumerate(wiring.programs):
        for s, step in enumerate(program.steps):
            numbers = wiring.sent[rank][s] + wiring.received[rank][s]
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
    of = [level[n] for n in range(len(wiring.messages))]
    return Levels(
        of, [[level.get((p.rank, s), -1) for s in range(len(p.steps))] for p in wiring.programs]
    ), knots


def _put_aside(schedule: Schedule, wiring: Wiring, knots: set[int]) -> Schedule:
    """Receives into SCRATCH, and reduces at the end, in the steps in which ``knots`` arrive."""
    steps = {(wiring.messages[n].target, wiring.messages[n].recv_step) for n in knots}
    programs = []
    for program in wiring.programs:
        changed = [
            _aside(schedule, program, step) if (program.rank, s) in steps else step
            for s, step in enumerate(program.steps)
        ]
        programs.append(Program(program.rank, tuple(changed)))
    return Schedule(
        schedule.collective,
        schedule.algorithm,
        schedule.size,
        schedule.chunks,
        tuple(programs).__getitem__,
        schedule.root,
    )


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
