"""What the communicator asks of a transport: compile a call once, then run its plan many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flagcx.dtypes import DType, ReduceOp
from flagcx.schedule.collectives import COLLECTIVES, ChunkLayout, Counts, chunk_layout
from flagcx.schedule.model import Program, Schedule


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call as every rank makes it, less the arrays.

    Attributes:
        schedule: Who sends what to whom.
        rank: This rank.
        counts: Elements; see ``flagcx.schedule.collectives.Counts``.
        dtype: The element type.
        op: How contributions are combined, or None where nothing is.
        in_place: Whether INPUT and OUTPUT lie over each other as ``Collective.in_place_shift`` says.
        protocol: One of the transport's ways to move the data; its own choice if empty.
    """

    schedule: Schedule
    rank: int
    counts: Counts
    dtype: DType
    op: ReduceOp | None
    in_place: bool
    protocol: str = ""

    def describe(self) -> str:
        """The call in words that must be the same on every rank."""
        schedule = self.schedule
        if isinstance(self.counts, int):
            count = f"{self.counts}" + (" a rank" if COLLECTIVES[schedule.collective].blocks else "")
        else:
            count = "uneven" if schedule.collective == "alltoall" else f"{self.counts}"
        words = f"{schedule.collective} of {count} {self.dtype.name}"
        if self.op is not None:
            words += f" by {self.op.name}" + ("" if self.op.scale is None else f" x {self.op.scale!r}")
        if schedule.root is not None:
            words += f" with root {schedule.root}"
        way = f", {self.protocol}" if self.protocol else ""
        return f"{words} ({schedule.algorithm}, {schedule.chunks} chunks{way})"

    def program(self) -> Program:
        """This rank's program."""
        return self.schedule.program(self.rank)

    def layout(self, program: Program) -> ChunkLayout:
        """Where each chunk of this rank's buffers lies."""
        s = self.schedule
        return chunk_layout(
            s.collective, self.rank, s.size, s.chunks, s.root, self.counts, program.scratch_used()
        )


class Plan(Protocol):
    """A compiled call."""

    def run(self, given: Any, result: Any) -> None:
        """Runs the call once.

        Args:
            given: The INPUT array (contiguous, of the plan's dtype), or None where this rank has none.
            result: The OUTPUT array, or None; the same memory as ``given`` for a plan in place.
        """


class Transport(Protocol):
    """Carries arrays of one kind between the ranks of one communicator."""

    name: str

    def compile(self, call: Call) -> Plan:
        """Compiles ``call``. The communicator keeps the plan and runs it for every like call."""

    def transfer(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """Sends arrays to ranks and receives arrays from ranks, all at once; only those concerned call it."""

    def take(self, array: Any, what: str, writable: bool) -> Any:
        """Takes a caller's array without a copy, or raises ``ArrayError`` that calls it ``what``."""

    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Takes the array that a caller gives for a result, or makes one."""

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """An uninitialised array that peers reach without a copy."""

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers that this rank cannot go on, and whose fault it is."""

    def close(self) -> None:
        """Gives everything back. Idempotent."""
