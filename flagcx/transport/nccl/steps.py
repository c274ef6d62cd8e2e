"""One rank's program in elements of device memory: what is sent and received, then what is computed.

Nothing here touches a GPU, so that what is launched can be checked, and run with NumPy, anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flagcx.kernels.fuse import Chain, Finish, Phase, Place, Update, forward, fuse, overlap
from flagcx.schedule.collectives import COLLECTIVES, ChunkLayout
from flagcx.schedule.model import Buffer, Copy, RecvReduce, Send, Span, Step
from flagcx.transport.base import Call

GIVEN, RESULT, SCRATCH, SCALED = range(4)
"""Memories of a plan: the caller's INPUT and OUTPUT, the plan's SCRATCH and a scaled copy of INPUT.

What arrives and waits to be reduced lies behind the SCRATCH of the schedule, in the same memory.
"""


@dataclass(frozen=True, slots=True)
class Move:
    """One send or receive of ``count`` elements, which is not 0."""

    sends: bool
    at: Place
    count: int
    peer: int


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A group of moves that run concurrently, then launches in order."""

    moves: tuple[Move, ...]
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """What one rank enqueues for one call.

    Attributes:
        steps: In order; those with nothing to do are left out.
        scratch_count: Elements of SCRATCH, with those behind it for what arrives.
        scaled_count: Elements of SCALED.
        factor: What ``Finish`` multiplies or divides by.
    """

    steps: tuple[DeviceStep, ...]
    scratch_count: int
    scaled_count: int
    factor: float


@dataclass(frozen=True, slots=True)
class _Map:
    """Where the chunks of the schedule's buffers lie in the plan's memories."""

    layout: ChunkLayout
    starts: tuple[Place, Place, Place]

    def place(self, span: Span) -> tuple[Place, int]:
        start, stop = self.layout.slice(span)
        memory, offset = self.starts[span.buffer]
        return (memory, offset + start), stop - start


def device_program(call: Call) -> DeviceProgram:
    """Works out what one rank enqueues.

    Args:
        call: The call; its schedule is run as it stands, so lower it before.
    """
    steps, where, used = _undivided(call)
    if call.op is not None and call.op.average and where.layout.count(Buffer.OUTPUT):
        _divide(steps, call, where)
    own_copy = where.layout.count(Buffer.INPUT) if where.starts[Buffer.INPUT][0] == SCALED else 0
    return DeviceProgram(tuple(steps), used, own_copy, _factor(call))


def _undivided(call: Call) -> tuple[list[DeviceStep], _Map, int]:
    """The steps before a division by the number of ranks, the map, and the elements of SCRATCH."""
    program = call.program()
    layout = call.layout(program)
    scales = call.op is not None and call.op.scale is not None and layout.count(Buffer.INPUT) > 0
    where = _Map(layout, _starts(call, layout, scales))
    free = used = layout.count(Buffer.SCRATCH)
    pack = max(1, 16 // call.dtype.numpy.itemsize)
    steps = [_scaling(where)] if scales else []
    for step in program.steps:
        done, end = _step(step, where, free, pack)
        used = max(used, end)
        if done.moves or done.phases:
            steps.append(done)
    return _forwarded(steps), where, used


def _forwarded(steps: list[DeviceStep]) -> list[DeviceStep]:
    """Sums that are made in SCRATCH and copied once are made where they go to."""
    read: list[tuple[Place, int]] = []

    def is_dead(place: Place, count: int) -> bool:
        return place[0] == SCRATCH and not any(overlap(place, p, count, n) for p, n in read)

    result = []
    for step in reversed(steps):
        phases = forward(step.phases, is_dead)
        read += [(m.at, m.count) for m in step.moves if m.sends]
        read += [(source, c.count) for phase in phases for c in phase for source in c.sources]
        result.append(replace(step, phases=phases))
    return result[::-1]


def _factor(call: Call) -> float:
    if call.op is None or call.op.scale is None:
        return float(call.schedule.size)
    return call.op.scale


def _starts(call: Call, layout: ChunkLayout, scales: bool) -> tuple[Place, Place, Place]:
    s = call.schedule
    shift = COLLECTIVES[s.collective].in_place_shift(call.rank, s.size, s.chunks, s.root)
    if not call.in_place or shift is None:
        return (SCALED if scales else GIVEN, 0), (RESULT, 0), (SCRATCH, 0)
    apart = layout.bounds[Buffer.OUTPUT][shift[1]] - layout.bounds[Buffer.INPUT][shift[0]]
    if layout.count(Buffer.INPUT) > layout.count(Buffer.OUTPUT):
        return (GIVEN, 0), (GIVEN, -apart), (SCRATCH, 0)
    return (RESULT, apart), (RESULT, 0), (SCRATCH, 0)


def _scaling(where: _Map) -> DeviceStep:
    """The contribution times the factor: into memory of the plan's own, or in place."""
    to = where.starts[Buffer.INPUT]
    source = (GIVEN, 0) if to[0] == SCALED else to
    chain = Chain(to, where.layout.count(Buffer.INPUT), (source,), Finish.SCALE)
    return DeviceStep((), ((chain,),))


def _step(step: Step, where: _Map, free: int, pack: int) -> tuple[DeviceStep, int]:
    """One step, and the end of the memory that it uses; ``free`` is where it may put what arrives."""
    moves, work = [], []
    for transfer in step.transfers:
        at, count = where.place(transfer.src if isinstance(transfer, Send) else transfer.dst)
        if isinstance(transfer, RecvReduce):
            # As far from a multiple of 16 bytes as its destination, so that whole packs are added.
            arrives = free + (at[1] - free) % pack
            work.append(Update(at, (SCRATCH, arrives), count, reduces=True))
            at, free = (SCRATCH, arrives), arrives + count
        if count:
            moves.append(Move(isinstance(transfer, Send), at, count, transfer.peer))
    for local in step.local:
        to, count = where.place(local.dst)
        source, _ = where.place(local.src)
        work.append(Update(to, source, count, reduces=not isinstance(local, Copy)))
    return DeviceStep(tuple(moves), fuse(work)), free


def _divide(steps: list[DeviceStep], call: Call, where: _Map) -> None:
    """Adds the division by the number of ranks, to the last launch where that makes the result.

    If one rank divided a float32 accumulator and another one what it received, rounded, their results
    would differ; so with a wider accumulator all ranks must be able to, or none does.
    """
    everywhere = call.dtype.accumulate is None or all(
        _ends_with_result(*_undivided(replace(call, rank=rank))[:2]) for rank in range(call.schedule.size)
    )
    if everywhere and _ends_with_result(steps, where):
        *before, last = steps[-1].phases
        divided = tuple(replace(c, finish=Finish.DIVIDE) for c in last)
        steps[-1] = replace(steps[-1], phases=(*before, divided))
        return
    whole = where.starts[Buffer.OUTPUT]
    chain = Chain(whole, where.layout.count(Buffer.OUTPUT), (whole,), Finish.DIVIDE)
    steps.append(DeviceStep((), ((chain,),)))


def _ends_with_result(steps: list[DeviceStep], where: _Map) -> bool:
    """Whether the last launch makes all of the rank's OUTPUT, if it has one, and nothing else."""
    count = where.layout.count(Buffer.OUTPUT)
    if not count:
        return True
    last = steps[-1].phases[-1] if steps and steps[-1].phases else ()
    memory, start = where.starts[Buffer.OUTPUT]
    inside = all(c.to[0] == memory and start <= c.to[1] <= start + count - c.count for c in last)
    return inside and sum(c.count for c in last) == count
