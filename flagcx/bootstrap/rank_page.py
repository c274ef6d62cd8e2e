"""The page on which a rank shows its user's other processes where it is; ``flagcx status`` reads it.

A page is an anonymous memory file. It has no name on disk, it ends with its process, and only its user (and
root) can open it, through ``/proc/<pid>/fd``. It can be read whatever its process does: hung, stopped or
computing. A rank writes it when a communicator is made or closed and when a wait gets long; no call does.

::

    byte 0        which of two copies holds
    4 KiB         first copy: its length, then JSON
    1 MiB + 4 KiB second copy
    2 MiB + 4 KiB the stacks that faulthandler writes when a signal ends the process
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from flagcx.descriptors import close_own, identity_of, is_own, occupy_standard_streams

NAME = "flagcx-rank"
_HEADER_NBYTES, _COPY_NBYTES = 4096, 1 << 20
STACKS_AT = _HEADER_NBYTES + 2 * _COPY_NBYTES
_STACKS_NBYTES = 256 << 10
_MOST_NBYTES = _COPY_NBYTES - 4
_END_S = 5.0
_TURN, _LENGTH = struct.Struct("<Q"), struct.Struct("<I")

Fields = dict[str, Any]


class RankPage:
    """What one rank of a job shows. Methods may be called from any thread, and do nothing once it is closed.

    Args:
        fields: What is known of the rank from the start: plain values, as in JSON.

    Attributes:
        descriptor: The memory file; -1 where the system has none.
        neighbours: The process of each rank of this host, by its number in the job, and its page's descriptor
            there.
        record: Writes the flight record after an error, and returns a sentence that says where it is; "" if
            there is none.
    """

    def __init__(self, fields: Fields) -> None:
        self._fields: Fields = {"pid": os.getpid(), **fields}
        self._lock, self._owner, self._turn = threading.RLock(), os.getpid(), 0
        self._entries: list[weakref.ref[CommunicatorEntry]] = []
        self.neighbours: dict[int, tuple[int, int]] = {}
        self.record: Callable[[BaseException], str] = lambda error: ""
        self._identity = -1, -1
        occupy_standard_streams()
        try:
            self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, STACKS_AT + _STACKS_NBYTES)
            os.lseek(self.descriptor, STACKS_AT, os.SEEK_SET)  # where faulthandler writes
            self._identity = identity_of(self.descriptor)
        except OSError:
            self.descriptor = -1
        self.set()

    def set(self, **fields: Any) -> None:
        """Shows further values, or other ones."""
        with self._lock:
            self._fields |= fields
            self._write()

    def add(self, name: str, ranks: Sequence[int]) -> CommunicatorEntry:
        """Adds a communicator.

        Args:
            name: What it is called in messages.
            ranks: Its ranks, by their numbers in the job.
        """
        entry = CommunicatorEntry(self, {"name": name, "ranks": list(ranks)})
        with self._lock:
            self._entries.append(weakref.ref(entry))
            self._write()
        return entry

    def entries(self) -> list[CommunicatorEntry]:
        """The communicators that are open, oldest first."""
        return [entry for ref in self._entries if (entry := ref()) is not None and entry.open]

    def update(self, entry: CommunicatorEntry, fields: Fields) -> None:
        """Shows further values of a communicator."""
        with self._lock:
            entry.fields |= fields
            self._write()

    def refresh(self) -> None:
        """Shows how far this rank has come in each communicator, as of now."""
        for entry in self.entries():
            counts = entry.sources.get("counts")
            if counts is not None:
                entry.fields |= {"counts": counts()}
        self.set()

    def state(self) -> Fields:
        """All that the page shows."""
        with self._lock:
            return self._content()

    def end_neighbour(self, rank: int) -> bool:
        """Ends the process of another rank, if it is on this host, and waits for its end.

        Returns:
            Whether the rank does no more harm to this host; not if it is a thread of this process.
        """
        pid, descriptor = self.neighbours.get(rank, (0, -1))
        if pid in (0, os.getpid()):
            return pid == 0
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return True  # it has ended
        try:
            shown, own = read_page(f"/proc/{pid}/fd/{descriptor}"), self._fields
            if shown is not None and (shown["rank"], shown["store"]) == (rank, own["store"]):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return bool(select.select([process], [], [], _END_S)[0])
            return True  # another process has its number
        finally:
            os.close(process)

    def close(self) -> None:
        """Shows nothing any more."""
        with self._lock:
            if self.descriptor >= 0 and os.getpid() == self._owner:
                close_own(self.descriptor, self._identity)
            self.descriptor = -1
            self._entries.clear()

    def _content(self) -> Fields:
        return {**self._fields, "communicators": [dict(entry.fields) for entry in self.entries()]}

    def _write(self) -> None:
        """Writes the copy that does not hold, and lets it hold. (A process may be stopped in between.)"""
        if os.getpid() != self._owner or not is_own(self.descriptor, self._identity):
            return
        self._entries = [ref for ref in self._entries if (entry := ref()) is not None and entry.open]
        content = self._content()
        text = json.dumps(content).encode()
        while len(text) > _MOST_NBYTES:
            content["communicators"] = content["communicators"][len(content["communicators"]) // 2 + 1 :]
            text = json.dumps(content).encode()
        self._turn += 1
        at = _HEADER_NBYTES + _COPY_NBYTES * (self._turn & 1)
        try:
            os.pwrite(self.descriptor, _LENGTH.pack(len(text)) + text, at)
            os.pwrite(self.descriptor, _TURN.pack(self._turn), 0)
        except OSError as error:
            if error.errno != errno.EFBIG:  # The program may write no such files any more (ulimit -f).
                raise


class CommunicatorEntry:
    """What a page shows of one communicator.

    Attributes:
        fields: What is shown.
        open: Whether it is shown.
        sources: What the flight recorder asks for: plain values, by name.
    """

    def __init__(self, page: RankPage, fields: Fields) -> None:
        self._page, self.fields, self.open = page, fields, True
        self.sources: dict[str, Callable[[], Any]] = {}

    def set(self, **fields: Any) -> None:
        """Shows further values, or other ones."""
        self._page.update(self, fields)

    def record(self, error: BaseException) -> str:
        """Writes the flight record; see ``RankPage.record``."""
        return self._page.record(error)

    def close(self) -> None:
        """Shows the communicator no more."""
        self.open = False
        self._page.set()


def read_page(path: str) -> Fields | None:
    """Reads a rank's page.

    Args:
        path: Where the memory file can be opened, such as ``/proc/123/fd/4``.

    Returns:
        What it shows; None if it is no page, or is gone.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(8):
            (turn,) = _TURN.unpack(os.pread(descriptor, _TURN.size, 0))
            at = _HEADER_NBYTES + _COPY_NBYTES * (turn & 1)
            (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, at))
            text = os.pread(descriptor, length, at + _LENGTH.size)
            if os.pread(descriptor, _TURN.size, 0) == _TURN.pack(turn):
                found = json.loads(text)
                return found if isinstance(found, dict) else None
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return None


class PeerStacks:
    """Keeps the part of a peer's page to which faulthandler writes, beyond the end of that peer.

    Args:
        path: Where the peer's page can be opened now.
    """

    def __init__(self, path: str) -> None:
        occupy_standard_streams()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(
                descriptor, _STACKS_NBYTES, mmap.MAP_SHARED, mmap.PROT_READ, offset=STACKS_AT
            )
        finally:
            os.close(descriptor)

    def text(self) -> str:
        """The stacks that the peer left when a signal ended it; "" if none did."""
        return self._memory[:].rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        """Lets go of the page."""
        self._memory.close()
