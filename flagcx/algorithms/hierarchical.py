"""Hierarchical: within groups first, then between groups, on as many lanes as there are ranks in a group.

::

    group 0:   0  1  2  3        lane l joins the l-th ranks of all groups. Each lane carries its
               |  |  |  |        own part of the message, so that between the groups (hosts) every
    group 1:   4  5  6  7        rank sends, and the message crosses once, not once a rank.
               |  |  |  |
    group 2:   8  9 10 11

Groups may have different sizes: there are as many lanes as the smallest group has ranks, and the further
ranks of a group take part in its inner steps alone. Inside a group all exchange directly; between groups a
lane goes by doubling distances (``bruck``, ``binomial``).

The reduce and the reduce_scatter are the broadcast and the allgather of this file run backwards.

Source: Jia and others, "Highly scalable deep learning training system with mixed-precision: training
ImageNet in four minutes" (2018), arXiv 1807.11205, on hierarchical all-reduce; the lanes: Traff, "Decomposing
collectives for exploiting multi-lane communication" (2019), arXiv 1910.13373.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise
from math import isqrt

from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import cut
from flagcx.schedule.compose import ChunkTransfer, arc, doublings, recv, reverse, schedule_of, send
from flagcx.schedule.model import RecvReduce, Schedule
from flagcx.schedule.pattern import backwards, later

Groups = tuple[tuple[int, ...], ...]

WIDEST = 8
"""Ranks in a group at most, where the caller does not name the groups: as many as hosts have GPUs."""


def even_groups(size: int, groups: int | None = None) -> Groups:
    """Consecutive ranks in ``groups`` groups whose sizes differ by at most one.

    Args:
        size: Number of ranks.
        groups: Number of groups; by default the square root of ``size``, rounded down, but so many that a
            group has no more than ``WIDEST`` ranks: inside a group every rank sends to all others.

    Example:
        >>> even_groups(5, 2)
        ((0, 1, 2), (3, 4))
    """
    default = max(1, isqrt(size), -(-size // WIDEST))
    bounds = cut(size, default if groups is None else groups)
    return tuple(tuple(range(a, b)) for a, b in pairwise(bounds))


@dataclass(frozen=True)
class Lanes:
    """The ranks as groups and lanes.

    Attributes:
        groups: The ranks of each group; the first ``count`` of a group own its lanes.
        places: The group of each rank, and its place in the group.
        count: Number of lanes.
        between: Rounds between the groups.
        inside: Rounds of an exchange inside the groups: one, or none where all are single ranks.
        gathering: Rounds in which ranks without a lane send their block to one with a lane.
    """

    groups: Groups
    places: dict[int, tuple[int, int]]
    count: int
    between: int
    inside: int
    gathering: int

    def blocks(self, group: int, lane: int) -> tuple[int, ...]:
        """The ranks of a group whose blocks travel on the lane."""
        return self.groups[group][lane :: self.count]


def lanes_of(size: int, groups: Sequence[Sequence[int]] | None) -> Lanes:
    """The lanes of these groups, or of the default ones.

    Raises:
        ArgumentError: A group is empty, or the ranks of all groups are not 0 to ``size - 1``.
    """
    frozen = even_groups(size) if groups is None else tuple(tuple(group) for group in groups)
    if not all(frozen) or sorted(chain.from_iterable(frozen)) != list(range(size)):
        raise ArgumentError(
            f"groups={frozen} do not divide {size} ranks; expected groups of at least one rank that hold "
            f"each of 0 to {size - 1} once, such as {even_groups(size)}"
        )
    places = {rank: (g, i) for g, group in enumerate(frozen) for i, rank in enumerate(group)}
    least, most = min(map(len, frozen)), max(map(len, frozen))
    return Lanes(frozen, places, least, doublings(len(frozen)), int(most > 1), int(most > least))


def _spread(lanes: Lanes, rank: int) -> Iterator[ChunkTransfer]:
    """Parts of the message, one an owner, to all: part ``lane * groups + group``."""
    group, lane = lanes.places[rank]
    count = len(lanes.groups)
    for now in range(lanes.between if lane < lanes.count else 0):
        distance, first = 1 << now, lane * count
        number = min(distance, count - distance)
        before, after = (group - distance) % count, (group + distance) % count
        for start, stop in arc(group, number, count):
            yield send(now, lanes.groups[before][lane], first + start, first + stop)
        for start, stop in arc(after, number, count):
            yield recv(now, lanes.groups[after][lane], first + start, first + stop)
    yield from _to_group(lanes, rank, lanes.between, count)


def _to_group(
    lanes: Lanes, rank: int, now: int, width: int, skip: int | None = None
) -> Iterator[ChunkTransfer]:
    """Each owner sends its lane's ``width`` chunks to all of its group but ``skip``, which has them."""
    group, _ = lanes.places[rank]
    for lane, owner in enumerate(lanes.groups[group][: lanes.count]):
        start, stop = lane * width, (lane + 1) * width
        if owner == rank:
            others = (peer for peer in lanes.groups[group] if peer not in (rank, skip))
            yield from (send(now, peer, start, stop) for peer in others)
        elif rank != skip:
            yield recv(now, owner, start, stop)


