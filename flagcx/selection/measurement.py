"""Times candidates in turns: what the tuner and the checks of its promises both stand on.

Candidates take turns, round by round, so that a machine that speeds up or slows down does so for all of
them. A round is a batch of calls after a barrier and counts with its slowest rank. After two rounds only
those go on that are near the fastest.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from flagcx.algorithms import build, entries
from flagcx.algorithms.candidate import Candidate
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call, Plan, Transport

PIECE_NBYTES = (64 << 10, 256 << 10, 1 << 20)
"""The lengths of piece that pipelined algorithms are measured with, besides none at all."""
_SURELY = 1.5
"""A candidate that is slower by so much more than ``TimeBudget.near`` leaves after its first turn."""
DTYPE = np.dtype(np.float32)
"""What is measured: float32, and sums of it."""


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """How much is measured.

    Attributes:
        batch_s: How long a batch should take, in seconds.
        rounds: Rounds for each size; half as many for large messages.
        near: Candidates slower than the fastest by this factor leave after two rounds.
    """

    batch_s: float = 0.015
    rounds: int = 11
    near: float = 1.6


QUICK = TimeBudget(batch_s=0.003, rounds=4, near=1.4)


class Clock:
    """Starts ranks together and tells the slowest's time to all, through shared memory.

    Args:
        transport: Joins the ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._barrier = _small(transport, "barrier", "dissemination", 0, np.uint8)
        self._largest = _small(transport, "allreduce", "one_shot", 1, np.float64)

    def barrier(self) -> None:
        """Waits until every rank has come."""
        self._barrier.run(None, None)

    def slowest(self, seconds: float) -> float:
        """The largest over the ranks of what each gives."""
        value = np.array([seconds])
        self._largest.run(value, value)
        return float(value[0])


def _small(transport: Transport, collective: str, algorithm: str, count: int, dtype: Any) -> Plan:
    kind = dtype_of(np.dtype(dtype))
    schedule = build(collective, algorithm, transport.size)
    return transport.compile(Call(schedule, transport.rank, count, kind, resolve_op("max", kind), True))


