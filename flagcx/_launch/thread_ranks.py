"""A function call on ranks that are threads of this process: what ``fc.launch(..., threads=True)`` does."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.bootstrap.thread_rank import ThreadRank, thread_rank
from flagcx.errors import AbortedError, CommunicationError, LaunchError, PeerDiedError, PeerTimeoutError

_GRACE_S = 5.0
"""How long the other ranks may go on after one has failed."""
_CONSEQUENCES = (PeerDiedError, PeerTimeoutError, AbortedError, CommunicationError)


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
        names = ", ".join(str(thread.rank.rank) for thread in late)
        raise LaunchError(
            f"rank {names} did not end within {timeout_s:g} s; its thread ends with its next call of flagcx; "
            f"allow more by timeout_s",
            rank=late[0].rank.rank,
        )
    raised = [thread for thread in threads if thread.error is not None]
    if raised:
        first = min(raised, key=lambda thread: (type(thread.error) in _CONSEQUENCES, thread.ended_at))
        raise first.blame() from first.error
    return [thread.value for thread in threads]


def _join(threads: Sequence[_RankThread], timeout_s: float | None) -> list[_RankThread]:
    """Waits for all ranks, but for the others not for long after one has failed.

    Returns:
        The ranks that did not end within ``timeout_s``.
    """
    start = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            failed = [t.ended_at for t in threads if t.error is not None]
            now = time.monotonic()
            if failed and now - min(failed) > _GRACE_S:
                return []
            if timeout_s is not None and now - start > timeout_s:
                return [t for t in threads if t.is_alive()]
            left = 0.1 if timeout_s is None else min(0.1, max(start + timeout_s - now, 0) + 1e-3)
            thread.join(left)
    return []


class _RankThread(threading.Thread):
    """The thread of one rank.

    Attributes:
        rank: The rank.
        value: What the function returned.
        error: What it raised, or None.
        ended_at: When it raised, on the monotonic clock, in seconds.
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
        self.ended_at = 0.0

    def run(self) -> None:
        """Calls the function, then closes what it has opened."""
        thread_rank.set(self.rank)
        try:
            self.value = self._call()
            self.rank.end()
        except BaseException as error:
            self.error, self.ended_at = error, time.monotonic()
            self.rank.fail(f"it raised {type(error).__name__}: {str(error)[:500]}")

    def stop(self) -> None:
        """Lets a rank that still runs, and those that wait for it, end with their next call."""
        if self.is_alive():
            self.rank.tell("it was ended by fc.launch")

    def blame(self) -> LaunchError:
        """The error of ``launch`` for what the function raised."""
        error = self.error
        assert error is not None
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return LaunchError(
            f"rank {self.rank.rank} raised {kind}: {error}\n\n{text}",
            rank=self.rank.rank,
            exit_code=1,
            traceback=text,
        )