def _there_and_back(lanes: Lanes, pieces: int, rank: int) -> Iterator[ChunkTransfer]:
    rounds, spread = lanes.between + lanes.inside, list(_spread(lanes, rank))
    whole = [*backwards(spread, rounds, RecvReduce), *later(spread, rounds)]
    width = lanes.count * len(lanes.groups)
    for piece in range(pieces):
        for kind, now, peer, start, stop in whole:
            yield ChunkTransfer(kind, now + piece, peer, start + piece * width, stop + piece * width)


def hierarchical_allreduce(
    size: int, groups: Sequence[Sequence[int]] | None = None, pieces: int = 1
) -> Schedule:
    """Reduce_scatter in the group, allreduce between the groups on every lane, allgather in the group.

    Pieces follow each other a round apart: while one is between the groups, others are inside, so that the
    slower links never rest.

    Args:
        size: Number of ranks.
        groups: The ranks of each group; see ``even_groups`` for the default.
        pieces: Pieces that the message is cut into.

    Returns:
        Steps: 2 ceil(log2 m) + 1 + pieces, with m groups of g ranks. Sent by each rank: 2(g-1)/g of the
        message inside its group and 2(m-1)/(mg) between groups. Any number of ranks; groups of any sizes.
    """
    lanes = lanes_of(size, groups)
    chunks, rounds = lanes.count * len(lanes.groups), 2 * (lanes.between + lanes.inside)
    transfers = partial(_there_and_back, lanes, pieces)
    rounds += pieces - 1 if rounds else 0
    return schedule_of("allreduce", "hierarchical", size, chunks * pieces, rounds, transfers)


def _broadcast(lanes: Lanes, root: int, rank: int) -> Iterator[ChunkTransfer]:
    count = len(lanes.groups)
    home, _ = lanes.places[root]
    group, lane = lanes.places[rank]
    owners = lanes.groups[home][: lanes.count]
    if rank == root:
        yield from (send(0, owner, part) for part, owner in enumerate(owners) if owner != root)
    elif group == home and lane < lanes.count:
        yield recv(0, root, lane)
    distance = (group - home) % count
    for now in range(lanes.between if lane < lanes.count else 0):
        half = 1 << (lanes.between - 1 - now)
        if distance % (2 * half) == 0 and distance + half < count:
            yield send(now + lanes.inside, lanes.groups[(group + half) % count][lane], lane)
        elif distance % (2 * half) == half:
            yield recv(now + lanes.inside, lanes.groups[(group - half) % count][lane], lane)
    yield from _to_group(lanes, rank, lanes.between + lanes.inside, 1, skip=root)


