"""The profiler: a communicator's last operations, as figures, pictures and traces."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from flagcx.bootstrap.environment import boot_id
from flagcx.errors import ArgumentError
from flagcx.profiler.records import CAPACITY, OperationInfo, Progress, Record, RecordBuffer, RecordedPlan

if TYPE_CHECKING:
    from flagcx.profiler.stragglers import StragglerReport
    from flagcx.profiler.summary import Summary

__all__ = ["CAPACITY", "OperationInfo", "Profiler", "Progress", "Record", "RecordBuffer", "RecordedPlan"]
_CLOCK_ROUNDS = 9
_SAVE = "comm.profiler.save, which all ranks must call (or one with own=True, for its own part)"


class Profiler:
    """The records of one communicator: its last 1024 operations on this rank.

    It is always on, at under a microsecond an operation; ``FLAGCX_PROFILE=0`` switches it off. The modules
    that make reports are imported when one is asked for.

    Args:
        rank: This rank.
        size: Number of ranks.
        gather: ``gather(value, part_of=words)`` gives every rank every rank's value, in rank order; the words
            say to ranks that make another call what this one does.
        barrier: Waits until every rank has come.
        hints: Sentences that say how the calls so far could have been quicker.

    Attributes:
        ring: The buffer of the records.

    Example:
        >>> comm.profiler.summary()              # doctest: +SKIP
        >>> comm.profiler.save("trace.json")     # doctest: +SKIP
        >>> print(comm.profiler.stragglers())    # doctest: +SKIP
        rank 1 was last in 20 of 20 calls, by 5.07 ms (median; at worst 5.31 ms); ...
    """

    def __init__(
        self,
        rank: int,
        size: int,
        gather: Callable[..., list[Any]],
        barrier: Callable[[], None],
        hints: Callable[[], list[str]] = list,
    ) -> None:
        self.rank, self.size, self.ring = rank, size, RecordBuffer()
        self._gather, self._barrier, self._hints = gather, barrier, hints

    def records(self) -> list[Record]:
        """The last operations of this rank, oldest first."""
        return self.ring.records()

    def last_as_values(self) -> list[list]:
        """The last operations of this rank, oldest first, as plain values for the flight record.

        Returns:
            For each: number of the call, name, dtype, algorithm, bytes, begin and end on the machine's
            monotonic clock and time waiting for peers, in ns.
        """
        return [
            [
                *(r.sequence, r.operation.collective, r.operation.dtype, r.operation.algorithm),
                *(r.operation.nbytes, r.start_ns, r.end_ns, r.waiting_ns),
            ]
            for r in self.records()
        ]

    def clear(self) -> None:
        """Drops all records, so that reports show later operations alone."""
        self.ring.clear()

    def summary(self) -> Summary:
        """This rank's figures by operation, size and algorithm.

        Returns:
            A ``Summary``: a table where it is shown, in a terminal and in a notebook; ``rows`` and
            ``to_dict()`` have the figures.
        """
        from flagcx.profiler.summary import Summary

        return Summary.of(self.rank, self.records(), self._hints())

    def prometheus(self) -> str:
        """The summary's figures in Prometheus' text format."""
        from flagcx.profiler.prometheus import format_metrics

        return format_metrics(self.summary())

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draws this rank's records: where the time went, and time by size.

        Args:
            path: Where to save the picture (.png, .svg, .pdf); not saved if None.

        Returns:
            The matplotlib ``Figure``, which a notebook shows.

        Raises:
            ArgumentError: It cannot be saved there.
            MissingDependencyError: matplotlib is not installed.
        """
        from flagcx.profiler.plot import plot_records

        return plot_records(self.records(), self.rank, path)

    def stragglers(self) -> StragglerReport:
        """Compares all ranks call by call: which begins late, how often, by how much. All ranks must call it.

        Returns:
            The same report on every rank.
        """
        from flagcx.profiler.stragglers import find_stragglers

        return find_stragglers(*self._all_records("comm.profiler.stragglers, which all ranks must call"))

    def save(self, path: str | os.PathLike, own: bool = False) -> Path:
        """Writes a trace for Perfetto or chrome://tracing: of all ranks on one clock, which all must ask for.

        Args:
            path: Where rank 0 writes it.
            own: Whether to write this rank's records alone, which any rank may do at any time.

        Returns:
            The path.

        Raises:
            ArgumentError: It cannot be written there; on every rank.
        """
        from flagcx.profiler.trace import trace_events, write_trace

        if own:
            write_trace(path, trace_events([self.records()], [0], first_rank=self.rank))
            return Path(path)
        records, offsets = self._all_records(_SAVE)
        failure = ""
        if self.rank == 0:
            try:
                write_trace(path, trace_events(records, offsets))
            except ArgumentError as error:
                failure = str(error)
        failure = self._gather(failure, part_of=_SAVE)[0]
        if failure:
            raise ArgumentError(failure)
        return Path(path)

    def _all_records(self, part_of: str) -> tuple[list[list[Record]], list[int]]:
        """Every rank's records, and how far its clock is ahead of rank 0's, in ns."""
        everything = self._gather((self.records(), boot_id() or platform.node()), part_of=part_of)
        records = [mine for mine, _ in everything]
        if len({boot for _, boot in everything}) == 1:
            return records, [0] * self.size  # one machine since it was started: one clock
        return records, self._offsets(part_of)

    def _offsets(self, part_of: str) -> list[int]:
        """Estimates the offsets of the clocks from when ranks leave a barrier."""
        from statistics import median

        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            self._barrier()
            clocks = self._gather(perf_counter_ns(), part_of=part_of)
            rounds.append([clock - clocks[0] for clock in clocks])
        return [int(median(offsets)) for offsets in zip(*rounds, strict=True)]

    def __repr__(self) -> str:
        return f"<flagcx.Profiler rank {self.rank} of {self.size}, {len(self.records())} records>"
