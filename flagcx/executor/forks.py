"""Executors in a forked child: copies of their parent's, which refuse every call and close nothing."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from typing import Protocol


class Forked(Protocol):
    """An object that must not be used in a child.

    Attributes:
        forked: Whether it is a copy in a child.
    """

    forked: bool

    def end(self, why: str) -> None:
        """Refuses every further call."""


def refuse_in_children(executor: Forked) -> None:
    """Ends an executor in every child that this process forks from now on, and in the child alone."""
    _executors().add(executor)


@lru_cache(maxsize=1)
def _executors() -> weakref.WeakSet[Forked]:
    """The executors of this process."""
    executors: weakref.WeakSet[Forked] = weakref.WeakSet()

    def in_child() -> None:
        for executor in executors:
            executor.forked = True
            executor.end(
                "this communicator was made before a fork and cannot be used in the child; start ranks with "
                "flagcx run, fc.launch or multiprocessing's spawn method, and call fc.init() in each"
            )

    os.register_at_fork(after_in_child=in_child)
    return executors
