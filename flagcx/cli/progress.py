"""How the ranks that a command started tell it how far they are: a socket that each of them connects to."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener

Report = Callable[..., object]
_LIMIT_S = 10.0
"""How long the last words of a rank that has ended are waited for."""


@contextlib.contextmanager
def heard(report: Report) -> Iterator[str]:
    """Listens to the ranks on threads of its own; all that came is reported when the block ends.

    Args:
        report: Called with what a rank sends, one tuple of arguments at a time.

    Yields:
        The address to give to the ranks.
    """
    lines: list[threading.Thread] = []

    def listen(line: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), line:
            while True:
                report(*line.recv())

    def accept(listener: Listener) -> None:
        with contextlib.suppress(OSError):
            while True:
                lines.append(threading.Thread(target=listen, args=(listener.accept(),), daemon=True))
                lines[-1].start()

    with tempfile.TemporaryDirectory(prefix="flagcx-") as directory:
        address = os.path.join(directory, "progress")
        with Listener(address, family="AF_UNIX", backlog=256) as listener:
            threading.Thread(target=accept, args=(listener,), daemon=True).start()
            yield address
            for line in lines:
                line.join(_LIMIT_S)


def telling(address: str) -> Connection:
    """The line of a rank to the command that started it."""
    return Client(address, family="AF_UNIX")
