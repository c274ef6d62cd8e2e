"""The types of schedules: which rank sends which chunk to which other rank in which step.

A schedule is data. It holds no bytes, dtypes or pointers, so one schedule serves every message
size and every kind of array; a transport compiles one rank's program of it into a plan that runs.

What a step means
-----------------
The steps of a rank's program run in order; two ranks meet only in a matched send and receive, and
the k-th send from a to b is matched by the k-th receive of b from a. Within one step of one rank:

1. The transfers run concurrently. A send reads its span as it is when the step begins. A ``Recv``
   lands in its span at any time during the step.
2. When all transfers are done, the data that arrived for each ``RecvReduce`` is applied in the order in
   which these are listed: ``dst = op(dst, arrived)``. So results never depend on timing, and a span
   may be sent and reduced into in the same step.
3. Then the local work is done in the order listed: ``Copy`` and ``Reduce``.

A span that a ``Recv`` lands in may therefore not be touched by any other transfer of that step. The two
spans of a ``Copy`` or ``Reduce`` are apart or one and the same; a copy of a span onto itself (as a copy of
INPUT to OUTPUT is, in a call in place) does nothing. OUTPUT and SCRATCH hold nothing at first.

Chunks are not all of one size: where a message does not divide evenly, ``collectives.cut`` makes some an
element longer. So a chunk only moves to a place for chunks of its own number: the same chunk of the
message, or, for collectives with blocks, the same piece of some block (of the same block, if the schedule
is to serve blocks of different sizes). ``verify`` checks all of this.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from flagcx.errors import ArgumentError


class Buffer(enum.IntEnum):
    """The memory that a span is part of."""

    INPUT = 0
    """The caller's sendbuf. Never written, unless the call is in place."""
    OUTPUT = 1
    """The caller's recvbuf."""
    SCRATCH = 2
    """Memory of the transport's own. Its chunk i is as large as the message's chunk i mod chunks."""


@dataclass(frozen=True, slots=True)
class Span:
    """Chunks ``start`` to ``stop`` (half open) of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.buffer.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``src`` to rank ``peer``."""

    src: Span
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive from rank ``peer`` into ``dst``."""

    dst: Span
    peer: int


@dataclass(frozen=True, slots=True)
class RecvReduce:
    """Receive from rank ``peer`` and do ``dst = op(dst, arrived)`` once the step's transfers are done."""

    dst: Span
    peer: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Local: ``dst = src``."""

    src: Span
    dst: Span


@dataclass(frozen=True, slots=True)
class Reduce:
    """Local: ``dst = op(dst, src)``. It lets every rank add up in one and the same order."""

    src: Span
    dst: Span


Transfer = Send | Recv | RecvReduce
Local = Copy | Reduce


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers that run concurrently, then local work in order."""

    transfers: tuple[Transfer, ...] = ()
    local: tuple[Local, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of one rank."""

    rank: int
    steps: tuple[Step, ...]

    def spans(self) -> Iterator[Span]:
        """Every span that the program names, in order, with repeats."""
        for step in self.steps:
            for transfer in step.transfers:
                yield transfer.src if isinstance(transfer, Send) else transfer.dst
            for work in step.local:
                yield work.src
                yield work.dst

    @property
    def scratch_chunks(self) -> int:
        """How many chunks SCRATCH has: one more than the highest number used."""
        return max((s.stop for s in self.spans() if s.buffer is Buffer.SCRATCH), default=0)

    def scratch_used(self) -> frozenset[int]:
        """The chunks of SCRATCH that the program uses; the others need no memory."""
        return frozenset(
            chunk
            for span in self.spans()
            if span.buffer is Buffer.SCRATCH
            for chunk in range(span.start, span.stop)
        )


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """One algorithm for one collective among ``size`` ranks.

    Programs are made on demand, so that a rank of ten thousand makes its own alone.

    Attributes:
        collective: Name of the collective, a key of ``flagcx.schedule.collectives.COLLECTIVES``.
        algorithm: Name of the algorithm.
        size: Number of ranks.
        chunks: Pieces that the message is cut into. Collectives with one block a rank (allgather,
            reduce_scatter, gather, scatter, alltoall) have a multiple of ``size``: chunk
            ``q * k + p`` is piece p of the block of rank q.
        make: Returns the program of a rank; pure.
        root: The root of a rooted collective, else None.
        aligned: The author's assertion that both sides of every message are in steps of the same number, and
            that all programs have equally many steps (empty ones where a rank is idle). Aligned schedules
            can be laid beside each other one rank at a time; ``verify`` checks it.
    """

    collective: str
    algorithm: str
    size: int
    chunks: int
    make: Callable[[int], Program]
    root: int | None = None
    aligned: bool = False

    def program(self, rank: int) -> Program:
        """The program of ``rank``."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of a schedule for {self.size} ranks")
        return self.make(rank)

    def programs(self) -> Iterator[Program]:
        """The programs of all ranks, made one at a time."""
        return (self.make(rank) for rank in range(self.size))

    def __repr__(self) -> str:
        root = "" if self.root is None else f", root {self.root}"
        parts = f"{self.size} ranks, {self.chunks} chunks{root}"
        return f"<Schedule {self.collective} by {self.algorithm}: {parts}>"

    def _repr_png_(self) -> bytes | None:
        """A picture for notebooks; None without matplotlib, or of too many ranks to draw."""
        # Drawing rests on this module, so it is looked up when it is asked for.
        return import_module("flagcx.schedule.draw").png(self)

    def _repr_html_(self) -> str:
        """The same picture, or the steps in words."""
        return import_module("flagcx.schedule.draw").html(self)


def check_schedule(schedule: object) -> None:
    """Refuses what is no schedule.

    Raises:
        ArgumentError: It is something else; the message says how a schedule is had.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"expected a Schedule, such as flagcx.algorithms.build('allreduce', 'ring', 4), got {schedule!r}"
        )


def span_of(buffer: Buffer, start: int, count: int = 1) -> Span:
    """``count`` chunks of ``buffer`` from ``start`` on."""
    return Span(buffer, start, start + count)
