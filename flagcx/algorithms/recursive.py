"""Recursive doubling and halving: partners whose numbers differ in one bit exchange all that they have.

::

    step 0:  0-1  2-3  4-5  6-7
    step 1:  0-2  1-3  4-6  5-7
    step 2:  0-4  1-5  2-6  3-7

That needs a power of two. Of n = p + e ranks, p the power, the last e are folded: rank p + i first sends all
that it has to rank i, which stands for both, and receives its result from rank i at the end. This costs two
more steps. (``bruck`` does without, where the pairing is not wanted for its own sake.)

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), on allgather, reduce-scatter and allreduce; the folding and the
halving of the vector: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from flagcx.schedule.compose import ChunkTransfer, recv, recv_reduce, reverse, schedule_of, send
from flagcx.schedule.model import Buffer, Copy, Program, Recv, Reduce, Schedule, Send, Step, span_of
from flagcx.schedule.pattern import backwards, check


def core(size: int) -> tuple[int, int, int]:
    """The largest power of two in ``size``, its exponent, and the number of ranks left over."""
    exponent = size.bit_length() - 1
    return 1 << exponent, exponent, size - (1 << exponent)


def _fold(size: int, chunks: int, rank: int) -> Iterator[ChunkTransfer]:
    """Round 0: the ranks left over send all that they have."""
    power, _, extra = core(size)
    if rank >= power:
        yield send(0, rank - power, 0, chunks)
    elif rank < extra:
        yield recv_reduce(0, rank + power, 0, chunks)


def _rounds(size: int) -> int:
    """Rounds of the allgather and reduce_scatter here."""
    _, exponent, extra = core(size)
    return exponent + (2 if extra else 0)


def _meet(rank: int, peer: int, now: Buffer, sends: bool = True) -> tuple[Step, Buffer]:
    """Gets all that ``peer`` has and combines it with this rank's own, that of the lower rank first.

    Args:
        rank: This rank.
        peer: Its partner.
        now: Where this rank's own lies.
        sends: Whether the partner gets it too, and so makes the same of the same two values.

    Returns:
        The step, and where the result lies.
    """
    apart = Buffer.OUTPUT if now is Buffer.SCRATCH else Buffer.SCRATCH
    own, arrived = span_of(now, 0), span_of(apart, 0)
    transfers = (*((Send(own, peer),) if sends else ()), Recv(arrived, peer))
    if peer < rank:
        return Step(transfers, (Reduce(own, arrived),)), apart
    if now is not Buffer.INPUT:
        return Step(transfers, (Reduce(arrived, own),)), now
    result = span_of(Buffer.OUTPUT, 0)
    return Step(transfers, (Copy(own, result), Reduce(arrived, result))), Buffer.OUTPUT


def _doubling(size: int, rank: int) -> Program:
    power, exponent, extra = core(size)
    now = Buffer.INPUT
    steps: list[Step] = []
    if rank >= power:
        steps = [Step((Send(span_of(now, 0), rank - power),)), *[Step()] * exponent]
        return Program(rank, (*steps, Step((Recv(span_of(Buffer.OUTPUT, 0), rank - power),))))
    if extra:
        step, now = _meet(rank, rank + power, now, sends=False) if rank < extra else (Step(), now)
        steps.append(step)
    for k in range(exponent):
        step, now = _meet(rank, rank ^ (1 << k), now)
        steps.append(step)
    if extra:
        steps.append(Step((Send(span_of(now, 0), rank + power),) if rank < extra else ()))
    if now is not Buffer.OUTPUT:
        last = steps.pop() if steps else Step()
        copied = Copy(span_of(now, 0), span_of(Buffer.OUTPUT, 0))
        steps.append(Step(last.transfers, (*last.local, copied)))
    return Program(rank, tuple(steps))


def _doubled(collective: str, size: int) -> Schedule:
    check(collective, size, 1)
    return Schedule(collective, "recursive_doubling", size, 1, partial(_doubling, size), aligned=True)


def recursive_doubling_allreduce(size: int) -> Schedule:
    """Partners exchange all that they have, and both combine it. For short messages.

    Both combine the same two values in the same order, that of the lower rank first, so all ranks end with
    the same bits.

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, the least possible; else floor(log2 n) + 2. Sent by each rank:
        the message once in each step it takes part in. Any number of ranks.
    """
    return _doubled("allreduce", size)


def recursive_doubling_barrier(size: int) -> Schedule:
    """An allreduce of nothing.

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, else floor(log2 n) + 2. Sent by each rank: one message a step.
        Any number of ranks.
    """
    return _doubled("barrier", size)


def _halving(size: int, rank: int) -> Iterator[ChunkTransfer]:
    """Fold, then halve: nearest partners first, since they exchange the most."""
    power, exponent, extra = core(size)
    yield from _fold(size, power, rank)
    start, stop = 0, power
    for now, k in enumerate(range(exponent if rank < power else 0), 1 if extra else 0):
        partner, middle = rank ^ (1 << k), (start + stop) // 2
        lower, upper = (start, middle), (middle, stop)
        kept, sent = (upper, lower) if rank >> k & 1 else (lower, upper)
        yield send(now, partner, *sent)
        yield recv_reduce(now, partner, *kept)
        start, stop = kept


def _halving_doubling(size: int, rounds: int, rank: int) -> Iterator[ChunkTransfer]:
    there = list(_halving(size, rank))
    return chain(there, backwards(there, rounds, Recv))


def halving_doubling_allreduce(size: int) -> Schedule:
    """Partners exchange halves, quarters, ... and add; then the same transfers backwards without adding.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 log2 n for powers of two p; else 2 floor(log2 n) + 2. Sent by each rank: 2(p-1)/p of the
        message, and the message once more by ranks that stand for two. Any number of ranks.
    """
    power, exponent, extra = core(size)
    rounds = 2 * (exponent + (1 if extra else 0))
    transfers = partial(_halving_doubling, size, rounds)
    return schedule_of("allreduce", "halving_doubling", size, power, rounds, transfers)


def _allgather(size: int, rank: int) -> Iterator[ChunkTransfer]:
    power, exponent, extra = core(size)
    last = _rounds(size) - 1
    if rank >= power:
        yield send(0, rank - power, rank)
        yield from (recv(last, rank - power, *run) for run in _all_but(size, rank))
        return
    if rank < extra:
        yield recv(0, rank + power, rank + power)
    for now, k in enumerate(range(exponent), 1 if extra else 0):
        partner = rank ^ (1 << k)
        yield from (send(now, partner, *run) for run in _held(size, rank, 1 << k))
        yield from (recv(now, partner, *run) for run in _held(size, partner, 1 << k))
    if rank < extra:
        yield from (send(last, rank + power, *run) for run in _all_but(size, rank + power))


def _held(size: int, rank: int, width: int) -> Iterator[tuple[int, int]]:
    """The blocks of a group of ``width`` ranks and of those folded on them."""
    power, _, extra = core(size)
    first = rank // width * width
    yield first, first + width
    if first < extra:
        yield power + first, power + min(first + width, extra)


def _all_but(size: int, rank: int) -> Iterator[tuple[int, int]]:
    """All blocks but that of ``rank``."""
    return ((start, stop) for start, stop in ((0, rank), (rank + 1, size)) if start < stop)


def recursive_doubling_allgather(size: int) -> Schedule:
    """Partners exchange all blocks that they have.

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, else floor(log2 n) + 2. Sent by each rank: (n-1)/n of the
        message, and as much again by ranks that stand for two. Any number of ranks; blocks of any sizes.
    """
    transfers = partial(_allgather, size)
    return schedule_of("allgather", "recursive_doubling", size, size, _rounds(size), transfers)


def halving_reduce_scatter(size: int) -> Schedule:
    """Recursive halving, the allgather backwards: partners exchange sums of half of the blocks left.

    Args:
        size: Number of ranks.

    Returns:
        Steps: log2 n for powers of two, else floor(log2 n) + 2. Sent by each rank: (n-1)/n of the
        message; less by ranks that are folded at the end. Any number of ranks; blocks of any sizes.
    """
    return reverse(recursive_doubling_allgather(size), algorithm="halving_doubling")
