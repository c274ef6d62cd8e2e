"""All ranks in one process: exact results with NumPy, in an order drawn at random.

Every rank has its own memory and is at some step of its program. What may happen next is drawn at random
from all that could happen next on real machines: a matched send and receive of two ranks whose steps have
both begun, or the end of a step whose transfers are done. Sends wait for their receives and receives for
their sends, so a schedule that leans on buffering hangs here, and is reported.

OUTPUT and SCRATCH begin with poison (NaN, or a value that does not occur by chance), so that a chunk which
is read too early or never written shows in the result.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flagcx.dtypes import DType, ReduceOp, dtype_of
from flagcx.errors import ArgumentError, ScheduleError
from flagcx.schedule.collectives import COLLECTIVES, Counts
from flagcx.schedule.model import Buffer, Copy, Recv, Schedule, Send, Span
from flagcx.transport.base import Call


def run(
    schedule: Schedule,
    inputs: Sequence[np.ndarray | None],
    counts: Counts | Callable[[int], Counts],
    op: ReduceOp | None = None,
    *,
    in_place: bool = False,
    seed: int = 0,
) -> list[np.ndarray | None]:
    """Runs a schedule on all its ranks.

    Args:
        schedule: Any schedule; it need not be a right one.
        inputs: For each rank its INPUT, one-dimensional and all of one dtype; None where it has none. They
            are copied and stay as they are.
        counts: Elements; see ``flagcx.schedule.collectives.Counts``. For an alltoall with blocks of different
            sizes, a function from the rank to its pair of counts.
        op: How contributions are combined, for collectives that do.
        in_place: Whether INPUT and OUTPUT lie over each other, where the collective has such a form.
        seed: Where the order in which things happen comes from; the result of a right schedule does not
            depend on it.

    Returns:
        For each rank its OUTPUT, or None where it has none.

    Raises:
        ArgumentError: There is not one input of the right length for each rank that has one.
        ScheduleError: The ranks wait for each other for ever, a matched send and receive have different
            lengths, a span leaves its buffer, or INPUT is written to out of place.

    Example:
        >>> run(ring_allreduce(2), [np.array([1, 2]), np.array([10, 20])], 2, OPS["sum"])  # doctest: +SKIP
        [array([11, 22]), array([11, 22])]
    """
    if len(inputs) != schedule.size:
        raise ArgumentError(f"{len(inputs)} inputs for {schedule.size} ranks; expected one a rank, or None")
    dtypes = {array.dtype for array in inputs if array is not None}
    if len(dtypes) != 1:
        raise ArgumentError(f"inputs of dtypes {sorted(map(str, dtypes))}; expected one dtype on all ranks")
    dtype = dtype_of(dtypes.pop())
    ranks = []
    for rank, given in enumerate(inputs):
        own_counts = counts(rank) if callable(counts) else counts
        ranks.append(_Rank(Call(schedule, rank, own_counts, dtype, op, in_place), given))
    _Race(ranks, random.Random(seed)).finish()
    return [rank.result() for rank in ranks]


class _Rank:
    """The memory of one rank, and how far its program is."""

    def __init__(self, call: Call, given: np.ndarray | None) -> None:
        self.call = call
        self.rank = call.rank
        self.program = call.program()
        self.layout = call.layout(self.program)
        self.step = -1
        self.pending = 0
        self.arrived: dict[int, tuple[Span, np.ndarray]] = {}
        schedule = call.schedule
        self._kind = COLLECTIVES[schedule.collective]
        facts = (call.rank, schedule.size, schedule.chunks, schedule.root)
        self._overlaid = self._kind.in_place_shift(*facts) if call.in_place else None
        self.memory = self._allocate()
        self._fill(given)

    def _allocate(self) -> dict[Buffer, np.ndarray]:
        sizes = [self.layout.count(buffer) for buffer in Buffer]
        scratch = _poison(sizes[Buffer.SCRATCH], self.call.dtype)
        if self._overlaid is None:
            given, result = (_poison(size, self.call.dtype) for size in sizes[:2])
            return {Buffer.INPUT: given, Buffer.OUTPUT: result, Buffer.SCRATCH: scratch}
        over, under = self._overlaid
        ahead = self.layout.bounds[Buffer.INPUT][over] - self.layout.bounds[Buffer.OUTPUT][under]
        starts = (max(0, -ahead), max(0, ahead))
        ends = [start + size for start, size in zip(starts, sizes[:2], strict=True)]
        both = _poison(max(ends), self.call.dtype)
        given, result = (both[a:b] for a, b in zip(starts, ends, strict=True))
        return {Buffer.INPUT: given, Buffer.OUTPUT: result, Buffer.SCRATCH: scratch}

    def _fill(self, given: np.ndarray | None) -> None:
        room = self.memory[Buffer.INPUT]
        shape = (0,) if given is None else given.shape
        if shape != room.shape:
            raise ArgumentError(f"rank {self.rank}: an input of shape {shape}; expected {room.shape}")
        if given is None:
            return
        op = self.call.op
        scale = 1 if op is None or op.scale is None else self.call.dtype.numpy.type(op.scale)
        room[...] = given if scale == 1 else given * scale

    def view(self, span: Span, written: bool = False) -> np.ndarray:
        """The elements of a span."""
        bounds = self.layout.bounds[span.buffer]
        if not 0 <= span.start <= span.stop < len(bounds):
            raise self.fault(f"{span} leaves the buffer, which has {len(bounds) - 1} chunks")
        if written and span.buffer is Buffer.INPUT and not self._shared(span):
            form = "it is no part of OUTPUT" if self.call.in_place else "the call is out of place"
            raise self.fault(f"{span} is written to, and {form}")
        return self.memory[span.buffer][slice(*self.layout.slice(span))]

    def _shared(self, span: Span) -> bool:
        """Whether a span of INPUT is OUTPUT too, in a call in place."""
        if self._overlaid is None:
            return False
        over, under = self._overlaid
        return span.start >= over - under and span.stop - over + under < len(
            self.layout.bounds[Buffer.OUTPUT]
        )

    def fault(self, text: str) -> ScheduleError:
        """An error at the step that this rank is in."""
        return ScheduleError(f"rank {self.rank}, step {self.step}: {text}", rank=self.rank, step=self.step)

    def end_step(self) -> None:
        """Applies what arrived in the order listed, then does the local work in the order listed."""
        step = self.program.steps[self.step]
        for _, (span, data) in sorted(self.arrived.items()):
            self._combine(self.view(span, written=True), data)
        self.arrived.clear()
        for work in step.local:
            source, target = self.view(work.src), self.view(work.dst, written=True)
            if source.size != target.size:
                raise self.fault(f"{work} has spans of {source.size} and {target.size} elements")
            if isinstance(work, Copy):
                target[...] = source
            else:
                self._combine(target, source)

    def _combine(self, target: np.ndarray, source: np.ndarray) -> None:
        op = self.call.op
        if op is None:
            raise self.fault("contributions are combined, and no operation was given")
        op.ufunc(target, source, out=target, casting="unsafe")

    def result(self) -> np.ndarray | None:
        """OUTPUT, averaged where the operation says so."""
        schedule, op = self.call.schedule, self.call.op
        if not self._kind.has_output(self.rank, schedule.root):
            return None
        out = self.memory[Buffer.OUTPUT].copy()
        if op is None or not op.average:
            return out
        if self.call.dtype.kind == "int":
            return ((out - np.fmod(out, schedule.size)) // schedule.size).astype(out.dtype)
        return (out / schedule.size).astype(out.dtype)


def _poison(size: int, dtype: DType) -> np.ndarray:
    if dtype.kind in ("float", "complex"):
        return np.full(size, np.nan, dtype.numpy)
    out = np.empty(size, dtype.numpy)
    out.view(np.uint8)[...] = 1 if dtype.kind == "bool" else 0xA5
    return out


@dataclass
class _Pair:
    """What rank a has begun to send to rank b and b to receive from a: (index in the step, transfer)."""

    sends: deque = field(default_factory=deque)
    receives: deque = field(default_factory=deque)


class _Race:
    """All ranks on their way, one event at a time."""

    def __init__(self, ranks: Sequence[_Rank], chance: random.Random) -> None:
        self._ranks = ranks
        self._chance = chance
        self._pairs: dict[tuple[int, int], _Pair] = {}
        self._events: list[tuple[int, int]] = []
        """What can happen next: a pair of ranks with a message, or (rank, rank): its step ends."""

    def finish(self) -> None:
        """Lets things happen until all programs have ended.

        Raises:
            ScheduleError: Nothing can happen any more, and some rank has not ended.
        """
        for rank in self._ranks:
            self._begin(rank)
        while self._events:
            chosen = self._chance.randrange(len(self._events))
            self._events[chosen], self._events[-1] = self._events[-1], self._events[chosen]
            source, target = self._events.pop()
            if source == target:
                self._ranks[source].end_step()
                self._begin(self._ranks[source])
            else:
                self._deliver(source, target)
        waiting = [rank for rank in self._ranks if rank.step < len(rank.program.steps)]
        if waiting:
            raise self._hang(waiting)

    def _begin(self, rank: _Rank) -> None:
        rank.step += 1
        if rank.step == len(rank.program.steps):
            return
        transfers = rank.program.steps[rank.step].transfers
        rank.pending = len(transfers)
        for index, transfer in enumerate(transfers):
            if transfer.peer == rank.rank:
                raise rank.fault(f"{transfer} is with the rank itself; use Copy or Reduce")
            sends = isinstance(transfer, Send)
            key = (rank.rank, transfer.peer) if sends else (transfer.peer, rank.rank)
            pair = self._pairs.setdefault(key, _Pair())
            (pair.sends if sends else pair.receives).append((index, transfer))
            if len(pair.sends if sends else pair.receives) <= len(pair.receives if sends else pair.sends):
                self._events.append(key)
        if not transfers:
            self._events.append((rank.rank, rank.rank))

    def _deliver(self, source: int, target: int) -> None:
        pair = self._pairs[source, target]
        # The k-th send is matched by the k-th receive, but any that are matched may be the next to arrive.
        chosen = self._chance.randrange(min(len(pair.sends), len(pair.receives)))
        (_, send), (index, receive) = pair.sends[chosen], pair.receives[chosen]
        del pair.sends[chosen], pair.receives[chosen]
        sender, receiver = self._ranks[source], self._ranks[target]
        data, room = sender.view(send.src), receiver.view(receive.dst, written=True)
        if data.size != room.size:
            raise sender.fault(
                f"{data.size} elements of {send.src} go to rank {target}, which expects {room.size} in "
                f"{receive.dst} in its step {receiver.step}"
            )
        if isinstance(receive, Recv):
            room[...] = data
        else:
            receiver.arrived[index] = (receive.dst, data.copy())
        for rank in (sender, receiver):
            rank.pending -= 1
            if not rank.pending:
                self._events.append((rank.rank, rank.rank))

    def _hang(self, waiting: Sequence[_Rank]) -> ScheduleError:
        said = []
        for (source, target), pair in sorted(self._pairs.items()):
            said += [f"rank {source} to send {s.src} to rank {target}" for _, s in pair.sends]
            said += [f"rank {target} to receive {r.dst} from rank {source}" for _, r in pair.receives]
        more = f" and {len(said) - 8} more" if len(said) > 8 else ""
        first = waiting[0]
        return first.fault(f"the ranks wait for each other for ever: {'; '.join(said[:8])}{more}")
