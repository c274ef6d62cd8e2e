"""A function call on ranks that are threads of this process, for ``fc.launch(..., threads=True)``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flagcx._launch.failure import Failure, name_ranks
from flagcx.bootstrap.clock import ActiveClock
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.bootstrap.thread_rank import ThreadRank, thread_rank
from flagcx.errors import LaunchError, what_it_raised

_GRACE_S = 5.0
"""How long the other ranks may go on after one has failed."""


def call_in_threads(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout_s: float | None,
) -> list[Any]:
    """Calls a function on ranks that are threads; see ``flagcx.launch``.

    Raises:
        LaunchError: A rank raised or was too late.
    """
    with StoreServer(ranks) as server:
        server.start()
        threads = [_RankThread(server, rank, ranks, function, args, kwargs) for rank in range(ranks)]
        try:
            for thread in threads:
                thread.start()
            late = _join(threads, timeout_s)
        finally:
            for thread in threads:
                thread.stop()
    if late:
        raise LaunchError(
            f"{name_ranks([thread.rank.rank for thread in late])} given up: not done within {timeout_s:g} s; "
            f"each ends with its next call of flagcx; allow more by timeout_s",
            rank=late[0].rank.rank,
        )
    raised = [(thread.failure, thread) for thread in threads if thread.failure is not None]
    if raised:
        failure, thread = min(raised, key=lambda pair: (pair[0].is_consequence, pair[0].at))
        raise failure.launch_error(thread.rank.rank) from thread.error
    return [thread.value for thread in threads]


def _join(threads: Sequence[_RankThread], timeout_s: float | None) -> list[_RankThread]:
    """Waits for all ranks; after one has failed, not for long.

    Returns:
        The ranks that did not end within ``timeout_s``.
    """
    clock = ActiveClock()
    for thread in threads:
        while thread.is_alive():
            now_s = clock.now()
            failed = [t.failure.at for t in threads if t.failure is not None]
            if failed and time.monotonic() - min(failed) > _GRACE_S:
                return []
            if timeout_s is not None and now_s > timeout_s:
                return [t for t in threads if t.is_alive()]
            left = 0.1 if timeout_s is None else min(0.1, max(timeout_s - now_s, 0) + 1e-3)
            thread.join(left)
    return []


class _RankThread(threading.Thread):
    """The thread of one rank.

    Attributes:
        rank: The rank.
        value: The function's result.
        error: The exception that it raised, or None.
        failure: The description of that exception, or None.
    """

    def __init__(
        self,
        server: StoreServer,
        rank: int,
        size: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(name=f"flagcx-rank-{rank}", daemon=True)
        self.rank = ThreadRank(rank, size, RemoteStore(server.address, server.authkey, rank, size))
        self._call = lambda: function(*args, **kwargs)
        self.value: Any = None
        self.error: BaseException | None = None
        self.failure: Failure | None = None

    def run(self) -> None:
        """Calls the function, then closes its communicators."""
        thread_rank.set(self.rank)
        try:
            self.value = self._call()
            self.rank.end()
        except BaseException as error:
            self.error, self.failure = error, Failure.of(error, __file__)
            self.rank.fail(what_it_raised(error))

    def stop(self) -> None:
        """Has a rank that still runs, and the ranks that wait for it, end with their next call."""
        if self.is_alive():
            self.rank.tell("it was ended by fc.launch")
