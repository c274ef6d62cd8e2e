"""The library's own threads, which end with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_BEGIN_S = 30.0


class Daemon(threading.Thread):
    """A thread that keeps no process alive.

    Python's ``Thread.start`` waits without end for a thread that the system has started and that dies as it
    begins, because no memory is left. This one waits for some time only.

    Args:
        target: What the thread does.
        name: Its name.
        args: The arguments of ``target``.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _Begun()


def stay_if_process_ends() -> None:
    """Keeps a daemon thread where it is, for good, while the interpreter ends.

    The main thread is done, and closes what the thread still uses. Python itself holds such a thread a moment
    later. An error of a call that the end of the process cuts off would be printed, and tell nothing.
    """
    if threading.current_thread().daemon and not threading.main_thread().is_alive():
        threading.Event().wait()


class _Begun(threading.Event):
    """What ``start`` waits for."""

    def wait(self, timeout: float | None = None) -> bool:
        begun = super().wait(_BEGIN_S if timeout is None else timeout)
        if not begun and timeout is None:
            raise RuntimeError(
                f"can't start new thread: one has not begun within {_BEGIN_S:g} s, for want of memory"
            )
        return begun
