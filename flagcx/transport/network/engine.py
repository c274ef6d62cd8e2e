"""What carries messages between processes on any hosts: a library such as MPI or UCX, behind few methods.

``wire.py`` asks an engine to send and to receive pieces of memory, and looks whether that is done. With each
tag, the pieces that a rank sends to another one arrive in order. An engine neither waits nor knows calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


class Engine(ABC):
    """Carries the pieces of one communicator. Any thread may call it, several at once.

    Attributes:
        name: What it is called in errors.
        error: What its methods raise where it fails.
        rank: This rank.
        size: Number of ranks.
        send: ``send(memory, peer, tag)`` begins to send memory to a rank, and returns a request.
        receive: ``receive(memory, peer, tag)`` begins to receive what a rank sends, and returns a request.
            What comes may be shorter than the memory.
        is_done: Whether a request has ended; looks after all that is under way first.
        all_done: Whether all of a list have ended.
        some_done: Whether some of a list have ended that had not when ``some_done`` was asked last.
    """

    name: str
    error: type[Exception]
    rank: int
    size: int
    send: Callable[[Any, int, int], Any]
    receive: Callable[[Any, int, int], Any]
    is_done: Callable[[Any], bool]
    all_done: Callable[[Sequence[Any]], bool]
    some_done: Callable[[Sequence[Any]], bool]

    @abstractmethod
    def memory(self, array: np.ndarray) -> Any:
        """What ``send`` and ``receive`` take for the bytes of a contiguous array."""

    @abstractmethod
    def first(self, tag: int) -> int | None:
        """A rank whose piece with this tag has come, and that nothing has received so far."""

    @abstractmethod
    def cancel(self, request: Any) -> None:
        """Takes back a receive that has met no piece; may do nothing to any other request."""

    def stop(self) -> None:  # noqa: B027
        """Ends all that is under way, where that can be done, since memory is given back to its owner."""

    def reached(self) -> Iterable[int]:
        """The other ranks that this one may have exchanged pieces with."""
        return (rank for rank in range(self.size) if rank != self.rank)

    def lost(self) -> list[int]:
        """The ranks of which the engine knows that they have died."""
        return []

    @abstractmethod
    def close(self, over: Callable[[], bool]) -> None:
        """Gives everything back when nothing of it is needed any more.

        Args:
            over: Whether no rank makes a further call.
        """
