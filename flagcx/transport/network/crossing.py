"""The steps between hosts of an all-reduce whose steps inside hosts go through memory.

Between two hosts the owners of a stripe exchange all of it, and both add up: one message each way, and no
more bytes than with halves. Of more hosts so do single ranks with a short message; a long one takes the steps
between hosts of the call's schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flagcx.schedule.model import Buffer, Copy, Program, Recv, Reduce, Schedule, Send, Step, span_of
from flagcx.transport.network.steps import NetworkSteps
from flagcx.transport.network.wire import Flight

_MOST_SWAPS = 8
"""Hosts whose ranks may send a short message to all others at once."""

Groups = Sequence[Sequence[int]]
"""The ranks of each host."""


def steps_between(schedule: Schedule, groups: Groups, short: bool) -> Schedule:
    """The steps between hosts of a hierarchical all-reduce, whose OUTPUT holds what hosts have added up.

    Args:
        schedule: The schedule.
        groups: The ranks of each host.
        short: Whether the message is short.
    """
    lanes = 1 if short else min(map(len, groups))
    swaps = len(groups) == 2 or (short and len(groups) <= _MOST_SWAPS)
    host_of = {rank: number for number, group in enumerate(groups) for rank in group}

    def swap(rank: int) -> Program:
        host = host_of[rank]
        lane = groups[host].index(rank)
        peers = [group[lane] for group in groups] if lane < lanes else []
        return Program(rank, (_swap(host, peers, lane, lanes),) if peers else ())

    def between(rank: int) -> Program:
        own = host_of[rank]
        steps = [
            tuple(t for t in step.transfers if host_of[t.peer] != own)
            for step in schedule.program(rank).steps
        ]
        return Program(rank, tuple(Step(transfers) for transfers in steps if transfers))

    return replace(schedule, make=swap, chunks=lanes) if swaps else replace(schedule, make=between)


def _swap(host: int, peers: Sequence[int], lane: int, lanes: int) -> Step:
    """The owners of one stripe exchange it, and add up in the order of the hosts."""
    own = span_of(Buffer.OUTPUT, lane)
    parts = [span_of(Buffer.SCRATCH, other * lanes + lane) for other in range(len(peers))]
    others = [other for other in range(len(peers)) if other != host]
    transfers = [Send(own, peers[other]) for other in others]
    receives = [Recv(parts[other], peers[other]) for other in others]
    parts[host] = own
    total = parts[0]
    added = [Reduce(part, total) for part in parts[1:]]
    return Step((*transfers, *receives), (*added, *([Copy(total, own)] if host else [])))


class Crossing(NetworkSteps):
    """The steps between hosts of a piece, each begun and ended on its own."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that they need beside the piece."""
        return self._scratch_nbytes

    def stripe(self, program: Program) -> slice:
        """The part of the piece that a rank owns."""
        spans = [span for span in program.spans() if span.buffer is not Buffer.SCRATCH]
        if not spans:
            return slice(0, 0)
        whole = replace(spans[0], start=min(s.start for s in spans), stop=max(s.stop for s in spans))
        return slice(*self._layout.slice(whole))

    def begin(self, step: int, arrays: Sequence[np.ndarray]) -> Flight:
        """Begins a step."""
        messages: Any = self._steps[step][0]
        return self._begin(messages, arrays)

    def end(self, step: int, flight: Flight, arrays: Sequence[np.ndarray]) -> None:
        """Waits for a step's messages, and adds up."""
        messages: Any = self._steps[step][0]
        self._end(messages, flight, arrays)
        self._work(self._steps[step][1], arrays)
