"""The rank that a thread is, where its program made the job: of threads, or of processes that it has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flagcx.bootstrap.environment import Identity, host_name
from flagcx.bootstrap.store import Store
from flagcx.errors import FlagcxError


@dataclass(slots=True)
class ThreadRank:
    """One rank of a job that its program made.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        store: Its end of the job's store.
        job: What made the job, as messages name it.
        own_process: Whether every rank has a process of its own; else all are threads of this one.
        world: What ``fc.init()`` keeps for this rank.
        on_failure: Called with the reason when the rank cannot go on, so that its peers hear of it.
        on_end: Called when the rank's function has returned or raised.
    """

    rank: int
    size: int
    store: Store
    job: str = "threads"
    own_process: bool = False
    world: Any = None
    on_failure: list[Callable[[str], object]] = field(default_factory=list)
    on_end: list[Callable[[], object]] = field(default_factory=list)

    @property
    def identity(self) -> Identity:
        """Its place in the job."""
        local = (-1, 0) if self.own_process else (self.rank, self.size)
        launcher = "given" if self.own_process else "flagcx"
        return Identity(self.rank, self.size, *local, host_name(), self.job, launcher)

    def end(self) -> None:
        """Ends the rank in good order: closes its communicators, then its end of the store."""
        for call in self.on_end:
            call()
        self.store.close()

    def tell(self, reason: str) -> None:
        """Tells the peers that this rank cannot go on: they get ``PeerDiedError`` with the reason."""
        for tell in self.on_failure:
            tell(reason)

    def fail(self, reason: str) -> None:
        """Ends the rank after an error."""
        self.tell(reason)
        for call in self.on_end:
            with contextlib.suppress(FlagcxError):
                call()
        self.store.abort(reason)


thread_rank: ContextVar[ThreadRank | None] = ContextVar("flagcx.thread_rank", default=None)
"""The rank that runs in this thread; None where the whole process is one rank."""
