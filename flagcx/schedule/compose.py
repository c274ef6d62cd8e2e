"""Schedules made of schedules: one after the other, beside each other, with other ranks, in hierarchies.

All of it is lazy: a program of the whole is made from programs of the parts when it is asked for.

    then(reduce_scatter, allgather)                      an all-reduce
    beside(ring, tree, 0.75)                             ring on 3/4 of the message, tree on the rest
    relabel(ring, order)                                 the ring along another order of the ranks
    then(within(hosts, reduce_scatter), across(hosts, allreduce), within(hosts, allgather),
         collective="allreduce")                         a hierarchy
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import gcd

from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.embed import Embedding, Home, cut_places
from flagcx.schedule.hierarchy import Stage, across, stack, within
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Buffer, Program, Schedule, Step

__all__ = ["Stage", "across", "beside", "relabel", "then", "within"]

_THEN: dict[tuple[str, ...], str] = {
    ("reduce_scatter", "allgather"): "allreduce",
    ("reduce", "broadcast"): "allreduce",
    ("gather", "broadcast"): "allgather",
    ("scatter", "allgather"): "broadcast",
    ("reduce_scatter", "gather"): "reduce",
    ("reduce", "scatter"): "reduce_scatter",
}


def then(
    *parts: Schedule | Stage,
    collective: str | None = None,
    root: int | None = None,
    algorithm: str | None = None,
) -> Schedule:
    """Runs the parts one after the other: what one leaves in its OUTPUT, the next finds in its INPUT.

    No data is copied in between. From the second part on, each works in place on the whole's OUTPUT
    (on SCRATCH where a rank has none that is large enough), so a copy from INPUT to OUTPUT that a part
    begins with falls away. Chunks are cut finer where the parts disagree on their number. A part that
    has blocks must be fit for blocks of different sizes (``verify(part, uneven=True)``) if the whole
    has none, since an all-reduce of any count is cut into unequal blocks.

    Args:
        parts: Schedules of all ranks, or stages made by ``within`` and ``across``.
        collective: What the whole is. It may be left out for two schedules: reduce_scatter then
            allgather, or reduce then broadcast: allreduce; gather then broadcast: allgather; scatter then
            allgather: broadcast; reduce_scatter then gather: reduce; reduce then scatter: reduce_scatter.
        root: The root of the whole, if it has one. It may be left out where the only parts that have
            a root are schedules of all ranks.
        algorithm: A name for the whole; by default those of the parts, joined by "+".

    Returns:
        The schedule of the whole. It is aligned if all parts are.

    Raises:
        ArgumentError: The parts do not fit each other, or it is not clear what the whole is.

    Example:
        >>> from flagcx.algorithms.ring import allgather, reduce_scatter  # doctest: +SKIP
        >>> then(reduce_scatter(4), allgather(4)).collective  # doctest: +SKIP
        'allreduce'
    """
    if not parts:
        raise ArgumentError("then() needs at least one part")
    sizes = {p.size for p in parts}
    if len(sizes) > 1:
        raise ArgumentError(f"then() needs parts with the same number of ranks, got {sorted(sizes)}")
    if collective is None:
        names = tuple(p.collective if isinstance(p, Schedule) else "a stage" for p in parts)
        collective = _THEN.get(names)
        if collective is None:
            raise ArgumentError(f"{' then '.join(names)} is no collective known to then(); pass collective=")
    if COLLECTIVES[collective].rooted:
        root = _root(parts) if root is None else root
    elif root is not None:
        raise ArgumentError(f"{collective} has no root, got root={root}")
    whole = [within([range(p.size)], p) if isinstance(p, Schedule) else p for p in parts]
    if algorithm is None:
        algorithm = "+".join(dict.fromkeys(p.algorithm for p in parts))
    return stack(collective, whole, root, algorithm)


def _root(parts: Sequence[Schedule | Stage]) -> int:
    roots = {p.root for p in parts if isinstance(p, Schedule) and p.root is not None}
    if len(roots) != 1:
        raise ArgumentError(
            f"then() cannot tell the root of the whole from the parts' roots {sorted(roots)}; pass root="
        )
    return roots.pop()


def beside(
    a: Schedule, b: Schedule, share: float | Fraction = 0.5, *, algorithm: str | None = None
) -> Schedule:
    """Runs two schedules of one collective at once, ``a`` on a part of the message, ``b`` on the rest.

    Step k of the whole is step k of ``a`` and step k of ``b`` together. That is only right if matched
    sends and receives are in steps of the same number; a schedule that does not say so of itself
    (``Schedule.aligned``) is put on levels first, for which all of its programs are made once.

    Args:
        a: Gets the first chunks of the message (of each block, if the collective has blocks).
        b: Gets the others. It has the collective, size and root of ``a``.
        share: The part of the message that ``a`` gets, above 0 and below 1. A float is rounded to a
            fraction with a denominator of at most 64.
        algorithm: A name for the whole; by default those of the two, joined by "|".

    Returns:
        An aligned schedule.

    Raises:
        ArgumentError: The two are of different collectives, sizes or roots, or the share is out of range.

    Example:
        >>> beside(ring(8), tree(8), 0.75).chunks  # doctest: +SKIP
        32
    """
    facts = [(s.collective, s.size, s.root) for s in (a, b)]
    if facts[0] != facts[1]:
        raise ArgumentError(
            f"beside() needs two schedules of the same collective, size and root, got {facts}"
        )
    if not 0 < share < 1:
        raise ArgumentError(f"beside() needs a share above 0 and below 1, got {share}")
    part = share if isinstance(share, Fraction) else Fraction(share).limit_denominator(64)
    part = min(max(part, Fraction(1, 64)), Fraction(63, 64)) if not isinstance(share, Fraction) else part
    kind = COLLECTIVES[a.collective]
    blocks = a.size if kind.blocks else 1
    # a has x of its own chunks in a block, b has y: find the least factors f, g with f x : g y = part : rest.
    x, y = a.chunks // blocks, b.chunks // blocks
    f, g = part.numerator * y, (part.denominator - part.numerator) * x
    f, g = f // gcd(f, g), g // gcd(f, g)
    of_a, of_b = f * x, g * y
    per_block = of_a + of_b
    chunks = per_block * blocks

    @cache
    def leveled() -> tuple[Schedule, Schedule]:
        return tuple(s if s.aligned else levels(s) for s in (a, b))  # type: ignore[return-value]

    @cache
    def messages() -> tuple[Sequence[int], Sequence[int]]:
        return (
            _part_of_blocks(blocks, per_block, 0, of_a),
            _part_of_blocks(blocks, per_block, of_a, of_b),
        )

    def make(rank: int) -> Program:
        steps = []
        for schedule, message, factor, first in zip(leveled(), messages(), (f, g), (0, of_a), strict=True):
            period = schedule.chunks * factor // blocks
            one = range(first, first + period)
            embedding = Embedding(
                rank=rank,
                peers=range(a.size),
                factor=factor,
                message=message,
                given=(Buffer.INPUT, message if kind.input_blocks(a.size) > 1 else one),
                result=(Buffer.OUTPUT, message if kind.output_blocks(a.size) > 1 else one),
                chunks=chunks,
                scratch_base=0,
                cuts=cut_places(message, chunks, period),
                period=period,
            )
            steps.append(embedding.program(schedule.program(rank)).steps)
        return Program(rank, _side_by_side(*steps))

    name = algorithm or "|".join(dict.fromkeys((a.algorithm, b.algorithm)))
    return Schedule(a.collective, name, a.size, chunks, make, a.root, aligned=True)


def _part_of_blocks(blocks: int, per_block: int, first: int, count: int) -> Sequence[int]:
    if blocks == 1:
        return range(first, first + count)
    return [q * per_block + first + p for q in range(blocks) for p in range(count)]


def _side_by_side(a: tuple[Step, ...], b: tuple[Step, ...]) -> tuple[Step, ...]:
    merged = [Step(s.transfers + t.transfers, s.local + t.local) for s, t in zip(a, b, strict=False)]
    return tuple(merged) + a[len(b) :] + b[len(a) :]


def relabel(schedule: Schedule, order: Sequence[int], *, algorithm: str | None = None) -> Schedule:
    """Gives the ranks other numbers: rank ``r`` of ``schedule`` becomes rank ``order[r]``.

    Blocks belong to ranks, so block ``q`` becomes block ``order[q]`` wherever it lies, in SCRATCH too.

    Args:
        schedule: Any schedule.
        order: A permutation of the ranks.
        algorithm: A name for the result; by default that of ``schedule``.

    Returns:
        A schedule of the same collective, whose root is ``order[schedule.root]``.

    Raises:
        ArgumentError: ``order`` is no permutation of the ranks.

    Example:
        >>> relabel(broadcast(4, root=0), [2, 3, 0, 1]).root  # doctest: +SKIP
        2
    """
    size, chunks = schedule.size, schedule.chunks
    order = tuple(order)
    if sorted(order) != list(range(size)):
        raise ArgumentError(f"relabel() needs each rank from 0 to {size - 1} once, got order={order}")
    original = {rank: r for r, rank in enumerate(order)}
    kind = COLLECTIVES[schedule.collective]
    period = kind.per_block(size, chunks)

    @cache
    def message() -> Sequence[int]:
        if not kind.blocks or order == tuple(range(size)):
            return range(chunks)
        return [q * period + p for q in order for p in range(period)]

    @cache
    def cuts() -> Sequence[int]:
        return cut_places(message(), chunks, period)

    def home(buffer: Buffer, blocks: int) -> Home:
        return buffer, (message() if blocks > 1 else range(period))

    def make(rank: int) -> Program:
        return Embedding(
            rank=rank,
            peers=order,
            factor=1,
            message=message(),
            given=home(Buffer.INPUT, kind.input_blocks(size)),
            result=home(Buffer.OUTPUT, kind.output_blocks(size)),
            chunks=chunks,
            scratch_base=0,
            cuts=cuts(),
            period=period,
        ).program(schedule.program(original[rank]))

    root = None if schedule.root is None else order[schedule.root]
    return Schedule(
        schedule.collective, algorithm or schedule.algorithm, size, chunks, make, root, schedule.aligned
    )