def hierarchical_broadcast(
    size: int, root: int = 0, groups: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """The root sends each lane of its group a part of the message, which the lane carries to all groups.

    Args:
        size: Number of ranks.
        root: The rank that has the message.
        groups: The ranks of each group; see ``even_groups`` for the default.

    Returns:
        Steps: ceil(log2 m) + 2, with m groups of g ranks. Sent by the root: 2(g-1)/g of the message
        inside its group and ceil(log2 m)/g between groups. Any number of ranks; groups of any sizes.
    """
    lanes = lanes_of(size, groups)
    rounds, transfers = lanes.between + 2 * lanes.inside, partial(_broadcast, lanes, root)
    return schedule_of("broadcast", "hierarchical", size, lanes.count, rounds, transfers, root)


def hierarchical_reduce(size: int, root: int = 0, groups: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Each group adds up in parts, one a lane; the lanes add up between groups; the root collects.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.
        groups: The ranks of each group; see ``even_groups`` for the default.

    Returns:
        Steps: ceil(log2 m) + 2, with m groups of g ranks. Sent by each rank: the message once inside
        its group, 1/g of it between groups. Any number of ranks; groups of any sizes.
    """
    return reverse(hierarchical_broadcast(size, root, groups))


def _allgather(lanes: Lanes, rank: int) -> Iterator[ChunkTransfer]:
    group, place = lanes.places[rank]
    lane = place % lanes.count
    if place >= lanes.count:
        yield send(0, lanes.groups[group][lane], rank)
    else:
        yield from (recv(0, q, q) for q in lanes.groups[group][place + lanes.count :: lanes.count])
        yield from _between_groups(lanes, group, lane)
    yield from _blocks_to_group(lanes, rank)


def _between_groups(lanes: Lanes, group: int, lane: int) -> Iterator[ChunkTransfer]:
    """The blocks of a lane to the owners of that lane in all groups."""
    count = len(lanes.groups)
    for k in range(lanes.between):
        near, far = (group - (1 << k)) % count, (group + (1 << k)) % count
        for transfer, first, other in ((send, group, near), (recv, far, far)):
            for number in range(min(1 << k, count - (1 << k))):
                for start, stop in _runs(lanes.blocks((first + number) % count, lane)):
                    yield transfer(lanes.gathering + k, lanes.groups[other][lane], start, stop)


def _blocks_to_group(lanes: Lanes, rank: int) -> Iterator[ChunkTransfer]:
    """All blocks of a lane from its owner to the others of the group, but no rank its own block."""
    group, _ = lanes.places[rank]
    now = lanes.gathering + lanes.between
    for lane, owner in enumerate(lanes.groups[group][: lanes.count]):
        blocks = [b for g in range(len(lanes.groups)) for b in lanes.blocks(g, lane)]
        for target in lanes.groups[group] if owner == rank else (rank,):
            if target != owner:
                transfer, peer = (send, target) if owner == rank else (recv, owner)
                for start, stop in _runs([b for b in blocks if b != target]):
                    yield transfer(now, peer, start, stop)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Blocks as ``(start, stop)``, with neighbours together."""
    for _, run in groupby(enumerate(blocks), lambda item: item[1] - item[0]):
        numbers = [block for _, block in run]
        yield numbers[0], numbers[-1] + 1


def hierarchical_allgather(size: int, groups: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Each block goes to all groups on one lane, then to all ranks of each group.

    Args:
        size: Number of ranks.
        groups: The ranks of each group; see ``even_groups`` for the default.

    Returns:
        Steps: ceil(log2 m) + 1, with m groups of g ranks (one more if sizes differ). Sent by each rank:
        (m-1)/(mg) of the message between groups and (g-1)/g inside its group. Any number of ranks;
        groups of any sizes; blocks of any sizes.
    """
    lanes = lanes_of(size, groups)
    rounds = lanes.gathering + lanes.between + lanes.inside
    return schedule_of("allgather", "hierarchical", size, size, rounds, partial(_allgather, lanes))


def hierarchical_reduce_scatter(size: int, groups: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Each block is added up inside every group first, then between groups on one lane.

    Args:
        size: Number of ranks.
        groups: The ranks of each group; see ``even_groups`` for the default.

    Returns:
        Steps: ceil(log2 m) + 1, with m groups of g ranks (one more if sizes differ). Sent by each rank:
        (n-1)/n of the message, of which (m-1)/(mg) between groups. Any number of ranks; groups of any
        sizes; blocks of any sizes.
    """
    return reverse(hierarchical_allgather(size, groups))
