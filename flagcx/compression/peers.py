"""What a compressed all-reduce asks of the other ranks. The communicator offers it; tests may, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from flagcx.compression.codec import Scratch

Messages = Sequence[tuple[Any, int]]


class Pending(Protocol):
    """A call under way."""

    def result(self) -> Any:
        """Waits for its end; raises the error that it ended with."""


class Peers(Protocol):
    """The ranks of one communicator, for arrays of one kind. All make the same calls in the same order.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        scratch: Arrays for intermediate results, of all compressed calls of the communicator.
    """

    rank: int
    size: int
    scratch: Scratch

    def alltoall(self, given: Any, result: Any) -> None:
        """Sends block q of ``given`` (uint8) to rank q; block q of ``result`` comes from rank q."""

    def allgather(self, given: Any, result: Any) -> None:
        """Fills ``result`` (uint8) with everybody's ``given``."""

    def allreduce(self, given: Any, result: Any) -> None:
        """Writes the sum of everybody's ``given`` into ``result``, which may be the same array."""

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Sends arrays to ranks and receives arrays from ranks, all at once."""

    def numbers(self, mine: Sequence[int]) -> np.ndarray:
        """Everybody's numbers (as many on every rank), a row for each rank, as int64 on the host."""

    def beside(self) -> AbstractContextManager[None]:
        """A block in which this thread computes beside calls made ``behind``, which leave it the core."""

    def behind(self, call: Callable[[], object]) -> Pending:
        """Makes a call behind those that were given before, while this thread goes on where it can."""
