"""Notices that processes have ended: through their descriptors, or through /proc where there are none."""

from __future__ import annotations

import os
import select
import threading
import weakref
from pathlib import Path

from flagcx.descriptors import Identity, close_own, identity_of, is_own, occupy_standard_streams

_PROCESSES = Path("/proc")
_GONE = frozenset("ZXx")
"""The states of a process that has ended and that its parent has yet to ask about."""


class Deaths:
    """Some processes, of which it is known whether they live."""

    def __init__(self) -> None:
        self._poll, self._polling = select.poll(), threading.Lock()
        self._descriptors: dict[int, tuple[int, int, Identity]] = {}  # peer, process, and what is open
        self._let_go = weakref.finalize(self, _close_all, self._descriptors)
        self._let_go.atexit = False
        self._births: dict[int, tuple[int, str]] = {}  # for each peer its process, and when that began

    def watch(self, peer: int, pid: int) -> bool:
        """Begins to watch the process of a peer. Returns whether it lives."""
        try:
            descriptor = self._open(pid)
            if descriptor is None:
                state = _state_of(pid)
                if state is not None:
                    self._births[peer] = pid, state[1]
                return state is None or state[0] not in _GONE
        except ProcessLookupError:
            return False
        self._descriptors[descriptor] = peer, pid, identity_of(descriptor)
        self._poll.register(descriptor, select.POLLIN)
        return True

    @staticmethod
    def _open(pid: int) -> int | None:
        occupy_standard_streams()
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, AttributeError):  # an old kernel or Python, a filter, no descriptor left
            return None

    def peers(self) -> list[int]:
        """The peers whose processes have ended."""
        ended = []
        with self._polling:  # which two threads may not do at once
            for descriptor, _ in self._poll.poll(0) if self._descriptors else ():
                peer, pid, identity = self._descriptors[descriptor]
                if is_own(descriptor, identity) or not self._watch_again(descriptor, peer, pid):
                    ended.append(peer)
        for peer, (pid, birth) in self._births.items():
            try:
                state = _state_of(pid)
            except ProcessLookupError:
                state = "X", birth
            if state is not None and (state[0] in _GONE or state[1] != birth):
                ended.append(peer)
        return ended

    def _watch_again(self, descriptor: int, peer: int, pid: int) -> bool:
        """Watches a process whose descriptor the program has closed."""
        self._poll.unregister(descriptor)
        del self._descriptors[descriptor]
        return self.watch(peer, pid)

    def close(self) -> None:
        """Watches no more."""
        self._let_go()
        self._births.clear()


def _close_all(descriptors: dict[int, tuple[int, int, Identity]]) -> None:
    while descriptors:
        descriptor, (_, _, identity) = descriptors.popitem()
        close_own(descriptor, identity)


def _state_of(pid: int) -> tuple[str, str] | None:
    """The state of a process and when it began; None where the system does not tell.

    A number that another process has got since is told apart by when that began.

    Raises:
        ProcessLookupError: There is no such process.
    """
    try:
        fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    except OSError:
        return None
    return fields[0], fields[19]
