"""Runs a call of another library's that waits for all ranks, such as one with which they connect."""

from __future__ import annotations

from collections.abc import Callable

from flagcx.bootstrap.clock import ActiveClock
from flagcx.daemon import Daemon
from flagcx.errors import ResourceError

_POLL_S = 0.05


def bounded(function: Callable[[], object], limit_s: float, check: Callable[[], object]) -> bool:
    """Makes a call on a thread, and waits for it.

    Args:
        function: The call, which must let other threads run.
        limit_s: For how long to wait at most, in seconds.
        check: Raises if a rank is known to have died; called while the call goes on.

    Returns:
        Whether the call has returned.

    Raises:
        ResourceError: No thread can be started.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = Daemon(run, "flagcx-bounded")
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceError(
            f"no thread can be started ({error}); allow this process more memory (ulimit -v) or threads "
            f"(ulimit -u)"
        ) from None
    clock = ActiveClock()
    while thread.is_alive() and clock.now() < limit_s:
        thread.join(min(_POLL_S, limit_s))
        if thread.is_alive():
            check()
    if errors:
        raise errors[0]
    return not thread.is_alive()
