"""The steps between hosts of a collective whose steps inside hosts go through memory.

The ranks of a host share an image of the message, and some of them own a stripe of it each. In these steps
the owners of a stripe, one on each host, exchange what other hosts need of it:

==============  ============================================================================================
allreduce       of two hosts, or short: each sends its sum to all others, and all add up alike; else the
                steps between hosts of the call's schedule
reduce          from host to host to the root's, each adds its sum; short: all straight to the root's
broadcast       from host to host, beginning at the root's; short: the root's straight to all
allgather       each sends the blocks of its host to all others
reduce_scatter  each sends every other host its sums of that host's blocks, which adds them up
==============  ============================================================================================

So every byte crosses a link once, in as few messages as there are hosts. In the image of a message of blocks,
those of one owner and one host lie together: see ``order_of``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import (
    Buffer,
    Copy,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
    span_of,
)
from flagcx.transport.base import Call
from flagcx.transport.network.flight import Flight
from flagcx.transport.network.steps import NetworkSteps
from flagcx.transport.network.watch import Watch
from flagcx.transport.network.wire import Wire
from flagcx.transport.scratch import Scratch

_MOST_SWAPS = 8
"""Hosts whose ranks may send a short message to all others at once."""

Groups = Sequence[Sequence[int]]
"""The ranks of each host."""


def order_of(groups: Groups, lanes: int) -> list[int]:
    """The blocks in the order in which they lie in the image: by lane, then by host.

    Example:
        >>> order_of(((0, 1), (2, 3)), 2)
        [0, 2, 1, 3]
    """
    return [rank for lane in range(lanes) for group in groups for rank in group[lane::lanes]]


def goes_straight(hosts: int, short: bool) -> bool:
    """Whether each of so many hosts sends its sum of an all-reduce to all others."""
    return hosts == 2 or (short and hosts <= _MOST_SWAPS)


def steps_between(schedule: Schedule, groups: Groups, short: bool, straight: bool = False) -> Schedule:
    """The steps between hosts of a collective, whose OUTPUT is the image of the message.

    Args:
        schedule: The call's schedule, which says the collective and the root.
        groups: The ranks of each host.
        short: Whether the message is short: one rank of each host owns all of it.
        straight: Whether each host sends its sum of an all-reduce to all others, however many they are.

    Returns:
        A schedule with one chunk a lane, or a block, in the order of ``order_of``.
    """
    if schedule.collective == "allreduce" and not (straight or goes_straight(len(groups), short)):
        return _between(schedule, groups)
    lanes = 1 if short else min(map(len, groups))
    crossing = _Lanes(schedule, groups, lanes, short)
    blocks = COLLECTIVES[schedule.collective].blocks
    name, chunks = ("allgather", schedule.size) if blocks else ("allreduce", lanes)
    return replace(schedule, collective=name, make=crossing.program, chunks=chunks, root=None)


def _between(schedule: Schedule, groups: Groups) -> Schedule:
    """The steps of a schedule whose messages go between hosts."""
    host_of = {rank: number for number, group in enumerate(groups) for rank in group}

    def between(rank: int) -> Program:
        own = host_of[rank]
        steps = [
            tuple(t for t in step.transfers if host_of[t.peer] != own)
            for step in schedule.program(rank).steps
        ]
        return Program(rank, tuple(Step(transfers) for transfers in steps if transfers))

    return replace(schedule, make=between)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The owners of stripes, and what they exchange.

    Attributes:
        schedule: The call's.
        groups: The ranks of each host.
        count: Ranks of each host that own a stripe.
        short: Whether the message is short.
    """

    schedule: Schedule
    groups: Groups
    count: int
    short: bool

    def program(self, rank: int) -> Program:
        """The steps of a rank; none where it owns no stripe."""
        host = next(number for number, group in enumerate(self.groups) if rank in group)
        lane = self.groups[host].index(rank)
        if lane >= self.count:
            return Program(rank, ())
        peers = [group[lane] for group in self.groups]
        steps: Iterator[Step] = getattr(self, f"_{self.schedule.collective}")(host, peers, lane)
        return Program(rank, tuple(steps))

    def _allreduce(self, host: int, peers: Sequence[int], lane: int) -> Iterator[Step]:
        own = span_of(Buffer.OUTPUT, lane)
        parts = [span_of(Buffer.SCRATCH, other * self.count + lane) for other in range(len(peers))]
        others = [other for other in range(len(peers)) if other != host]
        transfers = [Send(own, peers[other]) for other in others]
        receives = [Recv(parts[other], peers[other]) for other in others]
        parts[host] = own
        total = parts[0]
        added = [Reduce(part, total) for part in parts[1:]]
        yield Step((*transfers, *receives), (*added, *([Copy(total, own)] if host else [])))

    def _along(self, host: int, peers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The owners from which a host gets a broadcast, and those to which it sends it."""
        root = self.schedule.root
        home = next(number for number, group in enumerate(self.groups) if root in group)
        far = [peers[(home + distance) % len(peers)] for distance in range(len(peers))]
        at = (host - home) % len(peers)
        if self.short:
            return ([], far[1:]) if at == 0 else ([far[0]], [])
        return far[max(at - 1, 0) : at], far[at + 1 : at + 2]

    def _broadcast(self, host: int, peers: Sequence[int], lane: int) -> Iterator[Step]:
        own, (before, after) = span_of(Buffer.OUTPUT, lane), self._along(host, peers)
        if before:
            yield Step(tuple(Recv(own, peer) for peer in before))
        if after:
            yield Step(tuple(Send(own, peer) for peer in after))

    def _reduce(self, host: int, peers: Sequence[int], lane: int) -> Iterator[Step]:
        own, (after, before) = span_of(Buffer.OUTPUT, lane), self._along(host, peers)
        if before:
            yield Step(tuple(RecvReduce(own, peer) for peer in before))
        if after:
            yield Step(tuple(Send(own, peer) for peer in after))

    def _blocks(self, lane: int) -> list[Span]:
        """The blocks of each host in the image that travel on a lane."""
        counts = [[len(group[at :: self.count]) for group in self.groups] for at in range(self.count)]
        start, spans = sum(map(sum, counts[:lane])), []
        for count in counts[lane]:
            spans.append(Span(Buffer.OUTPUT, start, start + count))
            start += count
        return spans

    def _allgather(self, host: int, peers: Sequence[int], lane: int) -> Iterator[Step]:
        spans, others = self._blocks(lane), [other for other in range(len(peers)) if other != host]
        sends = [Send(spans[host], peers[other]) for other in others]
        yield Step((*sends, *(Recv(spans[other], peers[other]) for other in others)))

    def _reduce_scatter(self, host: int, peers: Sequence[int], lane: int) -> Iterator[Step]:
        spans, others = self._blocks(lane), [other for other in range(len(peers)) if other != host]
        sends = [Send(spans[other], peers[other]) for other in others]
        yield Step((*sends, *(RecvReduce(spans[host], peers[other]) for other in others)))


class Crossing(NetworkSteps):
    """The steps between hosts of a piece, each begun and ended on its own.

    Attributes:
        stripe: The part of the piece that this rank owns.
    """

    def __init__(self, wire: Wire, watch: Watch, call: Call, scratch: Scratch, words: str) -> None:
        super().__init__(wire, watch, call, scratch, words)
        spans = [span for span in call.program().spans() if span.buffer is not Buffer.SCRATCH]
        self.stripe = slice(0, 0)
        if spans:
            whole = replace(spans[0], start=min(s.start for s in spans), stop=max(s.stop for s in spans))
            self.stripe = slice(*self._layout.slice(whole))

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that they need beside the piece."""
        return self._scratch_nbytes

    def begin(self, step: int, arrays: Sequence[np.ndarray], start: int) -> Flight:
        """Begins a step of the piece that begins at ``start``."""
        messages: Any = self._steps[step][0]
        return self._begin(messages, arrays)

    def end(self, step: int, flight: Flight, arrays: Sequence[np.ndarray], start: int) -> None:
        """Waits for a step's messages, and adds up."""
        messages: Any = self._steps[step][0]
        self._end(messages, flight, arrays)
        self._work(self._steps[step][1], arrays)
