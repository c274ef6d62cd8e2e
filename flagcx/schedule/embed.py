"""How a schedule is laid into a larger one: where its chunks lie there, and which ranks run it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Buffer, Copy, Program, Recv, RecvReduce, Reduce, Schedule, Send, Span, Step

Home = tuple[Buffer, Sequence[int]]
"""A buffer, and the chunk of it that each chunk of an embedded INPUT or OUTPUT becomes."""


@dataclass(frozen=True)
class Embedding:
    """A schedule as part of a larger one, whose message has the part's message in it.

    Every chunk of the part is cut into equally many smaller ones first, as ``message`` has them.

    Attributes:
        part: The embedded schedule.
        chunks: Chunks of the larger message.
        message: The larger message's chunk for each (smaller) chunk of the part's message.
        peers: The larger schedule's rank for each rank of the part.
        first: The first chunk, of a buffer that has one block, that belongs to the part.
        scratch_base: First chunk of the larger SCRATCH to use, a multiple of ``chunks``.
    """

    part: Schedule
    chunks: int
    message: Sequence[int]
    peers: Sequence[int]
    first: int = 0
    scratch_base: int = 0

    @cached_property
    def _factor(self) -> int:
        """Into how many chunks each chunk of the part is cut."""
        return len(self.message) // self.part.chunks

    @cached_property
    def _period(self) -> int:
        """Chunks in a block of the part; in its message, if it has no blocks."""
        kind = COLLECTIVES[self.part.collective]
        return kind.per_block(self.part.size, self.part.chunks) * self._factor

    @cached_property
    def _cuts(self) -> Sequence[int]:
        """Sorted places in a block at which spans must be cut, so that both ends of a message cut it alike.

        These are the offsets at which the larger message goes on elsewhere; () if it never does.
        """
        message = self.message
        jumps = set()
        if not isinstance(message, range):
            jumps = {i % self._period for i in range(1, len(message)) if message[i] != message[i - 1] + 1}
        if len(message) != self.chunks or message[0] != 0:
            jumps.add(0)
        return tuple(sorted(jumps))

    def program(self, rank: int, source: Home | None = None, result: Home | None = None) -> Program:
        """The program of the part's ``rank`` as part of the larger schedule; steps keep their numbers.

        Args:
            rank: A rank of the part.
            source: Home of its INPUT; by default the larger schedule's INPUT.
            result: Home of its OUTPUT; by default the larger schedule's OUTPUT.
        """
        kind, size = COLLECTIVES[self.part.collective], self.part.size
        block = range(self.first, self.first + self._period)
        homes = (
            source or (Buffer.INPUT, self.message if kind.input_blocks(size) > 1 else block),
            result or (Buffer.OUTPUT, self.message if kind.output_blocks(size) > 1 else block),
        )
        steps = (self._step(step, homes) for step in self.part.program(rank).steps)
        return Program(self.peers[rank], tuple(steps))

    def _step(self, step: Step, homes: tuple[Home, Home]) -> Step:
        if not step.transfers and not step.local:
            return step
        transfers: list[Send | Recv | RecvReduce] = []
        for t in step.transfers:
            span, peer = t.src if isinstance(t, Send) else t.dst, self.peers[t.peer]
            transfers.extend(type(t)(piece, peer) for piece in self._pieces(span, homes))
        local: list[Copy | Reduce] = []
        for work in step.local:
            pieces = zip(self._pieces(work.src, homes), self._pieces(work.dst, homes), strict=True)
            local.extend(type(work)(a, b) for a, b in pieces if a != b or isinstance(work, Reduce))
        return Step(tuple(transfers), tuple(local))

    def _pieces(self, span: Span, homes: tuple[Home, Home]) -> Iterator[Span]:
        """The spans of the larger schedule that a span of the part becomes, in order."""
        start, stop = span.start * self._factor, span.stop * self._factor
        while start < stop:
            end = stop
            if self._cuts:
                offset = start % self._period
                after = bisect_right(self._cuts, offset)
                cut = self._cuts[after] if after < len(self._cuts) else self._cuts[0] + self._period
                end = min(stop, start - offset + cut)
            buffer = span.buffer
            if buffer is Buffer.SCRATCH:
                layer, chunk = divmod(start, len(self.message))
                first = self.scratch_base + layer * self.chunks + self.message[chunk]
            else:
                first = homes[buffer][1][start]
                buffer = homes[buffer][0]
            yield Span(buffer, first, first + end - start)
            start = end
