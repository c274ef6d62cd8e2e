"""Signals that end the launcher, at moments at which they would leave a job half started or half ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """In its block signals for which Python raises an exception wait until the block ends.

    Otherwise Ctrl-C's ``KeyboardInterrupt`` may come between any two instructions: after the start of a
    process and before the note of its id, or while a thread is being started, which cannot be joined then.
    """
    found = {number: signal.getsignal(number) for number in _ENDING}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # signals come to the main thread
    came: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for caught in came:
            handlers[signal.Signals(caught)](caught, None)
