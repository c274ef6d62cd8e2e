"""Watches what a rank has enqueued on its GPU, so that no operation can hang for ever unnoticed.

A thread of each rank publishes in the store how far the rank has come, and looks for three things: a rank
that died, a rank that gave up, and an operation of its own that is not done within the time-out. It then
names what every rank is doing, gives that to whoever waits, and has NCCL's operations aborted, which
frees the streams that wait for them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from flagcx.bootstrap.store import Store
from flagcx.errors import AbortedError, CommunicationError, FlagcxError, PeerDiedError, PeerTimeoutError

logger = logging.getLogger("flagcx")

_TICK_S = 0.25
_PUBLISH_S = 1.0
_ABORT_LIMIT_S = 3.0


class Watched(Protocol):
    """What the watchdog asks of a transport, from its own thread."""

    @property
    def issued(self) -> int:
        """Operations enqueued so far."""

    def describe(self) -> str:
        """The last operation that was enqueued, such as "allreduce (ring) of 1024 float32"."""

    def pending_since(self) -> float | None:
        """When the oldest operation that is known to be unfinished was seen first (time.monotonic)."""

    def fault(self) -> CommunicationError | None:
        """The error of a wait that was given up on the GPU, or None."""

    def fail(self, error: FlagcxError) -> None:
        """Takes the error that everybody who waits is to get."""

    def abort_enqueued(self) -> None:
        """Aborts the operations that are under way. May take long."""

    def is_stuck(self) -> bool:
        """Whether a thread of the rank is inside a call into NCCL."""


class Watchdog:
    """The watching thread of one rank of one communicator.

    Args:
        watched: The transport.
        store: The communicator's part of the store.
        timeout_s: How long an operation may take once it is enqueued, in seconds.
        leave: Called if a thread of the rank is still inside NCCL after the abort; ends the process.
    """

    def __init__(
        self, watched: Watched, store: Store, timeout_s: float, leave: Callable[[str], None]
    ) -> None:
        self._watched, self._store, self._timeout_s, self._leave = watched, store, timeout_s, leave
        self._tick_s = min(_TICK_S, timeout_s / 8)
        self._stop = threading.Event()
        self._published = (0.0, -1)
        self._thread = threading.Thread(target=self._run, name="flagcx-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching. Idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.wait(self._tick_s):
            try:
                error = self._look()
            except PeerDiedError as death:
                last = self._watched.describe()
                error = PeerDiedError(f"{death}; rank {self._store.rank} was in {last}", peer=death.peer)
            except FlagcxError:
                return  # The store is closed: the job is ending.
            if error is not None:
                self._give_up(error)
                return

    def _look(self) -> CommunicationError | None:
        """One round: publish, then look for a reason to give up."""
        self._publish()
        since = self._watched.pending_since()
        self._store.check()
        fault = self._watched.fault()
        if fault is not None:
            return fault
        if self._store.add("nccl/failures", 0):
            here = f"rank {self._store.rank} was in {self._watched.describe()}"
            return AbortedError(f"another rank gave up: {self._reason()}; {here}")
        if since is not None and time.monotonic() - since > self._timeout_s:
            return self._late()
        return None

    def _publish(self) -> None:
        at, issued = self._published
        now = time.monotonic()
        if now - at >= _PUBLISH_S and issued != self._watched.issued:
            self._published = now, self._watched.issued
            self._store.set(f"nccl/progress/{self._store.rank}", self._progress())

    def _progress(self) -> bytes:
        return json.dumps([self._watched.issued, self._watched.describe()]).encode()

    def _late(self) -> PeerTimeoutError:
        """Names what each rank is doing, and the rank that has done least."""
        store = self._store
        store.set(f"nccl/progress/{store.rank}", self._progress())
        seen = {rank: self._progress_of(rank) for rank in range(store.size)}
        lines = [f"  rank {rank}: {what or 'nothing'} (operation {n})" for rank, (n, what) in seen.items()]
        least = min(seen, key=lambda rank: seen[rank][0])
        behind = least if seen[least][0] < self._watched.issued else None
        blame = (
            f"rank {behind} is behind" if behind is not None else "all ranks have come to the same operation"
        )
        return PeerTimeoutError(
            f"rank {store.rank}: {self._watched.describe()} is not done after {self._timeout_s:g} s; "
            f"{blame}. The last operation of each rank:\n" + "\n".join(lines) + "\n"
            "Every rank must make the same calls with the same counts and dtypes (FLAGCX_DEBUG=check "
            "compares them); FLAGCX_TIMEOUT_S sets the time-out",
            peer=behind,
        )

    def _progress_of(self, rank: int) -> tuple[int, str]:
        try:
            issued, what = json.loads(self._store.get(f"nccl/progress/{rank}", 2 * self._tick_s))
        except FlagcxError:
            return 0, ""
        return issued, what

    def _reason(self) -> str:
        try:
            return self._store.get("nccl/reason", 0.5).decode()
        except FlagcxError:
            return "it gave no reason"

    def _give_up(self, error: CommunicationError) -> None:
        self._watched.fail(error)
        logger.error("%s", error)
        if not isinstance(error, AbortedError):
            self.tell(error)
        aborter = threading.Thread(target=self._watched.abort_enqueued, name="flagcx-abort", daemon=True)
        aborter.start()
        aborter.join(_ABORT_LIMIT_S)
        time.sleep(self._tick_s)
        if self._watched.is_stuck():
            here = f"rank {self._store.rank} is still inside NCCL {_ABORT_LIMIT_S:g} s after the abort"
            self._leave(f"{here}: {error}")

    def tell(self, error: CommunicationError) -> None:
        """Tells the other ranks that this one gave up."""
        try:
            self._store.set("nccl/reason", str(error).splitlines()[0].encode())
            self._store.add("nccl/failures", 1)
        except FlagcxError:
            logger.debug("the store is gone; the other ranks find out by themselves")
