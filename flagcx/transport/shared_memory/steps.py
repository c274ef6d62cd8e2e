"""Any schedule, step by step, over the channels between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.schedule.collectives import ChunkLayout
from flagcx.schedule.model import Buffer, Copy, Local, Program, Recv, Send, Span, Step
from flagcx.transport.shared_memory.arena import PIECE_NBYTES, PIECES, Arena
from flagcx.transport.shared_memory.channel import (
    RENDEZVOUS_NBYTES,
    Arrival,
    Exchange,
    Part,
    run_exchange,
)
from flagcx.transport.shared_memory.reduction import divide_by


@dataclass(frozen=True, slots=True)
class _CompiledStep:
    exchange: Exchange
    local: tuple[tuple[bool, Part, Part], ...]


class Steps:
    """A program compiled for one count and dtype.

    Args:
        arena: The shared memory.
        program: This rank's program.
        layout: Where its chunks lie.
        dtype: The element type.
        op: The operation, or None.
        overlay: Where OUTPUT lies over INPUT in a call in place: INPUT element minus OUTPUT element; or None.
        signature: Entry for the ledger.
        attach_nbytes: See ``channel.Exchange``.
    """

    def __init__(
        self,
        arena: Arena,
        program: Program,
        layout: ChunkLayout,
        dtype: DType,
        op: ReduceOp | None,
        overlay: int | None,
        signature: int,
        attach_nbytes: int = RENDEZVOUS_NBYTES,
    ) -> None:
        self._attach_nbytes = attach_nbytes
        self._arena, self._signature = arena, signature
        self._kinds = (signature >> 1,) * len(Buffer)
        self._dtype, self._layout = dtype.numpy, layout
        self._ufunc = op.ufunc if op is not None else None
        self._divide = divide_by(arena.size, dtype) if op is not None and op.average else None
        self._scratch = np.empty(layout.count(Buffer.SCRATCH), self._dtype)
        self._overlay = overlay
        self._steps = [self._compile(step) for step in program.steps]
        self._empty = np.empty(0, self._dtype)

    # -- compiling --------------------------------------------------------------------------------

    def _part(self, span: Span) -> Part:
        return (span.buffer, *self._layout.slice(span))

    def _compile(self, step: Step) -> _CompiledStep:
        departures = tuple((t.peer, self._part(t.src)) for t in step.transfers if isinstance(t, Send))
        receives = [t for t in step.transfers if not isinstance(t, Send)]
        arrivals: list[Arrival] = []
        for t in receives:
            part = self._part(t.dst)
            reduce = not isinstance(t, Recv)
            sent_too = reduce and any(self._overlap(part, sent) for _, sent in departures)
            long = sent_too and self._too_long_to_leave(departures)
            after = tuple(i for i, a in enumerate(arrivals) if self._overlap(a.part, part))
            staged = long or any(arrivals[i].staged for i in after)
            arrivals.append(Arrival(t.peer, part, reduce, staged, sent_too and not long, after))
        local = tuple(self._compile_local(w) for w in step.local)
        exchange = Exchange(departures, tuple(arrivals), self._attach_nbytes)
        return _CompiledStep(exchange, tuple(w for w in local if w is not None))

    def _compile_local(self, work: Local) -> tuple[bool, Part, Part] | None:
        src, dst = self._part(work.src), self._part(work.dst)
        copies = isinstance(work, Copy)
        return None if copies and self._same(src, dst) else (not copies, src, dst)

    def _same(self, a: Part, b: Part) -> bool:
        return self._at(a) == self._at(b)

    def _at(self, part: Part) -> tuple[int, int, int]:
        """A part, named by its place in OUTPUT where INPUT and OUTPUT are one memory."""
        buffer, start, stop = part
        if self._overlay is not None and buffer == Buffer.INPUT:
            return int(Buffer.OUTPUT), start - self._overlay, stop - self._overlay
        return int(buffer), start, stop

    def _overlap(self, a: Part, b: Part) -> bool:
        (x, a0, a1), (y, b0, b1) = self._at(a), self._at(b)
        return x == y and a0 < b1 and b0 < a1

    def _too_long_to_leave(self, departures: Sequence[tuple[int, Part]]) -> bool:
        """Whether the step's sends may have to wait for the peer to receive."""
        pieces: dict[int, int] = {}
        for peer, (_, start, stop) in departures:
            nbytes = (stop - start) * self._dtype.itemsize
            pieces[peer] = pieces.get(peer, 0) + max(-(-nbytes // PIECE_NBYTES), 1)
            if nbytes >= min(RENDEZVOUS_NBYTES, self._attach_nbytes):
                return True
        return any(n > PIECES for n in pieces.values())

    # -- running ----------------------------------------------------------------------------------

    def run(self, given: np.ndarray | None, result: np.ndarray | None) -> None:
        """See ``transport.base.Plan``."""
        arrays = tuple(self._empty if a is None else a.reshape(-1) for a in (given, result, self._scratch))
        self._arena.signals.enter(self._signature)
        for step in self._steps:
            if step.exchange.departures or step.exchange.arrivals:
                run_exchange(self._arena, step.exchange, arrays, self._kinds, self._ufunc)
            for reduce, (b, b0, b1), (a, a0, a1) in step.local:
                dst, src = arrays[a][a0:a1], arrays[b][b0:b1]
                if reduce:
                    self._ufunc(dst, src, dst)  # type: ignore[misc]
                else:
                    dst[...] = src
        if self._divide is not None and result is not None:
            self._divide(arrays[Buffer.OUTPUT])
