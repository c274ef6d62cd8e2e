"""Ends the calls of an executor from any thread, and waits until none is inside one any more."""

from __future__ import annotations

import time
from concurrent.futures import wait

from flagcx.errors import AbortedError
from flagcx.executor.host import Executor

_LOOK_AGAIN_S = 1e-3


def abort_calls(executor: Executor, reason: str) -> None:
    """Ends every call, on this rank and its peers, unless it is over already. Any thread may call it."""
    if executor.over:
        return
    why = f"this communicator was aborted ({reason}); make a new one: fc.init() or comm.shrink()"
    if executor.messages is not None and executor.messages.callers:
        executor.leave_untold(AbortedError(why, peer=executor.rank))
    executor.end(why)
    executor.transport.abort(reason, None)


def retire(executor: Executor, limit_s: float) -> bool:
    """Waits until no thread is in a call, and lets none in any more, after ``abort_calls``.

    Returns:
        False if one still is after ``limit_s`` seconds, such as this very thread in a signal handler.
    """
    deadline = time.monotonic() + limit_s
    if executor._last is not None and wait([executor._last], limit_s).not_done:
        return False
    while executor.messages is not None and executor.messages.callers:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_AGAIN_S)
    executor.retired = executor.retired or executor.turn.acquire(
        timeout=max(deadline - time.monotonic(), 0.0)
    )
    return executor.retired
