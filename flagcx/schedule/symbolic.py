"""A run of a schedule on symbols: each chunk is an expression, whose contributions are counted.

Operations are taken to be associative and commutative for what a chunk must hold, and to be neither where all
ranks must end with the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flagcx.errors import ScheduleError
from flagcx.schedule.collectives import COLLECTIVES, Contribution
from flagcx.schedule.memory import Cells
from flagcx.schedule.messages import Matching, fault
from flagcx.schedule.model import Buffer, Copy, Schedule, Span, span_of

_NOTHING = 0
"""The value of a chunk that nothing was written to."""


class Sums:
    """Interned expressions; a chunk's value is the number of one.

    The contributions of an expression are kept as one integer with a counter for each rank, together with
    the one chunk that they all are of (sums over different chunks lie in one longer integer). Expressions
    of more than ``size`` contributions can be part of no right result.
    """

    def __init__(self, size: int, repeats: bool) -> None:
        self._size = size
        self._repeats = repeats
        self._bits = 1 if repeats else size.bit_length()
        self._chunk = [0]
        self._packed = [0]
        self._weight = [0]
        self._parents: list[tuple[int, int] | Contribution] = [(0, 0)]
        self._born: list[tuple[int, int] | None] = [None]
        self._sums: dict[tuple[int, int], int] = {}
        self._keys: dict[tuple[Contribution, ...], tuple[int, int]] = {}
        self.place = (0, 0)
        """The (rank, step) that the run is at."""

    def contribution(self, rank: int, chunk: int) -> int:
        """The value that chunk ``chunk`` of the INPUT of ``rank`` begins with."""
        number = self._new(chunk, 1 << (self._bits * rank), 1, (rank, chunk))
        self._born[number] = None
        return number

    def add(self, left: int, right: int) -> int:
        """The value of ``op(left, right)``."""
        pair = (left, right)
        number = self._sums.get(pair)
        if number is None:
            number = self._sums[pair] = self._add(left, right)
        return number

    def _add(self, left: int, right: int) -> int:
        weight = self._weight[left] + self._weight[right]
        if not self._repeats and weight > self._size:
            return self._new(-1, 0, weight, (left, right))
        chunk = min(self._chunk[left], self._chunk[right])
        width = self._bits * self._size
        a = self._packed[left] << (self._chunk[left] - chunk) * width
        b = self._packed[right] << (self._chunk[right] - chunk) * width
        return self._new(chunk, a | b if self._repeats else a + b, weight, (left, right))

    def _new(self, chunk: int, packed: int, weight: int, parents: tuple[int, int]) -> int:
        number = len(self._packed)
        self._chunk.append(chunk)
        self._packed.append(packed)
        self._weight.append(min(weight, self._size + 1))
        self._parents.append(parents)
        self._born.append(self.place)
        return number

    def holds(self, number: int, contributions: tuple[Contribution, ...]) -> bool:
        """Whether a value has just these contributions, each once."""
        key = self._keys.get(contributions)
        if key is None:
            lowest = min(chunk for _, chunk in contributions)
            bits, width = self._bits, self._bits * self._size
            packed = 0
            for rank, chunk in contributions:
                packed += 1 << (rank * bits + (chunk - lowest) * width)
            key = self._keys[contributions] = lowest, packed
        return key == (self._chunk[number], self._packed[number])

    def words(self, number: int) -> str:
        """A value as an expression of ranks, such as "(0 . 1) . 2"."""
        parents = self._parents[number]
        if self._born[number] is None:
            return str(parents[0])
        left, right = (self.words(p) if self._born[p] is None else f"({self.words(p)})" for p in parents)
        return f"{left} . {right}"

    def counter(self, number: int) -> Counter[Contribution]:
        """The contributions of a value, each with how often it was added."""
        needed = {number}
        for part in range(number, 0, -1):
            if part in needed and self._born[part] is not None:
                needed.update(self._parents[part])
        found: dict[int, Counter] = {0: Counter()}
        for part in sorted(needed - {0}):  # a value is made of values with lower numbers
            parents = self._parents[part]
            leaf = self._born[part] is None
            found[part] = Counter([parents]) if leaf else found[parents[0]] + found[parents[1]]
        return found[number]

    def origin_of_repeat(self, number: int, contribution: Contribution) -> tuple[int, int] | None:
        """Where ``contribution`` first was added to a value that had it already: (rank, step)."""
        while True:
            born = self._born[number]
            if born is None:
                return None
            for parent in self._parents[number]:
                if self.counter(parent)[contribution] > 1:
                    number = parent
                    break
            else:
                return born


def run(
    schedule: Schedule,
    matching: Matching,
    order: Sequence[tuple[int, int]],
    layout: Sequence[Cells],
    same_bits: bool = False,
) -> None:
    """Runs ``schedule`` on symbols and compares every OUTPUT with the contributions it must end with.

    Args:
        schedule: The schedule.
        matching: Its messages.
        order: All (rank, step) in an order in which they can end.
        layout: Each rank's memory.
        same_bits: Whether all ranks of an all-reduce must compute one expression.

    Raises:
        ScheduleError: A chunk is read before anything was written to it, or an OUTPUT ends wrong.
    """
    sums = Sums(schedule.size, COLLECTIVES[schedule.collective].repeats)
    memory = []
    for rank, (program, place) in enumerate(zip(matching.programs, layout, strict=True)):
        row = [_NOTHING] * (place.base[Buffer.SCRATCH] + program.scratch_chunks)
        for chunk in range(place.count[0]):
            row[place.base[0] + chunk] = sums.contribution(rank, chunk)
        memory.append(row)
    in_flight: list[list[int]] = [[]] * len(matching.messages)
    for program in matching.programs:
        if program.steps:
            _begin(matching, program.rank, 0, memory, layout, in_flight)
    for rank, step in order:
        sums.place = (rank, step)
        _end(matching, rank, step, memory[rank], layout[rank], in_flight, sums)
        if step + 1 < len(matching.programs[rank].steps):
            _begin(matching, rank, step + 1, memory, layout, in_flight)
    first: list[int] = []
    for rank, row in enumerate(memory):
        result = _compare(schedule, matching, rank, row, layout[rank], sums)
        first = first or result
        if same_bits and schedule.collective == "allreduce" and result != first:
            raise _reordered(matching, rank, layout[rank], result, first, sums)


def _begin(matching, rank, step, memory, layout, in_flight) -> None:
    for number in matching.sent[rank][step]:
        span = matching.messages[number].src
        values = memory[rank][slice(*layout[rank].range(span))]
        if _NOTHING in values:
            raise _unwritten("sends", span, values, rank, step)
        in_flight[number] = values


def _end(matching, rank, step, row, place, in_flight, sums) -> None:
    base = place.base
    reductions = []
    for number in matching.received[rank][step]:
        message = matching.messages[number]
        if message.reduces:
            reductions.append((message.dst, in_flight[number]))
        else:
            row[slice(*place.range(message.dst))] = in_flight[number]
        in_flight[number] = []
    for span, values in reductions:
        _reduce(row, base[span.buffer], span, values, sums)
    for work in matching.programs[rank].steps[step].local:
        src, dst = work.src, work.dst
        values = row[slice(*place.range(src))]
        if _NOTHING in values:
            raise _unwritten("copies" if type(work) is Copy else "reduces from", src, values, rank, step)
        if type(work) is Copy:
            row[slice(*place.range(dst))] = values
        else:
            _reduce(row, base[dst.buffer], dst, values, sums)


def _reduce(row, base, span, values, sums) -> None:
    for cell, value in enumerate(values, base + span.start):
        before = row[cell]
        if before == _NOTHING:
            chunk = span_of(span.buffer, cell - base)
            text = f"reduces into {chunk} of {span}, which nothing was written to before"
            rank, step = sums.place
            raise fault(text, rank, step, chunk)
        row[cell] = sums.add(before, value)


def _unwritten(verb, span, values, rank, step) -> ScheduleError:
    chunk = span_of(span.buffer, span.start + values.index(_NOTHING))
    return fault(f"{verb} {span}, of which {chunk} was never written", rank, step, chunk)


def _compare(schedule, matching, rank, row, place, sums) -> list[int]:
    kind = COLLECTIVES[schedule.collective]
    size, root = schedule.size, schedule.root
    per_block = kind.per_block(size, schedule.chunks)
    base = place.base[Buffer.OUTPUT]
    for chunk in range(place.count[1]):
        got = row[base + chunk]
        wanted = kind.expected(rank, chunk, size, per_block, root)
        if got == _NOTHING or not sums.holds(got, wanted):
            raise _wrong(schedule, matching, rank, chunk, got, place, sums)
    return row[base : base + place.count[1]]


def _reordered(matching, rank, place, result, first, sums) -> ScheduleError:
    chunk = next(i for i, (a, b) in enumerate(zip(result, first, strict=True)) if a != b)
    span = span_of(Buffer.OUTPUT, chunk)
    step = _last_write(matching.programs[rank], place, place.range(span)[0])
    text = (
        f"ends with other bits than on rank 0: it is combined as {sums.words(result[chunk])}, there as "
        f"{sums.words(first[chunk])}; combine in one order on all ranks (a Reduce into what arrived, a Recv, "
        f"puts it first)"
    )
    return fault(text, rank, step, span)


def _wrong(schedule, matching, rank, chunk, got, place, sums) -> ScheduleError:
    span = span_of(Buffer.OUTPUT, chunk)
    step = _last_write(matching.programs[rank], place, place.range(span)[0])
    if got == _NOTHING:
        return fault("nothing was ever written to it", rank, step, span)
    kind = COLLECTIVES[schedule.collective]
    per_block = kind.per_block(schedule.size, schedule.chunks)
    wanted = Counter(kind.expected(rank, chunk, schedule.size, per_block, schedule.root))
    counts = sums.counter(got)
    missing, extra = sorted(wanted - counts), sorted(counts - wanted)
    repeated = [c for c in extra if c in wanted]
    strange = [c for c in extra if c not in wanted]
    faults = [f"lacks {_names(missing)}"] if missing else []
    if repeated:
        faults.append(f"counts {_names(repeated)} {counts[repeated[0]]} times")
        origin = sums.origin_of_repeat(got, repeated[0])
        if origin is not None:
            faults.append(f"first added twice by rank {origin[0]} in its step {origin[1]}")
    if strange:
        faults.append(f"holds {_names(strange)}, which do not belong there")
    return fault(f"ends wrong: it {'; '.join(faults)}", rank, step, span)


def _names(contributions: Sequence[Contribution]) -> str:
    names = [f"chunk {chunk} of rank {rank}" for rank, chunk in contributions[:4]]
    more = len(contributions) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _last_write(program, place: Cells, cell: int) -> int | None:
    last = None
    for number, step in enumerate(program.steps):
        written: list[Span] = [t.dst for t in step.transfers if hasattr(t, "dst")]
        written += [w.dst for w in step.local]
        if any(a <= cell < b for a, b in map(place.range, written)):
            last = number
    return last
