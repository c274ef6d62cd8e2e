"""Memory that the ranks of one host share, in a communicator of several hosts.

Each rank has a segment, which the others of its host map: two counters, a head that says which call the rank
is in, and what it contributes to sums. The first rank's has also the image of the message that all of them
share, in two halves, with which calls take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.errors import ResourceError
from flagcx.transport.base import TransportContext
from flagcx.transport.network.message import HEAD_NBYTES, check_head
from flagcx.transport.shared_memory.fence import memory_fence
from flagcx.transport.shared_memory.segment import ONE_NAMESPACE, Handle, Segment, pid_namespace

ARRIVED, REDUCED, _GAVE_UP = range(0, 24, 8)
"""Words of a segment, each in a cache line of its own: how many pieces the rank has contributed, and how many
it has in the image, added up over all hosts; and whether it has given up."""
_HEAD_AT, _DATA_AT = 512, 4096
HALF_NBYTES = 8 << 20
"""The room for what a rank contributes to sums, and that for each half of the image of its host. Pages are
taken as they are written."""
SEGMENT_NBYTES = _DATA_AT + 3 * HALF_NBYTES


class HostMemory:
    """What one rank sees of the segments of its host.

    Args:
        rank: This rank.
        segments: The segment of each rank of the host, by rank, in order.

    Attributes:
        ranks: The ranks of the host.
        pieces: How many pieces calls have had so far.
        fence: Memory fence, or None where the hardware keeps the order.
    """

    def __init__(self, rank: int, segments: dict[int, Segment]) -> None:
        self._rank, self.ranks, self._segments = rank, tuple(segments), segments
        self._memory = {q: np.frombuffer(segment.memory, np.uint8) for q, segment in segments.items()}
        head = slice(_HEAD_AT, _HEAD_AT + HEAD_NBYTES)
        self._heads = {q: memory[head].data for q, memory in self._memory.items()}
        self.words = {q: memory[:_HEAD_AT].data.cast("Q") for q, memory in self._memory.items()}
        self.own = self.words[rank]
        self.pieces, self._calls, self.fence = 0, 0, memory_fence()

    def enter(self, head: bytes) -> int:
        """Says which call this rank is in, before it contributes to it; returns its half of the image."""
        self._heads[self._rank][:] = head
        self._calls += 1
        return self._calls % 2

    def check(self, peer: int, head: bytes) -> None:
        """Checks that a rank that has contributed is in the same call.

        Raises:
            MismatchError: It is in another one.
        """
        check_head(bytes(self._heads[peer]), head, peer, self._rank)

    def contributed(self, rank: int, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Where a rank leaves ``count`` elements that it contributes, ``start`` bytes from the first on."""
        return self._view(rank, _DATA_AT + start, count, dtype)

    def image(self, half: int, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Likewise ``count`` elements of a half of the image."""
        return self._view(self.ranks[0], _DATA_AT + (1 + half) * HALF_NBYTES + start, count, dtype)

    def _view(self, rank: int, at: int, count: int, dtype: np.dtype) -> np.ndarray:
        return self._memory[rank][at : at + count * dtype.itemsize].view(dtype)

    def signal(self, counter: int, value: int) -> None:
        """Tells the host's ranks, after what this one has written, how far it is."""
        if self.fence:
            self.fence()
        self.own[counter] = value

    def give_up(self) -> None:
        """Tells the host's ranks that this one has given up, and that the store says why."""
        if self.words:
            self.own[_GAVE_UP] = 1

    def gave_up(self) -> bool:
        """Whether a rank of the host has given up."""
        return any(words[_GAVE_UP] for words in self.words.values())

    def close(self) -> None:
        """Lets go of the segments. Further calls do nothing."""
        self.words, self._heads, self._memory = {}, {}, {}
        self.own = None  # type: ignore[assignment]
        for segment in self._segments.values():
            segment.close()
        self._segments = {}


class Offer:
    """The segment that a rank offers to its host, before it knows those of the others.

    Args:
        context: The communicator.

    Attributes:
        card: What the other ranks must know of it; a value for JSON.
    """

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        shared = len(set(context.hosts)) not in (1, context.size)
        self._own = _segment() if shared else None
        self.card = [None if self._own is None else self._own.handle, pid_namespace()]

    def accept(self, cards: Sequence[Any]) -> HostMemory | None:
        """Maps the segments of this rank's host, on all ranks together.

        Args:
            cards: Those of all ranks.

        Returns:
            The memory of this rank's host; None where each host has one rank, or where the ranks of any host
            cannot share memory.
        """
        context = self._context
        if any(handle is None for handle, _ in cards):
            return None
        assert context.store is not None
        segments: dict[int, Segment] = {}
        with contextlib.suppress(ResourceError):
            segments = self._map(cards)
        told = context.store.exchange("host memory", bytes([bool(segments)]), context.config.init_timeout_s)
        return HostMemory(context.rank, segments) if all(map(any, told)) else None

    def _map(self, cards: Sequence[Any]) -> dict[int, Segment]:
        hosts, rank = self._context.hosts, self._context.rank
        segments: dict[int, Segment] = {}
        for peer, (handle, namespace) in enumerate(cards):
            if hosts[peer] == hosts[rank]:
                if namespace != self.card[1]:
                    raise ResourceError(ONE_NAMESPACE)
                own = self._own if peer == rank else None
                segments[peer] = own or Segment.attach(Handle(*handle))
        return segments


def _segment() -> Segment | None:
    """A segment of this rank's; None where the machine has no room for it."""
    try:
        return Segment.create(SEGMENT_NBYTES)
    except ResourceError:
        return None
