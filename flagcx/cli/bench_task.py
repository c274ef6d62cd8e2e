"""What ``flagcx bench`` is asked to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flagcx.algorithms import Algorithm
from flagcx.algorithms.candidate import Candidate
from flagcx.cli.bench_oracle import BenchMessage
from flagcx.cli.bench_table import sizes
from flagcx.dtypes import OPS, dtype_of, resolve_op
from flagcx.errors import ArgumentError, RankError
from flagcx.schedule.collectives import COLLECTIVES

if TYPE_CHECKING:
    from flagcx.communicator import Communicator

NAMES = tuple(name for name in COLLECTIVES if name != "barrier")


@dataclass(frozen=True, slots=True)
class BenchTask:
    """A measurement, in the words of the options of ``flagcx bench``; sizes are in bytes."""

    collective: str = "allreduce"
    begin: int = 8
    end: int = 64 << 20
    factor: int = 4
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str | None = None
    symmetric: bool = False
    gpu: bool = False
    rounds: int = 7
    compare: tuple[str, ...] = ()

    @property
    def algorithms(self) -> Sequence[str | None]:
        """The algorithms that are named, or None alone for flagcx's choice."""
        return self.algorithm.split(",") if self.algorithm else [None]

    def check(self) -> None:
        """Raises ArgumentError for unknown names and for sizes that are none or don't end."""
        if self.collective not in NAMES:
            raise ArgumentError(
                f"collective={self.collective!r} is not known; expected one of {', '.join(NAMES)}"
            )
        if self.op not in OPS:
            raise ArgumentError(f"op={self.op!r} is not known; expected one of {', '.join(OPS)}")
        resolve_op(self.op, dtype_of(self.dtype))
        sizes(self.begin, self.end, self.factor)

    def check_ranks(self, size: int) -> None:
        """Checks the task for ``size`` ranks, before any is started or sends anything.

        Raises:
            ArgumentError: There is no such algorithm, or it does not serve so many ranks.
            RankError: The root is no rank.
        """
        root = self._root(size)
        for name in self.algorithms:
            if name is not None and not (self.gpu and name == Algorithm.NATIVE):
                Candidate.parse(name).build(self.collective, size, root)

    def _root(self, size: int) -> int | None:
        if not COLLECTIVES[self.collective].rooted:
            return None
        if not 0 <= self.root < size:
            raise RankError(f"root {self.root} is no rank; expected 0 to {size - 1}")
        return self.root

    def message(self, comm: Communicator, nbytes: int) -> BenchMessage:
        """The collective and its message at one size."""
        kind, dtype = COLLECTIVES[self.collective], dtype_of(self.dtype)
        count = nbytes // dtype.numpy.itemsize // (comm.size if kind.blocks else 1)
        op = resolve_op(self.op, dtype) if kind.reduces else None
        return BenchMessage(self.collective, comm.size, self._root(comm.size), count, dtype, op)
