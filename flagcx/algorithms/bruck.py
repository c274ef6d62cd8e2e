"""Bruck: distances double in every step, for any number of ranks, and no byte more than needed is sent.

Allgather for n = 5; a rank has the blocks of itself and of those after it::

    step 0:  r <- r+1   1 block:   r has r, r+1
    step 1:  r <- r+2   2 blocks:  r has r .. r+3
    step 2:  r <- r+4   1 block:   r has all five

Backwards it is a reduce_scatter, and both together an allreduce: 2 ceil(log2 n) steps and 2(n-1)/n of the
message sent by each rank, both the least possible, with no exception for n that are no powers of two.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997), on index (alltoall) and
concatenation (allgather). Backwards: Traff, "Optimal, non-pipelined reduce-scatter and allreduce
algorithms" (2024), arXiv 2410.14234.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from flagcx.algorithms.moves import Move, arc, backwards, check, later, rounds_to_double, schedule_of
from flagcx.schedule.model import Buffer, Copy, Program, Recv, RecvReduce, Schedule, Send, Span, Step, span_of


def allgather_moves(size: int, rank: int) -> Iterator[Move]:
    """Block b of rank b to all."""
    for now in range(rounds_to_double(size)):
        distance = 1 << now
        count = min(distance, size - distance)
        for start, stop in arc(rank, count, size):
            yield Move(now, Send, start, stop, (rank - distance) % size)
        for start, stop in arc(rank + distance, count, size):
            yield Move(now, Recv, start, stop, (rank + distance) % size)


def reduce_scatter_moves(size: int, rank: int) -> Iterator[Move]:
    """The allgather backwards: block b, added up, to rank b."""
    return backwards(allgather_moves(size, rank), rounds_to_double(size), RecvReduce)


def _allreduce_moves(size: int, rank: int) -> Iterator[Move]:
    second = later(allgather_moves(size, rank), rounds_to_double(size))
    return chain(reduce_scatter_moves(size, rank), second)


def bruck_allgather(size: int) -> Schedule:
    """Every rank fetches from ever further on all that is there, or what it still lacks.

    Args:
        size: Number of ranks.

    Returns:
        Steps: ceil(log2 n). Sent by each rank: (n-1)/n of the message. Both are the least possible. Any
        number of ranks; blocks of any sizes. Blocks land where they belong, so nothing is turned round
        at the end.
    """
    moves = partial(allgather_moves, size)
    return schedule_of("allgather", "bruck", size, size, rounds_to_double(size), moves)


def bruck_reduce_scatter(size: int) -> Schedule:
    """The allgather backwards: sums of ever fewer blocks travel ever shorter ways.

    Args:
        size: Number of ranks.

    Returns:
        Steps: ceil(log2 n). Sent by each rank: (n-1)/n of the message. Both are the least possible. Any
        number of ranks; blocks of any sizes.
    """
    moves = partial(reduce_scatter_moves, size)
    return schedule_of("reduce_scatter", "bruck", size, size, rounds_to_double(size), moves)


def bruck_allreduce(size: int) -> Schedule:
    """Reduce_scatter, then allgather.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2 ceil(log2 n). Sent by each rank: 2(n-1)/n of the message, the least possible. Any number
        of ranks.
    """
    return schedule_of(
        "allreduce", "bruck", size, size, 2 * rounds_to_double(size), partial(_allreduce_moves, size)
    )


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


def travelling(size: int, bit: int) -> list[int]:
    """The distances below ``size`` that have ``bit`` set: the blocks that move in that step."""
    return [distance for distance in range(size) if distance & bit]


def blocks_moved(size: int) -> int:
    """Blocks that each rank sends in the alltoall, with those it passes on."""
    return sum(distance.bit_count() for distance in range(size))


def _alltoall_program(size: int, rank: int) -> Program:
    """Blocks wait packed by the step in which they move next; ``slot`` is where, in SCRATCH."""
    bits = [1 << k for k in range(rounds_to_double(size))]
    slot: dict[tuple[int, int], int] = {}
    for bit in bits:
        for distance in travelling(size, bit):
            slot[bit, distance] = len(slot)
    arrivals = len(slot)

    def next_place(distance: int, after: int) -> Span:
        """Where the block is to wait that goes ``distance``, once the bits up to ``after`` are done."""
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
        blocks = travelling(size, bit)
        source = span_of(Buffer.SCRATCH, slot[bit, blocks[0]], len(blocks))
        landing = span_of(Buffer.SCRATCH, arrivals, len(blocks))
        moves = (Send(source, (rank + bit) % size), Recv(landing, (rank - bit) % size))
        unpacking = (
            Copy(span_of(Buffer.SCRATCH, arrivals + i), next_place(distance, bit))
            for i, distance in enumerate(blocks)
        )
        steps.append(Step(moves, tuple(unpacking)))
    return Program(rank, tuple(steps))
