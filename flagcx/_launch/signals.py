"""What a signal to the launcher does to its ranks.

==================  ================================================================================
SIGTERM, SIGQUIT    the ranks end, with SIGTERM, and after ``FLAGCX_KILL_AFTER_S`` with SIGKILL
SIGHUP              likewise, unless it is ignored, as under nohup
SIGINT (Ctrl-C)     likewise, with SIGINT; a second one ends all at once
SIGUSR1, SIGUSR2    each rank gets it too, but no process that a rank has started
SIGTSTP (Ctrl-Z)    all ranks stop, then the launcher; as it continues (``fg``, ``bg``), they do
SIGWINCH            rank 0 learns the size of the terminal
==================  ================================================================================
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from flagcx._launch.ranks import Ranks

_Handler = Callable[[int, FrameType | None], object]


class Ended(BaseException):
    """A signal told the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def passed_on(job: Ranks, resized: Callable[[], object], resumed: Callable[[], object]) -> Iterator[None]:
    """In its block signals do what the table above says. (Ctrl-C raises KeyboardInterrupt, as ever.)

    Args:
        job: The ranks.
        resized: Called when the terminal has another size.
        resumed: Called when the launcher was stopped and goes on.

    Raises:
        Ended: A signal told the launcher to end.
    """

    def end(number: int, _frame: object) -> None:
        raise Ended(number)

    def tell(number: int, _frame: object) -> None:
        job.signal_all(number, children=False)

    def stop(number: int, _frame: object) -> None:
        # SIGTSTP would not stop ranks that have a session of their own.
        job.signal_all(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), number)  # Here the launcher stands still.
        signal.signal(number, stop)
        job.signal_all(signal.SIGCONT)
        resumed()

    handlers: dict[int, _Handler] = {
        signal.SIGTERM: end,
        signal.SIGQUIT: end,
        signal.SIGHUP: end,
        signal.SIGUSR1: tell,
        signal.SIGUSR2: tell,
        signal.SIGTSTP: stop,
        signal.SIGWINCH: lambda _number, _frame: resized(),
    }
    for ignored in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            del handlers[ignored]
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
