"""A piece of a collective over hosts: what a rank puts into the image of the message, and takes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcx.schedule.collectives import COLLECTIVES, Counts
from flagcx.transport.base import Call
from flagcx.transport.network.crossing import Crossing

SHORT_NBYTES = 64 << 10
"""Up to so many bytes one rank of each host adds up, and exchanges, all of a message."""
_LEAST_NBYTES, _MOST_NBYTES, _ENOUGH = 128 << 10, 256 << 10, 32
"""What an owner sends another one of a piece at least and at most, and how many pieces are enough.

With longer ones, answers wait behind data that goes the same way. On 1 Gbit/s (UCX and Open MPI, two hosts of
one rank) an all-reduce of 1 MiB takes 8.3 and 9.4 ms by 128 KiB, 10.8 and 11.2 by 256 KiB, 14.7 as one by
UCX, and 8.5 and 10.6 by a ring; but 64 MiB 710 and 764 ms by 128 KiB, and 613 and 598 by 256 KiB.
"""


def stripe_nbytes(nbytes: int, messages: int) -> int:
    """What an owner sends another one of a piece, of a message in so many runs that go on their own."""
    return min(max(nbytes // (messages * _ENOUGH), _LEAST_NBYTES), _MOST_NBYTES)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a rank's array that is one run of the image of a piece.

    Attributes:
        base: Where the block (or message) begins in the array.
        at: Where the part is in the image.
        skip: Elements of the block's piece before it.
    """

    base: int
    at: slice
    skip: int = 0

    def of(self, array: np.ndarray, start: int) -> np.ndarray:
        """The part of the array, of pieces that begin ``start`` elements after the begin of blocks."""
        first = self.base + start + self.skip
        return array[first : first + self.at.stop - self.at.start]

    def within(self, at: slice) -> Iterator[Part]:
        """What of it lies in a run of the image."""
        start, stop = max(self.at.start, at.start), min(self.at.stop, at.stop)
        if start < stop:
            yield replace(self, at=slice(start, stop), skip=self.skip + start - self.at.start)


class Piece:
    """All pieces whose blocks are of the same lengths, which differ in where they lie.

    Args:
        crossing_of: Makes the steps between hosts of a message, or blocks, of so many elements.
        call: The whole call.
        counts: Elements of each block, by rank; of the message, where there are no blocks.
        order: The blocks in the order of the image.
        bases: Where each block begins in an array that has all.

    Attributes:
        crossing: The steps between hosts.
        count: Elements of the image.
        own: What this rank adds up: its stripe of what it contributes.
        leaves: What it leaves for others to add up, or in the image.
        takes: What it gathers.
    """

    def __init__(
        self,
        crossing_of: Callable[[Counts], Crossing],
        call: Call,
        counts: Sequence[int],
        order: Sequence[int],
        bases: Sequence[int],
    ) -> None:
        kind, rank, root = COLLECTIVES[call.schedule.collective], call.rank, call.schedule.root
        ordered = tuple(counts[block] for block in order)
        self.crossing = crossing_of(ordered if kind.blocks else ordered[0])
        self.count = sum(ordered)
        ends = np.cumsum([0, *ordered]).tolist()
        places = {block: slice(ends[i], ends[i + 1]) for i, block in enumerate(order)}

        def parts(side: str) -> list[Part]:
            if side == "each":
                return [Part(0, places[rank])]
            if side == "root" and rank != root:
                return []
            return [Part(bases[block], at) for block, at in places.items() if at.start < at.stop]

        self.own: list[Part] = []
        self.leaves = parts(kind.before)
        self.takes = parts(kind.after)
        if kind.reduces:
            stripe = self.crossing.stripe
            given, apart = self.leaves, (slice(0, stripe.start), slice(stripe.stop, self.count))
            self.own = [part for one in given for part in one.within(stripe)]
            self.leaves = [part for one in given for rest in apart for part in one.within(rest)]
        elif call.in_place:
            own = [part.at for part in self.leaves]
            self.takes = [part for part in self.takes if part.at not in own]


class Slot:
    """A piece in memory.

    Args:
        kind: The piece.
        image: The image of the message.
        left: What the ranks of the host contribute to sums, in their order; none where a rank is alone.

    Attributes:
        image: The image.
        leaves: What this rank leaves, and where.
        own: What it adds up, where the sum goes, and what the ranks of the host contribute.
        takes: What it gathers, and from where.
    """

    __slots__ = ("image", "leaves", "own", "takes")

    def __init__(self, kind: Piece, image: np.ndarray, left: Sequence[np.ndarray], mine: np.ndarray) -> None:
        self.image = image
        self.leaves = [(part, mine[part.at]) for part in kind.leaves]
        self.own = [(part, image[part.at], [one[part.at] for one in left]) for part in kind.own]
        self.takes = [(part, image[part.at]) for part in kind.takes]
