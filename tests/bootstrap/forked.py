"""Processes that run a program at once: no interpreter has to start, and import NumPy and flagcx, first."""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


class Forked(subprocess.Popen):
    """A child of this process in a session of its own, with pipes for its input and all its output, as text.

    Args:
        program: Python source.
        environ: The environment.
    """

    def __init__(self, program: str, environ: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        super().__init__(program, env=environ, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def _execute_child(self, program: str, *given: Any) -> None:  # type: ignore[override]
        environ, read, write = given[5], given[9], given[12]
        self.pid = _server().fork(program, environ, read, write)
        self._child_created = True
        os.close(read)
        os.close(write)


def end_server() -> None:
    """Ends the process from which others are forked."""
    _server().close()
    _server.cache_clear()


@lru_cache(maxsize=1)
def _server() -> _Server:
    return _Server()


class _Server:
    """``tests.bootstrap.fork_server``, and the link to it."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # Python 3.12 warns of a fork beside threads, which is just what one test is about.
            options, module = ("-W", "ignore::DeprecationWarning"), "tests.bootstrap.fork_server"
            self._process = subprocess.Popen(
                [sys.executable, *options, "-m", module, str(number)],
                pass_fds=[number],
                cwd=Path(__file__).parents[2],  # where -m looks first
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fork(self, program: str, environ: Mapping[str, str], read: int, write: int) -> int:
        """Forks a process, which gets the two ends of pipes, as a child of this one. Returns its number."""
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._link, [pickle.dumps((program, dict(environ), os.getcwd()))], [read, write])
            return int(self._link.recv(64))
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._link.close()
        self._process.wait()
