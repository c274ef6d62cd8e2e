"""Recursive doubling and halving: partners whose numbers differ in one bit exchange what they have.

::

    step 0:  0-1  2-3  4-5  6-7
    step 1:  0-2  1-3  4-6  5-7
    step 2:  0-4  1-5  2-6  3-7

That needs a power of two. Of n = p + e ranks, p the power, the last e are folded: rank p + i first gives
what it has to rank i, which stands for both, and gets its result from it at the end. This costs two more
steps. (``bruck`` does without, where the pairing is not wanted for its own sake.)

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), on allgather, reduce-scatter and allreduce; the folding and the
halving of the vector: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from flagcx.algorithms.moves import Move, backwards, later, schedule_of
from flagcx.schedule.model import Recv, RecvReduce, Schedule, Send


def core(size: int) -> tuple[int, int, int]:
    """The largest power of two in ``size``, its exponent, and the number of ranks left over."""
    exponent = size.bit_length() - 1
    return 1 << exponent, exponent, size - (1 << exponent)


def _fold(size: int, chunks: int, rank: int) -> Iterator[Move]:
    """Round 0: the ranks left over give all that they have."""
    power, _, extra = core(size)
    if rank >= power:
        yield Move(0, Send, 0, chunks, rank - power)
    elif rank < extra:
        yield Move(0, RecvReduce, 0, chunks, rank + power)


def doubling_rounds(size: int) -> int:
    """Rounds of recursive doubling, and of the allgather and reduce_scatter here."""
    _, exponent, extra = core(size)
    return exponent + (2 if extra else 0)


def _doubling_moves(size: int, rank: int) -> Iterator[Move]:
    power, exponent, extra = core(size)
    first = 1 if extra else 0
    fold = list(_fold(size, 1, rank))
    yield from fold
    for k in range(exponent if rank < power else 0):
        partner = rank ^ (1 << k)
        yield Move(first + k, Send, 0, 1, partner)
        yield Move(first + k, RecvReduce, 0, 1, partner)
    yield from backwards(fold, doubling_rounds(size), Recv)


def recursive_doubling_allreduce(size: int) -> Schedule:
    """Partners exchange and add all that they have. For short messages.

    Both partners add the same two values, so all ranks end with the same bits (operations commute).

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, the least possible; else floor(log2 n) + 2. Sent by each rank:
        the message once in each step it takes part in. Any number of ranks.
    """
    moves = partial(_doubling_moves, size)
    return schedule_of("allreduce", "recursive_doubling", size, 1, doubling_rounds(size), moves)


def recursive_doubling_barrier(size: int) -> Schedule:
    """An allreduce of nothing.

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, else floor(log2 n) + 2. Sent by each rank: one message a step.
        Any number of ranks.
    """
    return schedule_of(
        "barrier", "recursive_doubling", size, 1, doubling_rounds(size), partial(_doubling_moves, size)
    )


def _halving_moves(size: int, pieces: int, rank: int) -> Iterator[Move]:
    """Fold, then halve: nearest partners first, since they exchange the most."""
    power, exponent, extra = core(size)
    yield from _fold(size, power * pieces, rank)
    start, stop = 0, power * pieces
    for k in range(exponent if rank < power else 0):
        partner = rank ^ (1 << k)
        now, middle = k + (1 if extra else 0), (start + stop) // 2
        lower, upper = (start, middle), (middle, stop)
        kept, given = (upper, lower) if rank >> k & 1 else (lower, upper)
        yield Move(now, Send, *given, partner)
        yield Move(now, RecvReduce, *kept, partner)
        start, stop = kept


def halving_doubling_rounds(size: int) -> int:
    """Rounds of the allreduce by halving and doubling."""
    _, exponent, extra = core(size)
    return 2 * (exponent + (1 if extra else 0))


def _halving_doubling_moves(size: int, rank: int) -> Iterator[Move]:
    rounds = halving_doubling_rounds(size)
    there = list(_halving_moves(size, 1, rank))
    return chain(there, backwards(there, rounds, Recv))


def halving_doubling_allreduce(size: int) -> Schedule:
    """Partners exchange halves, quarters, ... and add; then the same way back without adding.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 log2 n for powers of two p; else 2 floor(log2 n) + 2. Sent by each rank: 2(p-1)/p of the
        message, and the message once more by ranks that stand for two. Any number of ranks.
    """
    power, _, _ = core(size)
    moves = partial(_halving_doubling_moves, size)
    rounds = halving_doubling_rounds(size)
    return schedule_of("allreduce", "halving_doubling", size, power, rounds, moves)


def _allgather_moves(size: int, rank: int) -> Iterator[Move]:
    power, exponent, extra = core(size)
    if rank >= power:
        yield Move(0, Send, rank, rank + 1, rank - power)
        yield from later(_missing(size, rank, rank - power, Recv), doubling_rounds(size) - 1)
        return
    if rank < extra:
        yield Move(0, Recv, rank + power, rank + power + 1, rank + power)
    for k in range(exponent):
        partner = rank ^ (1 << k)
        for kind, who in ((Send, rank), (Recv, partner)):
            for start, stop in _held(size, who, 1 << k):
                yield Move(k + (1 if extra else 0), kind, start, stop, partner)
    if rank < extra:
        yield from later(_missing(size, rank + power, rank + power, Send), doubling_rounds(size) - 1)


def blocks_sent_by_rank_0(size: int) -> int:
    """Blocks that the busiest rank of the allgather sends."""
    power, exponent, extra = core(size)
    doubling = power - 1 + sum(min(1 << k, extra) for k in range(exponent))
    return doubling + (size - 1 if extra else 0)


def _held(size: int, rank: int, width: int) -> Iterator[tuple[int, int]]:
    """The blocks of a group of ``width`` ranks and of those folded on them."""
    power, _, extra = core(size)
    first = rank // width * width
    yield first, first + width
    if first < extra:
        yield power + first, power + min(first + width, extra)


def _missing(size: int, rank: int, peer: int, kind: type) -> Iterator[Move]:
    """All blocks but that of ``rank``, in round 0."""
    for start, stop in ((0, rank), (rank + 1, size)):
        if start < stop:
            yield Move(0, kind, start, stop, peer)


def recursive_doubling_allgather(size: int) -> Schedule:
    """Partners exchange all blocks that they have.

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, else floor(log2 n) + 2. Sent by each rank: (n-1)/n of the
        message, and as much again by ranks that stand for two. Any number of ranks; blocks of any sizes.
    """
    moves = partial(_allgather_moves, size)
    return schedule_of("allgather", "recursive_doubling", size, size, doubling_rounds(size), moves)


def halving_reduce_scatter(size: int) -> Schedule:
    """Recursive halving, the allgather backwards: partners exchange sums of half of what is left.

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, else floor(log2 n) + 2. Sent by each rank: (n-1)/n of the
        message; less by ranks that are folded at the end. Any number of ranks; blocks of any sizes.
    """
    moves = partial(_reduce_scatter_moves, size)
    return schedule_of("reduce_scatter", "halving_doubling", size, size, doubling_rounds(size), moves)


def _reduce_scatter_moves(size: int, rank: int) -> Iterator[Move]:
    return backwards(_allgather_moves(size, rank), doubling_rounds(size), RecvReduce)
