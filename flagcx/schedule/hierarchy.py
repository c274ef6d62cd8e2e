"""Collectives made of collectives within groups of ranks and across them.

A stage runs one schedule in each of several groups. Before each stage a rank *holds* some chunks of
the message, the whole message at first if the collective begins so; a stage changes that as its
collective says: reduce_scatter and scatter leave the rank its own block of what was held, allgather
and gather join what the group holds, broadcast hands on what its root holds, reduce leaves all to its
root, allreduce changes nothing. A group in which nobody holds anything to begin with rests.

    ranks     0  1 | 2  3          within: reduce_scatter    across: allreduce    within: allgather
    holds     all                  half                      half                 all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import lcm

from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES, Collective
from flagcx.schedule.embed import Embedding, Home, cut_places
from flagcx.schedule.model import Buffer, Program, Schedule, Step

Part = Schedule | Callable[[int], Schedule]
"""A schedule for groups of one size, or a function from a group's size to its schedule."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One schedule in each of several groups of ranks.

    Attributes:
        groups: The ranks of each group; ``groups[g][i]`` is rank i of ``schedules[g]``.
        schedules: The schedule of each group.
        size: Number of ranks in all groups.
    """

    groups: tuple[Sequence[int], ...]
    schedules: tuple[Schedule, ...]
    size: int

    @property
    def algorithm(self) -> str:
        """The names of the schedules' algorithms."""
        return "/".join(dict.fromkeys(s.algorithm for s in self.schedules))


def within(groups: Sequence[Sequence[int]], schedule: Part) -> Stage:
    """A stage that runs ``schedule`` in each group, for ``then``.

    Args:
        groups: Lists of ranks in which every rank occurs once.
        schedule: A schedule whose size is that of every group, or a function of a group's size. Its
            root, if it has one, is a place in the group.

    Raises:
        ArgumentError: A rank is missing or occurs twice, or a size does not fit.
    """
    return _stage(groups, schedule, _checked(groups))


def across(groups: Sequence[Sequence[int]], schedule: Part) -> Stage:
    """A stage that runs ``schedule`` among the first ranks of all groups, among the second ones, and so on.

    Args:
        groups: Lists of ranks in which every rank occurs once. Where groups differ in size, the later
            ranks of the larger groups meet in smaller numbers.
        schedule: A schedule whose size is the number of groups, or a function of that number.

    Raises:
        ArgumentError: A rank is missing or occurs twice, or a size does not fit.
    """
    size = _checked(groups)
    longest = max(len(g) for g in groups)
    lanes = [[g[i] for g in groups if i < len(g)] for i in range(longest)]
    return _stage(lanes, schedule, size)


def _checked(groups: Sequence[Sequence[int]]) -> int:
    ranks = sorted(rank for g in groups for rank in g)
    if not ranks or ranks != list(range(len(ranks))):
        raise ArgumentError(
            f"groups must have each rank from 0 to {len(ranks) - 1} once, got {[list(g) for g in groups]}"
        )
    return len(ranks)


def _stage(groups: Sequence[Sequence[int]], schedule: Part, size: int) -> Stage:
    groups = tuple(g for g in groups if len(g))
    if isinstance(schedule, Schedule):
        schedules = (schedule,) * len(groups)
    else:
        made = {n: schedule(n) for n in {len(g) for g in groups}}
        schedules = tuple(made[len(g)] for g in groups)
    for group, part in zip(groups, schedules, strict=True):
        if part.size != len(group):
            raise ArgumentError(
                f"a schedule for {part.size} ranks ({part.algorithm} {part.collective}) cannot run in a "
                f"group of {len(group)}: {list(group)}; pass a function from a group's size to a schedule"
            )
        if part.collective == "alltoall":
            raise ArgumentError("alltoall cannot be a stage: it changes which block is whose")
    return Stage(groups, schedules, size)


