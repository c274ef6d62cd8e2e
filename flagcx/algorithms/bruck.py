"""Bruck: distances double in every step, for any number of ranks, and no byte more than needed is sent.

Allgather for n = 5; a rank has the blocks of itself and of those after it::

    step 0:  r <- r+1   1 block:   r has r, r+1
    step 1:  r <- r+2   2 blocks:  r has r .. r+3
    step 2:  r <- r+4   1 block:   r has all five

Backwards it is a reduce_scatter, and both together an allreduce: 2 ceil(log2 n) steps and 2(n-1)/n of the
message sent by each rank, both the least possible, with no exception for n that are no powers of two.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997), on index (alltoall) and
concatenation (allgather). Its reverse: Traff, "Optimal, non-pipelined reduce-scatter and allreduce
algorithms" (2024), arXiv 2410.14234.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flagcx.schedule.compose import ChunkTransfer, arc, doublings, recv, reverse, schedule_of, send, then
from flagcx.schedule.model import Buffer, Copy, Program, Recv, Schedule, Send, Span, Step, span_of
from flagcx.schedule.pattern import check


def _allgather(size: int, rank: int) -> Iterator[ChunkTransfer]:
    """Block b of rank b to all."""
    for now in range(doublings(size)):
        distance = 1 << now
        count = min(distance, size - distance)
        for start, stop in arc(rank, count, size):
            yield send(now, (rank - distance) % size, start, stop)
        for start, stop in arc(rank + distance, count, size):
            yield recv(now, (rank + distance) % size, start, stop)


def bruck_allgather(size: int) -> Schedule:
    """Every rank receives from ever further on the blocks that the other rank has and it lacks.

    Args:
        size: Number of ranks.

    Returns:
        Steps: ceil(log2 n). Sent by each rank: (n-1)/n of the message. Both are the least possible. Any
        number of ranks; blocks of any sizes. Blocks land where they belong, so nothing is rotated at
        the end.
    """
    return schedule_of("allgather", "bruck", size, size, doublings(size), partial(_allgather, size))


def bruck_reduce_scatter(size: int) -> Schedule:
    """The allgather backwards: sums of ever fewer blocks go ever shorter distances.

    Args:
        size: Number of ranks.

    Returns:
        Steps: ceil(log2 n). Sent by each rank: (n-1)/n of the message. Both are the least possible. Any
        number of ranks; blocks of any sizes.
    """
    return reverse(bruck_allgather(size))


def bruck_allreduce(size: int) -> Schedule:
    """Reduce_scatter, then allgather.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 ceil(log2 n). Sent by each rank: 2(n-1)/n of the message, the least possible. Any number
        of ranks.
    """
    return then(bruck_reduce_scatter(size), bruck_allgather(size))


def bruck_alltoall(size: int) -> Schedule:
    """Each block goes its distance in powers of two, together with all others that share the power.

    Args:
        size: Number of ranks.

    Returns:
        Steps: ceil(log2 n), the least possible, with one message each. Sent by each rank: about
        (log2 n)/2 of the message; blocks are packed in SCRATCH. Any number of ranks; blocks of one size.
    """
    check("alltoall", size, size)
    return Schedule("alltoall", "bruck", size, size, partial(_alltoall_program, size), aligned=True)


def _moving(size: int, bit: int) -> list[int]:
    """The distances below ``size`` that have ``bit`` set: the blocks that move in that step."""
    return [distance for distance in range(size) if distance & bit]


def _alltoall_program(size: int, rank: int) -> Program:
    """Blocks wait in SCRATCH, packed by the step in which they move next; ``slot`` has their places."""
    bits = [1 << k for k in range(doublings(size))]
    slot: dict[tuple[int, int], int] = {}
    for bit in bits:
        for distance in _moving(size, bit):
            slot[bit, distance] = len(slot)
    arrivals = len(slot)

    def next_place(distance: int, after: int) -> Span:
        """Where a block of this distance waits once the bits up to ``after`` are done."""
        for bit in bits:
            if bit > after and distance & bit:
                return span_of(Buffer.SCRATCH, slot[bit, distance])
        return span_of(Buffer.OUTPUT, (rank - distance) % size)

    packing = (
        Copy(span_of(Buffer.INPUT, (rank + distance) % size), next_place(distance, 0))
        for distance in range(size)
    )
    steps = [Step((), tuple(packing))]
    for bit in bits:
        blocks = _moving(size, bit)
        source = span_of(Buffer.SCRATCH, slot[bit, blocks[0]], len(blocks))
        landing = span_of(Buffer.SCRATCH, arrivals, len(blocks))
        transfers = (Send(source, (rank + bit) % size), Recv(landing, (rank - bit) % size))
        unpacking = (
            Copy(span_of(Buffer.SCRATCH, arrivals + i), next_place(distance, bit))
            for i, distance in enumerate(blocks)
        )
        steps.append(Step(transfers, tuple(unpacking)))
    return Program(rank, tuple(steps))
