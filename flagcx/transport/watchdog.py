"""Watches the operations that a rank has enqueued on its GPU, so that none can hang without an error.

A thread of each rank publishes the rank's progress in the store and looks for three things: a rank that died,
a rank that gave up, and an operation of its own that is not done within the time-out. It then ends the
communicator with an error that names every rank's last operation, and aborts NCCL's operations, which frees
the streams that wait for them.
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
from flagcx.transport.stream_order import StreamOrder

logger = logging.getLogger("flagcx")

_TICK_S = 0.25
_PUBLISH_S = 1.0
_ABORT_LIMIT_S = 3.0


class Watched(Protocol):
    """The parts of a transport that its watchdog calls, from the watchdog's thread."""

    def fault(self) -> CommunicationError | None:
        """The error of a wait that timed out on the GPU, or None."""

    def fail(self, error: FlagcxError) -> None:
        """Ends the communicator with an error, which later calls and waits raise."""

    def abort_enqueued(self) -> None:
        """Aborts the operations that are under way. May take long."""


class Watchdog:
    """The watching thread of one rank of one communicator.

    Args:
        order: The operations.
        watched: The transport.
        store: The communicator's part of the store.
        timeout_s: How long an operation may take after it is enqueued, in seconds.
        leave: Ends the process; called if a thread of the rank is still inside NCCL after the abort.
    """

    def __init__(
        self,
        order: StreamOrder,
        watched: Watched,
        store: Store,
        timeout_s: float,
        leave: Callable[[str], None],
    ) -> None:
        self._order, self._watched, self._store = order, watched, store
        self._timeout_s, self._leave = timeout_s, leave
        self._tick_s = min(_TICK_S, timeout_s / 8)
        self._stop = threading.Event()
        self._published = (0.0, -1)
        self._thread = threading.Thread(target=self._run, name="flagcx-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.wait(self._tick_s):
            try:
                error = self._look()
            except PeerDiedError as death:
                here = f"rank {self._store.rank} was in {self._order.what}"
                error = PeerDiedError(f"{death}; {here}", peer=death.peer)
            except FlagcxError:
                return  # The store is closed: the job is ending.
            if error is not None:
                self._give_up(error)
                return

    def _look(self) -> CommunicationError | None:
        """Publishes the progress, then looks for an error."""
        self._publish_progress()
        since = self._order.pending_since()
        self._store.check()
        fault = self._watched.fault()
        if fault is not None:
            return fault
        if self._store.add("nccl/failures", 0):
            here = f"rank {self._store.rank} was in {self._order.what}"
            return AbortedError(f"another rank gave up: {self._reason()}; {here}")
        if since is not None and time.monotonic() - since > self._timeout_s:
            return self._late()
        return None

    def _publish_progress(self) -> None:
        at, issued = self._published
        now = time.monotonic()
        if now - at >= _PUBLISH_S and issued != self._order.issued:
            self._published = now, self._order.issued
            self._store.set(f"nccl/progress/{self._store.rank}", self._progress())

    def _progress(self) -> bytes:
        return json.dumps([self._order.issued, str(self._order.what)]).encode()

    def _late(self) -> PeerTimeoutError:
        """The error of a late operation: it names each rank's last operation, and the rank that is behind."""
        store = self._store
        store.set(f"nccl/progress/{store.rank}", self._progress())
        seen = {rank: self._progress_of(rank) for rank in range(store.size)}
        lines = [f"  rank {rank}: {what or 'nothing'} (operation {n})" for rank, (n, what) in seen.items()]
        least = min(seen, key=lambda rank: seen[rank][0])
        behind = least if seen[least][0] < self._order.issued else None
        blame = (
            f"rank {behind} is behind" if behind is not None else "all ranks have come to the same operation"
        )
        return PeerTimeoutError(
            f"rank {store.rank}: {self._order.what} is not done after {self._timeout_s:g} s; "
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
            self.publish(error)
        aborter = threading.Thread(target=self._watched.abort_enqueued, name="flagcx-abort", daemon=True)
        aborter.start()
        aborter.join(_ABORT_LIMIT_S)
        time.sleep(self._tick_s)
        if self._order.inside:
            here = f"rank {self._store.rank} is still inside NCCL {_ABORT_LIMIT_S:g} s after the abort"
            self._leave(f"{here}: {error}")

    def publish(self, error: CommunicationError) -> None:
        """Lets the other ranks know that this one gave up."""
        try:
            self._store.set("nccl/reason", str(error).splitlines()[0].encode())
            self._store.add("nccl/failures", 1)
        except FlagcxError:
            logger.debug("the store is closed; the other ranks find out by themselves")
