"""How a schedule is laid into a larger one: where its chunks lie there, and which ranks run it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flagcx.schedule.model import Buffer, Copy, Program, Recv, RecvReduce, Reduce, Send, Span, Step

Home = tuple[Buffer, Sequence[int]]
"""A buffer, and the chunk of it that each chunk of the embedded schedule becomes."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Where one rank of an embedded schedule finds its memory and its peers.

    The message of the embedded schedule is part of a larger one; ``message`` says which. Every chunk
    of the embedded schedule becomes ``factor`` smaller ones first; all that follows counts those.

    Attributes:
        rank: The rank in the larger schedule.
        peers: The larger schedule's rank for each embedded rank.
        factor: Into how many each chunk is cut.
        message: The larger message's chunk for each chunk of the embedded message.
        source: Home of INPUT; of no use where the rank has none.
        result: Home of OUTPUT, likewise.
        chunks: Chunks of the larger message.
        scratch_base: First chunk of the larger SCRATCH to use, a multiple of ``chunks``.
        cuts: Places in a block, as ``cut_places`` finds them, where spans fall apart; sorted.
        period: Chunks in a block of the embedded schedule (in its message, if it has no blocks).
    """

    rank: int
    peers: Sequence[int]
    factor: int
    message: Sequence[int]
    source: Home
    result: Home
    chunks: int
    scratch_base: int
    cuts: Sequence[int]
    period: int

    def program(self, program: Program) -> Program:
        """The embedded rank's program as part of the larger schedule; steps keep their numbers."""
        return Program(self.rank, tuple(self._step(step) for step in program.steps))

    def _step(self, step: Step) -> Step:
        if not step.transfers and not step.local:
            return step
        transfers: list[Send | Recv | RecvReduce] = []
        for t in step.transfers:
            peer = self.peers[t.peer]
            if isinstance(t, Send):
                transfers.extend(Send(piece, peer) for piece in self.pieces(t.src))
            else:
                transfers.extend(type(t)(piece, peer) for piece in self.pieces(t.dst))
        local: list[Copy | Reduce] = []
        for work in step.local:
            for src, dst in zip(self.pieces(work.src), self.pieces(work.dst), strict=True):
                if src != dst or isinstance(work, Reduce):
                    local.append(type(work)(src, dst))
        return Step(tuple(transfers), tuple(local))

    def pieces(self, span: Span) -> Iterator[Span]:
        """The spans of the larger schedule that a span of the embedded one becomes, in order."""
        start, stop = span.start * self.factor, span.stop * self.factor
        while start < stop:
            end = stop
            if self.cuts:
                offset = start % self.period
                after = bisect_right(self.cuts, offset)
                cut = self.cuts[after] if after < len(self.cuts) else self.cuts[0] + self.period
                end = min(stop, start - offset + cut)
            yield self._home(span.buffer, start, end - start)
            start = end

    def _home(self, buffer: Buffer, start: int, count: int) -> Span:
        if buffer is Buffer.SCRATCH:
            layer, chunk = divmod(start, len(self.message))
            first = self.scratch_base + layer * self.chunks + self.message[chunk]
            return Span(Buffer.SCRATCH, first, first + count)
        home, chunks = self.source if buffer is Buffer.INPUT else self.result
        return Span(home, chunks[start], chunks[start] + count)


def cut_places(message: Sequence[int], chunks: int, period: int) -> tuple[int, ...]:
    """Places in a block at which spans must be cut, so that both ends of a message cut it alike.

    Args:
        message: See ``Embedding.message``.
        chunks: Chunks of the larger message.
        period: Chunks in a block of the embedded schedule, or in its message.

    Returns:
        Offsets in a block after which the larger message goes on elsewhere; () if it never does.
    """
    if isinstance(message, range) and message.step == 1:
        jumps = set()
    else:
        jumps = {i % period for i in range(1, len(message)) if message[i] != message[i - 1] + 1}
    if len(message) != chunks or message[0] != 0:
        jumps.add(0)
    return tuple(sorted(jumps))
