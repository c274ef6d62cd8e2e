"""Lowers one rank's program to device memory: for each step, sends and receives, then kernel launches.

Nothing here touches a GPU, so a program can be checked, and run with NumPy, on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flagcx.kernels.fuse import Chain, Finish, Phase, Place, Update, forward, fuse, overlap
from flagcx.schedule.collectives import COLLECTIVES, ChunkLayout
from flagcx.schedule.model import Buffer, Copy, RecvReduce, Send, Span, Step
from flagcx.transport.base import Call

SENDBUF, RECVBUF, SCRATCH, SCALED = range(4)
"""Memories of a plan: the caller's INPUT and OUTPUT, the plan's SCRATCH and a scaled copy of INPUT.

Data that was received and is still to be reduced follows the schedule's SCRATCH in the same memory.
"""


@dataclass(frozen=True, slots=True)
class SendRecv:
    """One send or receive of ``count`` elements, which is not 0."""

    sends: bool
    at: Place
    count: int
    peer: int


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Sends and receives that run concurrently, then phases in order."""

    messages: tuple[SendRecv, ...]
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """What one rank enqueues for one call.

    Attributes:
        steps: In order; those with nothing to do are left out.
        scratch_count: Elements of SCRATCH, including received data that follows it.
        scaled_count: Elements of SCALED.
        factor: The factor or divisor of a ``Finish``.
    """

    steps: tuple[DeviceStep, ...]
    scratch_count: int
    scaled_count: int
    factor: float


@dataclass(frozen=True, slots=True)
class _Placement:
    """The places of the schedule's chunks in the plan's memories."""

    layout: ChunkLayout
    starts: tuple[Place, Place, Place]

    def place(self, span: Span) -> tuple[Place, int]:
        start, stop = self.layout.slice(span)
        memory, offset = self.starts[span.buffer]
        return (memory, offset + start), stop - start


def device_program(call: Call) -> DeviceProgram:
    """What one rank enqueues for a call, whose schedule has one level a step (``schedule.lower.levels``)."""
    steps, placement, used = _undivided(call)
    if call.op is not None and call.op.average and placement.layout.count(Buffer.OUTPUT):
        _divide(steps, call, placement)
    own_copy = placement.layout.count(Buffer.INPUT) if placement.starts[Buffer.INPUT][0] == SCALED else 0
    return DeviceProgram(tuple(steps), used, own_copy, _factor(call))


def _undivided(call: Call) -> tuple[list[DeviceStep], _Placement, int]:
    """The steps before a division by the number of ranks, the placement, and the elements of SCRATCH."""
    program = call.program()
    layout = call.layout(program)
    scales = call.op is not None and call.op.scale is not None and layout.count(Buffer.INPUT) > 0
    placement = _Placement(layout, _starts(call, layout, scales))
    free = used = layout.count(Buffer.SCRATCH)
    pack = max(1, 16 // call.dtype.numpy.itemsize)
    steps = [_scaling(placement)] if scales else []
    for step in program.steps:
        done, end = _step(step, placement, free, pack)
        used = max(used, end)
        if done.messages or done.phases:
            steps.append(done)
    return _forwarded(steps), placement, used


def _forwarded(steps: list[DeviceStep]) -> list[DeviceStep]:
    """Writes sums that are made in SCRATCH and copied once straight to their destination."""
    read: list[tuple[Place, int]] = []

    def is_dead(place: Place, count: int) -> bool:
        return place[0] == SCRATCH and not any(overlap(place, p, count, n) for p, n in read)

    result = []
    for step in reversed(steps):
        phases = forward(step.phases, is_dead)
        read += [(m.at, m.count) for m in step.messages if m.sends]
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
        return (SCALED if scales else SENDBUF, 0), (RECVBUF, 0), (SCRATCH, 0)
    apart = layout.bounds[Buffer.OUTPUT][shift[1]] - layout.bounds[Buffer.INPUT][shift[0]]
    if layout.count(Buffer.INPUT) > layout.count(Buffer.OUTPUT):
        return (SENDBUF, 0), (SENDBUF, -apart), (SCRATCH, 0)
    return (RECVBUF, apart), (RECVBUF, 0), (SCRATCH, 0)


def _scaling(placement: _Placement) -> DeviceStep:
    """Multiplies INPUT by the factor, into the plan's own memory or in place."""
    to = placement.starts[Buffer.INPUT]
    source = (SENDBUF, 0) if to[0] == SCALED else to
    chain = Chain(to, placement.layout.count(Buffer.INPUT), (source,), Finish.SCALE)
    return DeviceStep((), ((chain,),))


def _step(step: Step, placement: _Placement, free: int, pack: int) -> tuple[DeviceStep, int]:
    """One step, and the end of the SCRATCH that it uses; data to be reduced is received from ``free`` on."""
    messages, updates = [], []
    for transfer in step.transfers:
        at, count = placement.place(transfer.src if isinstance(transfer, Send) else transfer.dst)
        if isinstance(transfer, RecvReduce):
            # As far from a multiple of 16 bytes as its destination, so that the kernel adds whole packs.
            arrives = free + (at[1] - free) % pack
            updates.append(Update(at, (SCRATCH, arrives), count, reduces=True))
            at, free = (SCRATCH, arrives), arrives + count
        if count:
            messages.append(SendRecv(isinstance(transfer, Send), at, count, transfer.peer))
    for local in step.local:
        to, count = placement.place(local.dst)
        source, _ = placement.place(local.src)
        updates.append(Update(to, source, count, reduces=not isinstance(local, Copy)))
    return DeviceStep(tuple(messages), fuse(updates)), free


def _divide(steps: list[DeviceStep], call: Call, placement: _Placement) -> None:
    """Adds the division by the number of ranks, to the last launch where that writes all of OUTPUT.

    If one rank divided a float32 accumulator and another rank a rounded number that it received, their
    results would differ. So with a wider accumulator the last launch divides only if it can on all ranks.
    """
    everywhere = call.dtype.accumulate is None or all(
        _ends_with_result(*_undivided(replace(call, rank=rank))[:2]) for rank in range(call.schedule.size)
    )
    if everywhere and _ends_with_result(steps, placement):
        *before, last = steps[-1].phases
        divided = tuple(replace(c, finish=Finish.DIVIDE) for c in last)
        steps[-1] = replace(steps[-1], phases=(*before, divided))
        return
    whole = placement.starts[Buffer.OUTPUT]
    chain = Chain(whole, placement.layout.count(Buffer.OUTPUT), (whole,), Finish.DIVIDE)
    steps.append(DeviceStep((), ((chain,),)))


def _ends_with_result(steps: list[DeviceStep], placement: _Placement) -> bool:
    """Whether the last launch writes all of the rank's OUTPUT, if it has one, and nothing else."""
    count = placement.layout.count(Buffer.OUTPUT)
    if not count:
        return True
    last = steps[-1].phases[-1] if steps and steps[-1].phases else ()
    memory, start = placement.starts[Buffer.OUTPUT]
    inside = all(c.to[0] == memory and start <= c.to[1] <= start + count - c.count for c in last)
    return inside and sum(c.count for c in last) == count
