"""Direct: every rank deals with every other itself. One or two steps; for small messages and few ranks.

::

    0 <--> 1
    ^ \\  / ^       all pairs at once: n-1 messages out of and into every rank, in one step
    |  ><  |
    v /  \\ v
    3 <--> 2

Sums are made in the order of ranks, 0 first, wherever they are made: one_shot makes them everywhere and all
ranks still end with the same bits; two_shot makes each in one place and ends with those same bits too.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), on all-to-all (posting all at once, and pairwise exchange).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flagcx.schedule.compose import ChunkTransfer, recv, reverse, schedule_of, send
from flagcx.schedule.model import (
    Buffer,
    Copy,
    Local,
    Program,
    Recv,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
    Transfer,
    span_of,
)
from flagcx.schedule.pattern import check

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def _others(size: int, rank: int) -> Iterator[int]:
    """All other ranks from the next one on, so that not all ranks begin with the same one."""
    return ((rank + i) % size for i in range(1, size))


def _arrival(source: int, rank: int, chunks: int, first: int, count: int) -> Span:
    """Where ``rank`` keeps chunks ``first`` to ``first + count`` of what ``source`` sent, in SCRATCH."""
    slot = source if source < rank else source - 1
    return span_of(SCRATCH, slot * chunks + first, count)


def _add_in_rank_order(size: int, rank: int, own: Span, result: Span, arrived) -> tuple[Local, ...]:
    """Local work: result = (..((x0 + x1) + x2) + ..), where ``own`` is x of ``rank``.

    In a call in place ``own`` and ``result`` are the same memory, so it must not be written before x of
    ``rank`` has been added.
    """
    if rank == 0:
        return (Copy(own, result), *(Reduce(arrived(q), result) for q in range(1, size)))
    total = arrived(0)
    added = (Reduce(own if q == rank else arrived(q), total) for q in range(1, size))
    return (*added, Copy(total, result))


def one_shot_allreduce(size: int) -> Schedule:
    """Every rank sends all it has to every other; each adds everything up itself, in the order of ranks.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 1. Sent by each rank: the message n-1 times; SCRATCH has n-1 messages. All ranks end with
        the same bits. Any number of ranks.
    """
    check("allreduce", size, 1)
    return Schedule("allreduce", "one_shot", size, 1, partial(_one_shot, size), aligned=True)


def _one_shot(size: int, rank: int) -> Program:
    arrived = partial(_arrival, rank=rank, chunks=1, first=0, count=1)
    own, result = span_of(INPUT, 0), span_of(OUTPUT, 0)
    transfers: list[Transfer] = [Send(own, q) for q in _others(size, rank)]
    transfers += [Recv(arrived(q), q) for q in _others(size, rank)]
    return Program(rank, (Step(tuple(transfers), _add_in_rank_order(size, rank, own, result, arrived)),))


def two_shot_allreduce(size: int) -> Schedule:
    """A direct reduce_scatter, then a direct allgather.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2. Sent by each rank: 2(n-1)/n of the message, the least possible. All ranks end with the
        bits that one_shot ends with. Any number of ranks.
    """
    check("allreduce", size, size)
    return Schedule("allreduce", "two_shot", size, size, partial(_two_shot, size), aligned=True)


def _two_shot(size: int, rank: int) -> Program:
    block = span_of(OUTPUT, rank)
    transfers: list[Transfer] = [Send(block, q) for q in _others(size, rank)]
    transfers += [Recv(span_of(OUTPUT, q), q) for q in _others(size, rank)]
    return Program(rank, (_collect(size, 1, rank, block), Step(tuple(transfers))))


def _collect(size: int, pieces: int, rank: int, result: Span) -> Step:
    """Block q of every rank to rank q, which adds them up in the order of ranks."""
    first = rank * pieces
    arrived = partial(_arrival, rank=rank, chunks=size * pieces, first=first, count=pieces)
    transfers: list[Transfer] = [Send(span_of(INPUT, q * pieces, pieces), q) for q in _others(size, rank)]
    transfers += [Recv(arrived(q), q) for q in _others(size, rank)]
    own = span_of(INPUT, first, pieces)
    return Step(tuple(transfers), _add_in_rank_order(size, rank, own, result, arrived))


def direct_reduce_scatter(size: int) -> Schedule:
    """Every rank sends each block straight to its owner, which adds up in the order of ranks.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 1. Sent by each rank: (n-1)/n of the message, the least possible. Any number of ranks;
        blocks of any sizes.
    """
    check("reduce_scatter", size, size)
    return Schedule("reduce_scatter", "direct", size, size, partial(_reduce_scatter, size), aligned=True)


def _reduce_scatter(size: int, rank: int) -> Program:
    return Program(rank, (_collect(size, 1, rank, span_of(OUTPUT, 0)),))


def direct_reduce(size: int, root: int = 0) -> Schedule:
    """Every rank sends all it has to the root, which adds up in the order of ranks.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.

    Returns:
        Steps: 1. Sent by each rank but the root: the message once; the root has n-1 messages in SCRATCH.
        Any number of ranks.
    """
    check("reduce", size, 1, root)
    return Schedule("reduce", "direct", size, 1, partial(_reduce, size, root), root, aligned=True)


def _reduce(size: int, root: int, rank: int) -> Program:
    own = span_of(INPUT, 0)
    if rank != root:
        return Program(rank, (Step((Send(own, root),)),))
    arrived = partial(_arrival, rank=rank, chunks=1, first=0, count=1)
    transfers = tuple(Recv(arrived(q), q) for q in _others(size, rank))
    return Program(rank, (Step(transfers, _add_in_rank_order(size, rank, own, span_of(OUTPUT, 0), arrived)),))


def _to_all(size: int, rank: int) -> Iterator[ChunkTransfer]:
    for peer in _others(size, rank):
        yield send(0, peer, rank)
        yield recv(0, peer, peer)


def direct_allgather(size: int) -> Schedule:
    """Every rank sends its block to every other.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 1. Sent by each rank: (n-1)/n of the message, the least possible. Any number of ranks;
        blocks of any sizes.
    """
    return schedule_of("allgather", "direct", size, size, min(size - 1, 1), partial(_to_all, size))


def _from_root(size: int, root: int, block: bool, rank: int) -> Iterator[ChunkTransfer]:
    if rank != root:
        yield recv(0, root, rank if block else 0)
    else:
        yield from (send(0, peer, peer if block else 0) for peer in _others(size, root))


def direct_broadcast(size: int, root: int = 0) -> Schedule:
    """The root sends the message to every other rank.

    Args:
        size: Number of ranks.
        root: The rank that has the message.

    Returns:
        Steps: 1. Sent by the root: the message n-1 times; by others nothing. Any number of ranks.
    """
    transfers = partial(_from_root, size, root, False)
    return schedule_of("broadcast", "direct", size, 1, min(size - 1, 1), transfers, root)


def direct_scatter(size: int, root: int = 0) -> Schedule:
    """The root sends every other rank its block.

    Args:
        size: Number of ranks.
        root: The rank that has all blocks.

    Returns:
        Steps: 1. Sent by the root: (n-1)/n of the message; by others nothing; both the least possible.
        Any number of ranks; blocks of any sizes.
    """
    transfers = partial(_from_root, size, root, True)
    return schedule_of("scatter", "direct", size, size, min(size - 1, 1), transfers, root)


def direct_gather(size: int, root: int = 0) -> Schedule:
    """Every rank sends its block to the root.

    Args:
        size: Number of ranks.
        root: The rank that gets all blocks.

    Returns:
        Steps: 1. Sent by each rank but the root: 1/n of the message, the least possible. Any number of
        ranks; blocks of any sizes.
    """
    return reverse(direct_scatter(size, root))


def direct_alltoall(size: int) -> Schedule:
    """Every rank sends every other its block, all at once.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 1. Sent by each rank: (n-1)/n of the message, the least possible. Any number of ranks;
        blocks of any sizes.
    """
    check("alltoall", size, size)
    return Schedule("alltoall", "direct", size, size, partial(_alltoall, size), aligned=True)


def _alltoall(size: int, rank: int) -> Program:
    transfers: list[Transfer] = [Send(span_of(INPUT, q), q) for q in _others(size, rank)]
    transfers += [Recv(span_of(OUTPUT, q), q) for q in _others(size, rank)]
    return Program(rank, (Step(tuple(transfers), (Copy(span_of(INPUT, rank), span_of(OUTPUT, rank)),)),))


def pairwise_alltoall(size: int) -> Schedule:
    """In step i every rank sends to the one i further on, so each link carries one message at a time.

    Args:
        size: Number of ranks.

    Returns:
        Steps: n-1. Sent by each rank: (n-1)/n of the message, the least possible. Any number of ranks;
        blocks of any sizes.
    """
    check("alltoall", size, size)
    return Schedule("alltoall", "pairwise", size, size, partial(_pairwise, size), aligned=True)


def _pairwise(size: int, rank: int) -> Program:
    own = (Copy(span_of(INPUT, rank), span_of(OUTPUT, rank)),)
    steps = [Step((), own)] if size == 1 else []
    for i in range(1, size):
        target, source = (rank + i) % size, (rank - i) % size
        transfers = (Send(span_of(INPUT, target), target), Recv(span_of(OUTPUT, source), source))
        steps.append(Step(transfers, own if i == 1 else ()))
    return Program(rank, tuple(steps))