def stack(collective: str, stages: Sequence[Stage], root: int | None, algorithm: str) -> Schedule:
    """Puts stages one after the other; ``then`` is its face and tells more.

    Raises:
        ArgumentError: The ranks of a group do not hold equally much of the message.
    """
    kind = COLLECTIVES[collective]
    size = stages[0].size
    active, units = _amounts(kind, stages, size, root)
    chunks = lcm(*units, size if kind.blocks else 1)
    aligned = all(s.aligned for stage in stages for s in stage.schedules)
    shape = _Shape(kind, tuple(stages), root, size, chunks, tuple(active))
    seats = [
        {rank: (g, i) for g, group in enumerate(s.groups) for i, rank in enumerate(group)} for s in stages
    ]
    lengths = [
        max((len(s.program(0).steps) for s in {id(s): s for s in stage.schedules}.values()), default=0)
        if aligned
        else 0
        for stage in stages
    ]

    @lru_cache(maxsize=4096)
    def held(rank: int, stage: int) -> Sequence[int]:
        """The chunks that ``rank`` holds before ``stage``."""
        if stage == 0:
            return shape.first_held(rank)
        group, place = seats[stage - 1][rank]
        if not active[stage - 1][group]:
            return held(rank, stage - 1)
        return _after(stages[stage - 1].schedules[group], place, message(stage - 1, group))

    @lru_cache(maxsize=4096)
    def message(stage: int, group: int) -> Sequence[int]:
        """The chunks that the schedule of a group works on."""
        members, schedule = stages[stage].groups[group], stages[stage].schedules[group]
        if _joins(schedule):
            return _compact([chunk for member in members for chunk in held(member, stage)])
        return held(members[_source(schedule)], stage)

    def make(rank: int) -> Program:
        own = [(s, *seats[s][rank]) for s in range(len(stages))]
        busy = [s for s, group, _ in own if active[s][group]]
        homes = {
            s: shape.homes(
                rank,
                stages[s].schedules[group],
                place,
                message(s, group),
                held(rank, s),
                first=s == busy[0],
                last=s == busy[-1],
            )
            for s, group, place in own
            if s in busy
        }
        stored = any(result and result[0] is Buffer.SCRATCH for _, result in homes.values())
        steps: list[Step] = []
        for s, group, place in own:
            mine: tuple[Step, ...] = ()
            if s in homes:
                part = stages[s].schedules[group]
                embedding = shape.embedding(rank, s, group, message(s, group), homes[s], chunks * stored)
                mine = embedding.program(part.program(place)).steps
            steps.extend(mine)
            steps.extend([Step()] * (lengths[s] - len(mine)))
        return Program(rank, tuple(steps))

    return Schedule(collective, algorithm, size, chunks, make, root, aligned)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The whole that stages are stacked into."""

    kind: Collective
    stages: tuple[Stage, ...]
    root: int | None
    size: int
    chunks: int
    active: tuple[tuple[bool, ...], ...]

    def _buffer_chunks(self, buffer: Buffer, rank: int) -> int:
        return self.kind.buffer_chunks(buffer, rank, self.size, self.chunks, self.root)

    def first_held(self, rank: int) -> Sequence[int]:
        """What ``rank`` holds before the first stage."""
        count = self._buffer_chunks(Buffer.INPUT, rank)
        if count in (0, self.chunks):
            return range(count)
        return range(rank * count, (rank + 1) * count)

    def homes(
        self,
        rank: int,
        part: Schedule,
        place: int,
        message: Sequence[int],
        held: Sequence[int],
        first: bool,
        last: bool,
    ) -> tuple[Home | None, Home | None]:
        """Where the INPUT and OUTPUT of the schedule of one stage lie, for one rank of it."""
        kind = COLLECTIVES[part.collective]
        outputs = self._buffer_chunks(Buffer.OUTPUT, rank)
        work = Buffer.OUTPUT if outputs == self.chunks else Buffer.SCRATCH
        given: Home | None = None
        result: Home | None = None
        if kind.has_input(place, part.root):
            given = (work, held)
            if first:
                whole = self._buffer_chunks(Buffer.INPUT, rank) == self.chunks
                given = (Buffer.INPUT, held if whole else range(len(held)))
        if kind.has_output(place, part.root):
            after = _after(part, place, message)
            result = (work, after)
            if last and 0 < outputs < self.chunks:
                result = (Buffer.OUTPUT, self._own_block(rank, after, outputs))
        return given, result

    def _own_block(self, rank: int, after: Sequence[int], outputs: int) -> Sequence[int]:
        block = range(rank * outputs, (rank + 1) * outputs)
        if list(after) != list(block):
            raise ArgumentError(
                f"the stages leave rank {rank} with chunks {list(after)} of the message, but its result in a "
                f"{self.kind.name} is its own block, chunks {block.start} to {block.stop - 1}"
            )
        return range(outputs)

    def embedding(
        self,
        rank: int,
        stage: int,
        group: int,
        message: Sequence[int],
        homes: tuple[Home | None, Home | None],
        scratch_base: int,
    ) -> Embedding:
        """How the schedule of one group lies in the whole, for one rank."""
        part = self.stages[stage].schedules[group]
        factor = len(message) // part.chunks
        period = COLLECTIVES[part.collective].per_block(part.size, part.chunks) * factor
        return Embedding(
            rank=rank,
            peers=self.stages[stage].groups[group],
            factor=factor,
            message=message,
            given=homes[0],
            result=homes[1],
            chunks=self.chunks,
            scratch_base=scratch_base,
            cuts=cut_places(message, self.chunks, period),
            period=period,
        )


def _joins(schedule: Schedule) -> bool:
    kind = COLLECTIVES[schedule.collective]
    return kind.blocks and kind.input_blocks(2) == 1


def _from_root(schedule: Schedule) -> bool:
    return not COLLECTIVES[schedule.collective].has_input(-1, schedule.root)


def _source(schedule: Schedule) -> int:
    """A rank of the group that holds what the schedule works on."""
    return (schedule.root or 0) if _from_root(schedule) else 0


def _after(schedule: Schedule, place: int, message: Sequence[int]) -> Sequence[int]:
    """The chunks that one rank of a group holds after the group's schedule."""
    kind = COLLECTIVES[schedule.collective]
    if not kind.has_output(place, schedule.root):
        return range(0)
    if kind.blocks and kind.output_blocks(2) == 1:
        length = len(message) // schedule.size
        return message[place * length : (place + 1) * length]
    return message


