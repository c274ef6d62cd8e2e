"""What binds a rank to its launcher: when the launcher is gone, so is the rank, with all it started."""

from __future__ import annotations

import fcntl
import os
import select
import signal


def guard(pipe: int) -> None:
    """Has the kernel kill this process's group when the launcher dies, however it dies.

    The launcher holds the other end of the pipe. When its process ends the kernel closes that end, and
    signals the owner that was set here. That needs no thread, works while the interpreter is busy in C,
    and reaches the processes which this rank started.

    Args:
        pipe: The reading end of a pipe, which must stay open.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # It died before the signal was set.
        os.killpg(os.getpgrp(), signal.SIGKILL)
