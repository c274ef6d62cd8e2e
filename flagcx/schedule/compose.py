"""The vocabulary in which algorithms are written: transfers in rounds, and schedules made of schedules.

A new algorithm is a function of the number of ranks that returns a schedule. It is written from scratch, as
the transfers of each rank, or made of other schedules; the built-in algorithms are written in these same
words.

    schedule_of(collective, name, size, chunks, rounds, transfers)    from scratch, with
    send(round, peer, start, stop), recv(...), recv_reduce(...)       the transfers of one rank
    arc(first, count, size), doublings(size)                          blocks that go on at 0; log2, rounded up
    reverse(allgather)                     from the end to the start: a reduce_scatter
    then(reduce_scatter, allgather)        one after the other: an all-reduce
    beside(ring, tree, 0.75)               at once: the ring on 3/4 of the message, the tree on the rest
    relabel(ring, order)                   the same with other ranks: the ring along another order

All of it is lazy: a program is made when it is asked for, and of the parts' programs of that rank alone.

Example:
    An all-reduce round a ring. Block b starts at rank b + 1, goes once round, gathers what each rank adds,
    and ends at rank b; ``reverse`` sends it back the other way.

    >>> def my_reduce_scatter(size):
    ...     def transfers(rank):
    ...         following, previous = (rank + 1) % size, (rank - 1) % size
    ...         for step in range(size - 1):
    ...             yield send(step, following, (rank - 1 - step) % size)
    ...             yield recv_reduce(step, previous, (rank - 2 - step) % size)
    ...     return schedule_of("reduce_scatter", "mine", size, size, size - 1, transfers)
    >>> def my_allreduce(size):
    ...     return then(my_reduce_scatter(size), reverse(my_reduce_scatter(size)))

    >>> import flagcx
    >>> flagcx.register("mine", "allreduce", my_allreduce)  # verified here, for 1 to 9 ranks
    >>> from flagcx.algorithms import build
    >>> len(build("allreduce", "mine", 4).program(0).steps)
    7
    >>> flagcx.unregister("mine", "allreduce")
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import zip_longest
from math import gcd, lcm

from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES, Collective
from flagcx.schedule.embed import Embedding
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Buffer, Program, Schedule, Step
from flagcx.schedule.pattern import (
    ChunkTransfer,
    Pattern,
    arc,
    doublings,
    in_sequence,
    recv,
    recv_reduce,
    reverse,
    schedule_of,
    send,
)

__all__ = [
    "ChunkTransfer",
    "arc",
    "beside",
    "doublings",
    "recv",
    "recv_reduce",
    "relabel",
    "reverse",
    "schedule_of",
    "send",
    "then",
]


def then(*parts: Schedule, collective: str | None = None, algorithm: str | None = None) -> Schedule:
    """Runs the parts one after the other: the OUTPUT of one is the INPUT of the next.

    No data is copied in between: the whole is a pattern if all parts are; otherwise each part after the first
    works in place on the whole's OUTPUT (on SCRATCH where a rank has none that is large enough). Chunks are
    cut finer where the parts disagree on their number. A part that has blocks must serve blocks of different
    sizes (``verify(part, uneven=True)``) if the whole has none, since an all-reduce of any count is cut into
    unequal blocks.

    Args:
        parts: Schedules for the same ranks, where each begins with the data that the one before leaves: after
            a reduce_scatter each rank has its block, with which an allgather or a gather begins.
        collective: What the whole is, where another collective begins and ends alike (a barrier as reduce
            and broadcast); by default it follows from the first part and the last.
        algorithm: A name for the whole; by default those of the parts, joined by "+".

    Returns:
        The schedule of the whole. It is aligned if all parts are.

    Raises:
        ArgumentError: The parts do not fit each other, or the whole is no collective.

    Example:
        >>> from flagcx.algorithms import build
        >>> then(build("reduce_scatter", "ring", 4), build("allgather", "ring", 4)).collective
        'allreduce'
    """
    if not parts:
        raise ArgumentError("then() needs at least one part")
    size = parts[0].size
    if any(part.size != size for part in parts):
        sizes = sorted({part.size for part in parts})
        raise ArgumentError(f"then() needs parts with the same number of ranks, got {sizes}")
    kind, root = _whole(parts, collective)
    chunks = lcm(*(part.chunks for part in parts), size if kind.blocks else 1)
    name = algorithm or "+".join(dict.fromkeys(str(part.algorithm) for part in parts))
    patterns = [part.make for part in parts if isinstance(part.make, Pattern)]
    if len(patterns) == len(parts):
        rounds = sum(pattern.rounds for pattern in patterns)
        transfers = partial(in_sequence, patterns, chunks)
        return schedule_of(kind.name, name, size, chunks, rounds, transfers, root)
    make = partial(_in_sequence, parts, kind, chunks, root)
    return Schedule(kind.name, name, size, chunks, make, root, all(part.aligned for part in parts))


def _whole(parts: Sequence[Schedule], collective: str | None) -> tuple[Collective, int | None]:
    """The collective that parts make together, and its root."""
    names = " then ".join(part.collective for part in parts)
    kinds = [COLLECTIVES[part.collective] for part in parts]
    if any(kind.name == "alltoall" for kind in kinds):
        raise ArgumentError(f"{names}: alltoall cannot be a part of then(): it changes the blocks' owners")
    for number in range(1, len(parts)):
        left = _held(kinds[number - 1].after, parts[number - 1])
        wanted = _held(kinds[number].before, parts[number])
        if left != wanted:
            raise ArgumentError(
                f"{names}: the {parts[number].collective} begins with {wanted}, but the "
                f"{parts[number - 1].collective} before it leaves {left}"
            )
    ends = (kinds[0].before, kinds[-1].after)
    alike = [kind for kind in COLLECTIVES.values() if (kind.before, kind.after) == ends]
    for kind in alike:
        if collective in (None, kind.name) and kind.name != "alltoall":
            ended = [part.root for part, end in ((parts[0], ends[0]), (parts[-1], ends[1])) if end == "root"]
            return kind, ended[0] if ended else None
    raise ArgumentError(
        f"{names} is no {collective or 'collective'}: it begins with {_held(ends[0], parts[0])} and ends "
        f"with {_held(ends[1], parts[-1])}"
    )


def _held(where: str, part: Schedule) -> str:
    """Which ranks have how much of the message, for messages."""
    wholes = {"all": "all of the message on every rank", "each": "one block on each rank"}
    return wholes.get(where, f"all of the message on rank {part.root}")


def _in_sequence(
    parts: Sequence[Schedule], kind: Collective, chunks: int, root: int | None, rank: int
) -> Program:
    """The program of schedules that follow each other, of which some are no patterns."""
    size = parts[0].size
    in_output = kind.buffer_chunks(Buffer.OUTPUT, rank, size, chunks, root) == chunks
    work = Buffer.OUTPUT if in_output else Buffer.SCRATCH
    whole, own = range(chunks), range(rank * chunks // size, (rank + 1) * chunks // size)
    scratch_base = 0 if in_output or len(parts) == 1 else chunks
    steps: list[Step] = []
    for number, part in enumerate(parts):
        part_kind = COLLECTIVES[part.collective]
        source = (work, own if part_kind.before == "each" else whole) if number else None
        result = (work, own if part_kind.after == "each" else whole) if number < len(parts) - 1 else None
        embedding = Embedding(part, chunks, whole, range(size), scratch_base=scratch_base)
        steps.extend(embedding.program(rank, source, result).steps)
    return Program(rank, tuple(steps))


def beside(
    a: Schedule, b: Schedule, share: float | Fraction = 0.5, *, algorithm: str | None = None
) -> Schedule:
    """Runs two schedules of one collective at once, ``a`` on a part of the message, ``b`` on the rest.

    Step k of the whole is step k of ``a`` and step k of ``b`` together. That is only right if matched
    sends and receives are in steps of the same number; a schedule that is not marked
    ``aligned`` is put on levels first, for which all of its programs are made once.

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
    part = share
    if not isinstance(part, Fraction):
        part = min(max(Fraction(part).limit_denominator(64), Fraction(1, 64)), Fraction(63, 64))
    kind = COLLECTIVES[a.collective]
    blocks = a.size if kind.blocks else 1
    # a has x of its own chunks in a block, b has y: find the least factors f, g with f x : g y = part : rest.
    x, y = a.chunks // blocks, b.chunks // blocks
    f, g = part.numerator * y, (part.denominator - part.numerator) * x
    f, g = f // gcd(f, g), g // gcd(f, g)
    per_block = f * x + g * y
    chunks = per_block * blocks

    @cache
    def embeddings() -> list[Embedding]:
        return [
            Embedding(
                levels(s), chunks, _part_of_blocks(blocks, per_block, first, count), range(a.size), first
            )
            for s, first, count in ((a, 0, f * x), (b, f * x, g * y))
        ]

    def make(rank: int) -> Program:
        return Program(rank, _side_by_side(*(one.program(rank).steps for one in embeddings())))

    name = algorithm or "|".join(dict.fromkeys((a.algorithm, b.algorithm)))
    return Schedule(a.collective, name, a.size, chunks, make, a.root, aligned=True)


def _part_of_blocks(blocks: int, per_block: int, first: int, count: int) -> Sequence[int]:
    if blocks == 1:
        return range(first, first + count)
    return [q * per_block + first + p for q in range(blocks) for p in range(count)]


def _side_by_side(a: tuple[Step, ...], b: tuple[Step, ...]) -> tuple[Step, ...]:
    pairs = zip_longest(a, b, fillvalue=Step())
    return tuple(Step(s.transfers + t.transfers, s.local + t.local) for s, t in pairs)


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

    @cache
    def embedding() -> Embedding:
        message: Sequence[int] = range(chunks)
        if COLLECTIVES[schedule.collective].blocks and order != tuple(range(size)):
            period = chunks // size
            message = [q * period + p for q in order for p in range(period)]
        return Embedding(schedule, chunks, message, order)

    def make(rank: int) -> Program:
        return embedding().program(original[rank])

    root = None if schedule.root is None else order[schedule.root]
    return Schedule(
        schedule.collective, algorithm or schedule.algorithm, size, chunks, make, root, schedule.aligned
    )
