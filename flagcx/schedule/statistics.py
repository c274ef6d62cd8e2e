"""What a schedule costs, counted: steps, messages, chunks sent."""

from __future__ import annotations

from flagcx.schedule.lower import levels
from flagcx.schedule.model import Program, RecvReduce, Reduce, Schedule, Send


def steps(schedule: Schedule) -> int:
    """Steps in which at least one message is under way, with all sides of a message in one step.

    It is the number of latencies that the schedule's time has, if all messages of a step run at once.

    Raises:
        ScheduleError: The schedule has unmatched messages or a deadlock.

    Example:
        >>> steps(ring_allreduce(8))  # doctest: +SKIP
        14
    """
    busy: set[int] = set()
    for program in levels(schedule).programs():
        busy.update(number for number, step in enumerate(program.steps) if step.transfers)
    return len(busy)


def sent_chunks(schedule: Schedule, rank: int) -> int:
    """Chunks that ``rank`` sends, counted each time; of ``schedule.chunks`` in a message."""
    return _transferred(schedule.program(rank), True)


def received_chunks(schedule: Schedule, rank: int) -> int:
    """Chunks that ``rank`` receives, counted each time."""
    return _transferred(schedule.program(rank), False)


def reduced_chunks(schedule: Schedule, rank: int) -> int:
    """Chunks that ``rank`` reduces into others, on arrival or locally."""
    count = 0
    for step in schedule.program(rank).steps:
        count += sum(len(t.dst) for t in step.transfers if isinstance(t, RecvReduce))
        count += sum(len(w.dst) for w in step.local if isinstance(w, Reduce))
    return count


def messages_sent(schedule: Schedule, rank: int) -> int:
    """Messages that ``rank`` sends."""
    return sum(isinstance(t, Send) for step in schedule.program(rank).steps for t in step.transfers)


def links(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Chunks sent over each ordered pair of ranks that exchange any: ``{(source, target): chunks}``."""
    load: dict[tuple[int, int], int] = {}
    for program in schedule.programs():
        for step in program.steps:
            for t in step.transfers:
                if isinstance(t, Send):
                    pair = program.rank, t.peer
                    load[pair] = load.get(pair, 0) + len(t.src)
    return load


def _transferred(program: Program, sends: bool) -> int:
    count = 0
    for step in program.steps:
        for t in step.transfers:
            if isinstance(t, Send):
                count += len(t.src) if sends else 0
            elif not sends:
                count += len(t.dst)
    return count
