"""Direct: every rank exchanges messages with every other. One or two steps; for small messages, few ranks.

::

    0 <--> 1
    ^ \\  / ^       all pairs at once: n-1 messages out of and into every rank, in one step
    |  ><  |
    v /  \\ v
    3 <--> 2

Sums are made in the order of ranks, 0 first, wherever they are made: one_shot makes them on all ranks,
which still end with the same bits; two_shot makes each on one rank and ends with those same bits too.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), on all-to-all (posting all at once, and pairwise exchange).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


def _add_up(size: int, chunks: int, rank: int, result: Span, targets: Iterable[int] | None = None) -> Step:
    """Chunk ``q % chunks`` of every rank to each rank q of ``targets``, which adds up in the order of ranks.

    In a call in place ``result`` and this rank's part of INPUT are the same memory, so it is not written
    before that part has been added: result = (..((x0 + x1) + x2) + ..).
    """
    targets = range(size) if targets is None else targets
    transfers: list[Transfer] = [
        Send(span_of(INPUT, q % chunks), q) for q in _others(size, rank) if q in targets
    ]
    if rank not in targets:
        return Step(tuple(transfers))
    first = rank % chunks
    parts = [span_of(SCRATCH, (q if q < rank else q - 1) * chunks + first) for q in range(size)]
    transfers += [Recv(parts[q], q) for q in _others(size, rank)]
    parts[rank] = span_of(INPUT, first)
    total = result if rank == 0 else parts[0]
    added: list[Local] = [Reduce(part, total) for part in parts[1:]]
    local = (Copy(parts[0], result), *added) if rank == 0 else (*added, Copy(total, result))
    return Step(tuple(transfers), local)


def _exchange(size: int, rank: int, sent: Callable[[int], Span]) -> tuple[Transfer, ...]:
    """A span to each other rank, and from each its chunk of OUTPUT."""
    sends = (Send(sent(q), q) for q in _others(size, rank))
    return *sends, *(Recv(span_of(OUTPUT, q), q) for q in _others(size, rank))


def one_shot_allreduce(size: int) -> Schedule:
    """Every rank sends all it has to every other; each adds everything up itself, in the order of ranks.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 1. Sent by each rank: the message n-1 times; SCRATCH has n-1 messages. All ranks end with
        the same bits. Any number of ranks.
    """

    def make(rank: int) -> Program:
        return Program(rank, (_add_up(size, 1, rank, span_of(OUTPUT, 0)),))

    check("allreduce", size, 1)
    return Schedule("allreduce", "one_shot", size, 1, make, aligned=True)


def two_shot_allreduce(size: int) -> Schedule:
    """A direct reduce_scatter, then a direct allgather.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 2. Sent by each rank: 2(n-1)/n of the message, the least possible. All ranks end with the
        bits that one_shot ends with. Any number of ranks.
    """

    def make(rank: int) -> Program:
        block = span_of(OUTPUT, rank)
        return Program(rank, (_add_up(size, size, rank, block), Step(_exchange(size, rank, lambda q: block))))

    check("allreduce", size, size)
    return Schedule("allreduce", "two_shot", size, size, make, aligned=True)


def direct_reduce_scatter(size: int) -> Schedule:
    """Every rank sends each block straight to its owner, which adds up in the order of ranks.

    Args:
        size: Number of ranks.

    Returns:
        Steps: 1. Sent by each rank: (n-1)/n of the message, the least possible. Any number of ranks;
        blocks of any sizes.
    """

    def make(rank: int) -> Program:
        return Program(rank, (_add_up(size, size, rank, span_of(OUTPUT, 0)),))

    check("reduce_scatter", size, size)
    return Schedule("reduce_scatter", "direct", size, size, make, aligned=True)


def direct_reduce(size: int, root: int = 0) -> Schedule:
    """Every rank sends all it has to the root, which adds up in the order of ranks.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.

    Returns:
        Steps: 1. Sent by each rank but the root: the message once; the root has n-1 messages in SCRATCH.
        Any number of ranks.
    """

    def make(rank: int) -> Program:
        return Program(rank, (_add_up(size, 1, rank, span_of(OUTPUT, 0), targets=(root,)),))

    check("reduce", size, 1, root)
    return Schedule("reduce", "direct", size, 1, make, root, aligned=True)


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

    def make(rank: int) -> Program:
        own = Copy(span_of(INPUT, rank), span_of(OUTPUT, rank))
        return Program(rank, (Step(_exchange(size, rank, lambda q: span_of(INPUT, q)), (own,)),))

    check("alltoall", size, size)
    return Schedule("alltoall", "direct", size, size, make, aligned=True)


def pairwise_alltoall(size: int) -> Schedule:
    """In step i every rank sends to the rank i further on, so each link carries one message at a time.

    Args:
        size: Number of ranks.

    Returns:
        Steps: n-1. Sent by each rank: (n-1)/n of the message, the least possible. Any number of ranks;
        blocks of any sizes.
    """

    def make(rank: int) -> Program:
        own = (Copy(span_of(INPUT, rank), span_of(OUTPUT, rank)),)
        steps = [Step((), own)] if size == 1 else []
        for i in range(1, size):
            target, source = (rank + i) % size, (rank - i) % size
            transfers = (Send(span_of(INPUT, target), target), Recv(span_of(OUTPUT, source), source))
            steps.append(Step(transfers, own if i == 1 else ()))
        return Program(rank, tuple(steps))

    check("alltoall", size, size)
    return Schedule("alltoall", "pairwise", size, size, make, aligned=True)