class Measurement(ABC):
    """Arrays and plans for one collective at one size. All ranks make the same calls.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
        rank: This rank.
        size: Number of ranks.
        full: ``full(count)``: an array of so many zeros, written, so that every page is there. No sum of
            zeros overflows.

    Attributes:
        count: Elements of the message or block.
        root: The root of a rooted collective, else None.
        given: The INPUT array, or None where this rank has none.
        result: The OUTPUT array, or None.
        op: The operation, or None where nothing is reduced.
    """

    def __init__(
        self, collective: str, nbytes: int, rank: int, size: int, full: Callable[[int], Any]
    ) -> None:
        self.collective, self.rank, self.size = collective, rank, size
        self.count = count = max(nbytes // DTYPE.itemsize, 1)
        self.dtype = dtype_of(DTYPE)
        kind = COLLECTIVES[collective]
        self.root = root = 0 if kind.rooted else None
        self.op = resolve_op("sum", self.dtype) if kind.reduces else None
        inputs = kind.input_blocks(size) if kind.has_input(rank, root) else 0
        outputs = kind.output_blocks(size) if kind.has_output(rank, root) else 0
        self.given = full(inputs * count) if inputs else None
        over = collective in ("allreduce", "reduce", "broadcast") and self.given is not None and outputs
        self.result = self.given if over else full(outputs * count) if outputs else None

    @property
    def in_place(self) -> bool:
        """Whether INPUT and OUTPUT are one array."""
        return self.given is not None and self.given is self.result

    @abstractmethod
    def plan(self, choice: Candidate) -> Plan:
        """Compiles a choice for this size."""

    @abstractmethod
    def seconds(self, plan: Plan, calls: int, warm_up: int) -> float:
        """The time of a call in seconds, over a batch, of the slowest rank; the same on every rank."""

    def time_all(
        self, choices: Sequence[Candidate], pace: TimeBudget, seed: int = 0, always: Collection[int] = ()
    ) -> list[list[float]]:
        """Times of a call in seconds, one a round, for each choice; fewer for those far behind.

        Args:
            choices: What is measured.
            pace: How much.
            seed: Of the order in which they take turns; the same on all ranks.
            always: Positions of choices that are measured in every round, however slow.
        """
        plans: dict[int, Plan] = {}
        times: list[list[float]] = []

        def drop(factor: float) -> None:
            fastest = min(min(t) for t in times)
            for i in [i for i in plans if i not in always and min(times[i]) > factor * fastest]:
                del plans[i]

        for i, choice in enumerate(choices):
            plans[i] = self.plan(choice)
            seconds = self.seconds(plans[i], 1, 1)
            # One call says little where calls are short: these are timed in a batch before any is dropped.
            calls = _calls(pace, seconds)
            times.append([self.seconds(plans[i], calls, min(calls // 4, 20)) if calls > 1 else seconds])
            drop(_SURELY * pace.near)
        order = random.Random(seed)
        for turn in range(pace.rounds - 1):
            for i in order.sample(sorted(plans), len(plans)):
                calls = _calls(pace, min(times[i]))
                times[i].append(self.seconds(plans[i], calls, min(calls // 8, 8)))
            if turn == 0:
                # Not before each had two turns: what else runs on the machine spoils one easily.
                drop(pace.near)
        return times


def _calls(pace: TimeBudget, seconds: float) -> int:
    """How many calls a batch has."""
    return min(max(math.ceil(pace.batch_s / seconds), 1), 1000)


class HostMeasurement(Measurement):
    """Measures NumPy arrays between processes of one host.

    Args:
        transport: What carries the data.
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
    """

    def __init__(self, transport: Transport, collective: str, nbytes: int) -> None:
        super().__init__(
            collective, nbytes, transport.rank, transport.size, lambda count: np.full(count, 0, DTYPE)
        )
        self._transport = transport
        self._clock = Clock(transport)

    def plan(self, choice: Candidate) -> Plan:
        """See ``Measurement.plan``."""
        schedule = choice.build(self.collective, self.size, self.root)
        call = Call(schedule, self.rank, self.count, self.dtype, self.op, self.in_place, choice.protocol)
        return self._transport.compile(call)

    def seconds(self, plan: Plan, calls: int, warm_up: int) -> float:
        """See ``Measurement.seconds``."""
        run, given, result = plan.run, self.given, self.result
        for _ in range(warm_up):
            run(given, result)
        self._clock.barrier()
        start = perf_counter()
        for _ in range(calls):
            run(given, result)
        return self._clock.slowest((perf_counter() - start) / calls)


class HostBench:
    """NumPy arrays between processes of one host, as the tuner measures them.

    Args:
        transport: What carries the data.

    Attributes:
        size: Number of ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self.size = transport, transport.size

    def candidates(self, collective: str, nbytes: int) -> list[Candidate]:
        """Every way to carry out a collective that differs from the others at this size.

        Algorithms that need groups of ranks (hosts) and those that the user registered are left out.

        Args:
            collective: Name of the collective.
            nbytes: Bytes of the message, or of one block where the collective has blocks.
        """
        return [
            replace(form, protocol=protocol)
            for form in forms(collective, nbytes, self.size, PIECE_NBYTES)
            for protocol in self._transport.protocols(collective, form.algorithm, nbytes) or ("",)
        ]

    def measurement(self, collective: str, nbytes: int) -> HostMeasurement:
        """Arrays and plans for one collective at one size."""
        return HostMeasurement(self._transport, collective, nbytes)


def forms(collective: str, nbytes: int, size: int, piece_nbytes: Sequence[int]) -> list[Candidate]:
    """The schedules for a collective that come with flagcx, with the pieces that differ at a size.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message or block.
        size: Number of ranks.
        piece_nbytes: Lengths of piece that are tried, besides whole blocks.
    """
    found = []
    for known in entries(collective):
        if known.grouped or not known.trusted or not known.allows(size):
            continue
        name = str(known.algorithm)
        cuts = (
            {Candidate(name, piece_nbytes=cut).pieces_at(nbytes): cut for cut in piece_nbytes}
            if known.pipelined
            else {}
        )
        lengths = sorted({1: 0} | {pieces: cut for pieces, cut in cuts.items() if pieces > 1})
        found += [Candidate(name, piece_nbytes=0 if pieces == 1 else cuts[pieces]) for pieces in lengths]
    return found
