"""Jobs that a program makes of processes that it has: workers of a scheduler, actors, an MPI communicator.

Rank 0 opens a meeting, the program tells the other ranks of it by its own means, and each joins. A process
may be a rank of many such jobs, one after the other or at once, and of one that a launcher started.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flagcx.bootstrap.environment import Identity, host_name
from flagcx.bootstrap.rendezvous import join_told
from flagcx.bootstrap.serving import SERVING
from flagcx.bootstrap.sockets import told_addresses
from flagcx.bootstrap.store import LocalStore, StoreServer
from flagcx.bootstrap.thread_rank import ThreadRank, thread_rank
from flagcx.errors import what_it_raised

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job meet, and the secret that lets them in. Plain data, to be handed to all ranks.

    Attributes:
        size: Number of ranks.
        addresses: Addresses of rank 0's store, as ``StoreServer`` has them.
        key: The secret.
        job: What made the job, as messages name it.
    """

    size: int
    addresses: tuple[str, ...]
    key: bytes = field(repr=False)
    job: str


def open_meeting(size: int, one_host: bool, job: str) -> tuple[Meeting, StoreServer]:
    """Rank 0's part: has a store listen, on an abstract Unix socket where all ranks are on one host.

    Args:
        size: Number of ranks.
        one_host: Whether all of them are on this host.
        job: What makes the job, as messages name it.
    """
    address = None if one_host else "0.0.0.0:0"
    key = secrets.token_bytes(32)
    server = StoreServer(size, address, key, host="rank 0", host_rank=0).start()
    if one_host:
        return Meeting(size, (server.address,), key, job), server
    return Meeting(size, tuple(told_addresses(server.address)), key, job), server


class MetRank(ThreadRank):
    """A rank of a meeting. ``end`` or ``fail`` ends it, at the latest as the process ends.

    Args:
        meeting: The meeting.
        rank: This rank.
        timeout_s: How long the store may take to answer, in seconds.
        server: The store, which this process runs: on rank 0.

    Raises:
        BootstrapError: The store cannot be reached, or refused this rank.
    """

    def __init__(
        self, meeting: Meeting, rank: int, timeout_s: float, server: StoreServer | None = None
    ) -> None:
        identity = Identity(rank, meeting.size, -1, 0, host_name(), meeting.job, "given")
        try:
            alone = meeting.size == 1
            store = LocalStore() if alone else join_told(identity, meeting.addresses, meeting.key, timeout_s)
        except BaseException:
            if server is not None:
                server.close()
            raise
        super().__init__(rank, meeting.size, store, meeting.job, own_process=True)
        self._server, self._ended = server, False
        SERVING.arm()
        atexit.register(self._end_at_exit)

    def end(self) -> None:
        """Ends the rank in good order; may be called again."""
        if self._begin_to_end():
            super().end()
            self._leave()

    def fail(self, reason: str) -> None:
        """Ends the rank after an error, of which the others learn."""
        if self._begin_to_end():
            comm = None if self.world is None else self.world.comm
            if comm is not None and not comm.closed:
                comm.abort(reason)  # so that the others get the reason, and not only that this rank has left
            super().fail(reason)
            self._leave(failed=True)

    def _begin_to_end(self) -> bool:
        ended, self._ended = self._ended, True
        return not ended

    def _leave(self, failed: bool = False) -> None:
        """Serves the others on, where this rank runs the store or has taken it over."""
        atexit.unregister(self._end_at_exit)
        comm = None if self.world is None else self.world.comm
        server = self._server or getattr(self.store, "server", None)
        if comm is None:  # so the others are in no calls
            SERVING.go_on(server, 0.0, True)
        else:
            SERVING.go_on(server, comm.config.timeout_s, failed or bool(comm.blames))

    def _end_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is None:
            self.end()
        else:
            self.fail(what_it_raised(error))

    def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Calls a function in which ``fc.init()`` gives this rank's communicator."""

        def inside() -> Result:
            thread_rank.set(self)
            return function(*args, **kwargs)

        return copy_context().run(inside)


@contextlib.contextmanager
def met(rank: MetRank) -> Iterator[MetRank]:
    """Ends a rank with its block; the other ranks learn of an error that ends it."""
    try:
        yield rank
    except BaseException as error:
        rank.fail(what_it_raised(error))
        raise
    rank.end()