def _compact(chunks: list[int]) -> Sequence[int]:
    if chunks and all(b == a + 1 for a, b in pairwise(chunks)):
        return range(chunks[0], chunks[-1] + 1)
    return chunks


def _amounts(
    kind: Collective, stages: Sequence[Stage], size: int, root: int | None
) -> tuple[list[tuple[bool, ...]], list[int]]:
    """Which groups have work in each stage, and numbers that the whole's chunks must be multiples of."""
    share = Fraction(1, size) if kind.blocks and kind.input_blocks(2) == 1 else Fraction(1)
    holds = [share if kind.has_input(rank, root) else Fraction(0) for rank in range(size)]
    active = []
    units = {1}
    for stage in stages:
        busy = []
        for group, schedule in zip(stage.groups, stage.schedules, strict=True):
            amount = _message_amount(schedule, group, holds)
            busy.append(amount > 0)
            if not amount:
                continue
            units.add((schedule.chunks / amount).numerator)
            part = COLLECTIVES[schedule.collective]
            one_block = part.blocks and part.output_blocks(2) == 1
            for place, rank in enumerate(group):
                has = part.has_output(place, schedule.root)
                holds[rank] = (amount / len(group) if one_block else amount) if has else Fraction(0)
        active.append(tuple(busy))
    return active, sorted(units)


def _message_amount(schedule: Schedule, group: Sequence[int], holds: Sequence[Fraction]) -> Fraction:
    if _from_root(schedule):
        return holds[group[_source(schedule)]]
    amounts = {holds[rank] for rank in group}
    if len(amounts) > 1:
        raise ArgumentError(
            f"the ranks {list(group)} cannot {schedule.collective}: before that stage they hold different "
            f"parts of the message, {', '.join(str(holds[rank]) for rank in group)}"
        )
    amount = amounts.pop()
    return amount * len(group) if _joins(schedule) else amount
