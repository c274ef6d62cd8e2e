"""Copies between the memories of two processes in one system call (cross-memory attach).

``process_vm_readv`` and ``process_vm_writev`` copy once, where a shared slot copies twice. They need
the right to trace the peer: a container's seccomp filter or Yama may forbid it, so it is tried at start.
"""

from __future__ import annotations

import ctypes
import errno
import os

from flagcx.errors import CommunicationError, PeerDiedError

_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class CrossMemory:
    """Reads from and writes to the memory of one other process.

    Args:
        pid: The process.
        peer: Its rank, for messages.
    """

    def __init__(self, pid: int, peer: int) -> None:
        self.pid, self.peer = pid, peer
        self._local, self._remote = _Piece(), _Piece()
        self._local_at, self._remote_at = ctypes.byref(self._local), ctypes.byref(self._remote)
        library = ctypes.CDLL(None, use_errno=True)
        self._read, self._write = library.process_vm_readv, library.process_vm_writev
        for function in (self._read, self._write):
            function.restype = ctypes.c_ssize_t
            function.argtypes = (
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_ulong,
                ctypes.c_void_p,
                ctypes.c_ulong,
                ctypes.c_ulong,
            )

    def read(self, local: int, remote: int, nbytes: int) -> None:
        """Copies ``nbytes`` from address ``remote`` of the peer to address ``local`` of this process.

        Raises:
            PeerDiedError: The peer is gone.
            CommunicationError: The kernel refuses.
        """
        self._transfer(self._read, local, remote, nbytes)

    def write(self, local: int, remote: int, nbytes: int) -> None:
        """Copies ``nbytes`` from address ``local`` of this process to address ``remote`` of the peer.

        Raises:
            PeerDiedError: The peer is gone.
            CommunicationError: The kernel refuses.
        """
        self._transfer(self._write, local, remote, nbytes)

    def _transfer(self, call, local: int, remote: int, nbytes: int) -> None:
        while nbytes:
            self._local.base, self._local.length = local, nbytes
            self._remote.base, self._remote.length = remote, nbytes
            done = call(self.pid, self._local_at, 1, self._remote_at, 1, 0)
            if done <= 0:
                raise self._error(ctypes.get_errno())
            local, remote, nbytes = local + done, remote + done, nbytes - done

    def _error(self, code: int) -> CommunicationError:
        if code == errno.ESRCH:
            return PeerDiedError(
                f"rank {self.peer} (process {self.pid}) died while its memory was read or written; look for "
                f"the reason in its output",
                peer=self.peer,
            )
        return CommunicationError(
            f"the memory of rank {self.peer} (process {self.pid}) cannot be read or written: "
            f"{os.strerror(code)}; FLAGCX_CROSS_MEMORY=0 goes another way",
            peer=self.peer,
        )


def allow_peers() -> None:
    """Lets the other processes of this user attach, where Yama would otherwise forbid it."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)


def probe(attached: CrossMemory, remote: int, expected: bytes) -> bool:
    """Whether reading and writing works: reads ``expected`` at ``remote`` of the peer, writes it back.

    What is expected must be random: another process, that has the peer's number here, is never written to.
    """
    memory = ctypes.create_string_buffer(len(expected))
    try:
        attached.read(ctypes.addressof(memory), remote, len(expected))
        if memory.raw != expected:
            return False
        attached.write(ctypes.addressof(memory), remote, len(expected))
    except CommunicationError:
        return False
    return True
