"""Stores that a rank's process runs go on until the other ranks are done.

A rank that makes no further call may end while others are in calls that need nothing of it, such as messages
between two others; MPI has ranks wait for each other in ``MPI_Finalize``. So the store goes on in the
background, and as the process ends it waits: after a good end at most for the time-out of calls, after a
failure, of which the others need only be told, for a moment.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagcx.bootstrap.store_server import StoreServer

_AFTER_FAILURE_S = 1.0


class Serving:
    """The stores that this process runs though its rank is done."""

    def __init__(self) -> None:
        self._longest_s: dict[StoreServer, float] = {}
        self._armed = False

    def arm(self) -> None:
        """Has the end of the process wait for the ranks that are not done.

        To be called before ``atexit.register`` of what tells the others that this rank is done: what is
        registered later runs earlier.
        """
        if not self._armed:
            self._armed = True
            atexit.register(self.wait)

    def go_on(self, server: StoreServer | None, timeout_s: float, failed: bool = False) -> None:
        """Serves on after this rank has left, until no other is connected.

        Args:
            server: What serves; None where this process does not run the store.
            timeout_s: The time-out of the ranks' calls, in seconds.
            failed: Whether this rank left because of a failure. An uncaught exception is one in any case.
        """
        self._longest_s = {one: limit_s for one, limit_s in self._longest_s.items() if not one.ended}
        if server is not None:
            server.close_when_idle()
            failed = failed or hasattr(sys, "last_value")
            self._longest_s[server] = _AFTER_FAILURE_S if failed else timeout_s

    def hurry(self) -> None:
        """Has the end of the process wait for a moment only: this rank has failed after all."""
        for server, limit_s in self._longest_s.items():
            self._longest_s[server] = min(limit_s, _AFTER_FAILURE_S)

    def wait(self) -> None:
        """Waits until the others are done, and ends all stores."""
        while self._longest_s:
            server, longest_s = self._longest_s.popitem()
            server.linger(longest_s)


SERVING = Serving()
"""The process's own."""
