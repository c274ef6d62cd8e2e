"""Shared memory of one rank that the other ranks of the host map, with nothing left behind by a death.

A segment is an anonymous memory file (``memfd_create``): it has no name in /dev/shm, does not count
against the size of /dev/shm, and is gone with the last process that maps it, however that ends.
Peers open it through ``/proc/<pid>/fd/<descriptor>``, and check that it is this file: a process number means
another process in another PID namespace. Where that is not allowed, the segment is a
file in /dev/shm instead, whose room is taken at once and whose name is removed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flagcx.descriptors import close_own, occupy_standard_streams
from flagcx.errors import ResourceError
from flagcx.limits import remedy

_DIRECTORY = "/dev/shm"
ONE_NAMESPACE = (
    "the ranks of a host must run in one PID namespace: docker run --pid=host or --pid=container:NAME, or "
    "shareProcessNamespace: true in a pod"
)
"""What to do where process numbers mean other processes to other ranks."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


class Handle(NamedTuple):
    """What a peer needs to map a segment.

    Attributes:
        pid: Process that owns it.
        descriptor: The owner's file descriptor of it.
        nbytes: Its size in bytes.
        device: Device of its file.
        inode: Number of its file on the device.
        nonce: A random number of 64 bits, which is written after its memory.
    """

    pid: int
    descriptor: int
    nbytes: int
    device: int
    inode: int
    nonce: int

    @property
    def path(self) -> str:
        """Where the segment can be opened as long as its owner holds it."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"


class Segment:
    """A piece of shared memory, made by ``create`` or mapped by ``attach``."""

    def __init__(self, memory: mmap.mmap, handle: Handle, owned: int | None) -> None:
        self.memory = memory
        self.handle = handle
        self._let_go: Callable[[], object] = lambda: None
        if owned is not None:  # the descriptor of one that is dropped goes with it, as its mapping does
            identity = handle.device, handle.inode
            self._let_go = finalizer = weakref.finalize(self, close_own, owned, identity)
            finalizer.atexit = False

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Makes a zeroed segment.

        Args:
            nbytes: Size in bytes; rounded up to whole pages.

        Raises:
            ResourceError: The machine has no room for it.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        occupy_standard_streams()
        try:
            descriptor = os.memfd_create("flagcx", os.MFD_CLOEXEC)
        except OSError:
            descriptor = _unnamed_file()
        try:
            _size(descriptor, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
            nonce = secrets.randbits(64)
            os.pwrite(descriptor, nonce.to_bytes(8, "little"), nbytes)
            file = os.fstat(descriptor)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise ResourceError(_why_not(nbytes, error)) from None
            raise
        handle = Handle(os.getpid(), descriptor, nbytes, file.st_dev, file.st_ino, nonce)
        return cls(memory, handle, descriptor)

    @classmethod
    def attach(cls, handle: Handle) -> Segment:
        """Maps a peer's segment.

        Raises:
            ResourceError: The peer is gone, is not what its process number means here, or this process may
                not look into it.
        """
        descriptor = _open(handle, os.O_RDWR)
        try:
            return cls(mmap.mmap(descriptor, handle.nbytes), handle, None)
        except OSError as error:
            raise ResourceError(_why_not(handle.nbytes, error)) from None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Gives the segment back. Memory that arrays still view stays until the last of them is gone."""
        self._let_go()
        with contextlib.suppress(BufferError):
            self.memory.close()


class Rows:
    """The same part of several segments, mapped side by side: the rows of one array, to be read.

    Args:
        count: How many segments.
        nbytes: Bytes of each that are mapped; whole pages.

    Attributes:
        array: uint8 of shape ``(count, nbytes)``, read-only. The mapping goes with the last view of it.

    Raises:
        ResourceError: There is no room in the address space.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            memory = mmap.mmap(-1, count * nbytes, flags, mmap.PROT_READ)
        except OSError as error:
            raise ResourceError(_why_not(count * nbytes, error)) from None
        self.array = np.frombuffer(memory, np.uint8).reshape(count, nbytes)

    def map(self, row: int, handle: Handle, offset: int) -> None:
        """Maps a segment from ``offset`` on (whole pages) as one of the rows.

        Raises:
            ResourceError: Its owner is gone, or this process may map no more.
        """
        descriptor = _open(handle, os.O_RDONLY)
        try:
            _map_over(self.array[row], descriptor, offset)
        except OSError as error:
            raise ResourceError(_why_not(self.array.shape[1], error)) from None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Lets go of the mapping."""
        self.array = np.empty((0, 0), np.uint8)


def _map_over(row: np.ndarray, descriptor: int, offset: int) -> None:
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _c_mmap()(row.ctypes.data, row.nbytes, mmap.PROT_READ, flags, descriptor, offset) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@lru_cache(maxsize=1)
def _c_mmap() -> Callable[..., int]:
    """The system's ``mmap``, which maps to a given address; Python's own does not."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    word, integer = ctypes.c_size_t, ctypes.c_int
    function.argtypes = (ctypes.c_void_p, word, integer, integer, integer, ctypes.c_long)
    function.restype = ctypes.c_void_p
    return function


def _open(handle: Handle, access: int) -> int:
    """Opens a peer's segment."""
    occupy_standard_streams()
    try:
        descriptor = os.open(handle.path, access | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if way_out := remedy(error):
            raise ResourceError(
                f"the shared memory of a peer cannot be opened ({error.strerror}): {way_out}"
            ) from None
        raise ResourceError(
            f"the shared memory of process {handle.pid} cannot be opened ({error}); the ranks of a host "
            f"must run as one user, in one PID namespace, and be alive"
        ) from None
    if not _is_file_of(handle, descriptor):
        os.close(descriptor)
        raise ResourceError(
            f"process {handle.pid}, as this rank sees it, is not the peer, or has closed its shared "
            f"memory; {ONE_NAMESPACE}"
        )
    return descriptor


def _is_file_of(handle: Handle, descriptor: int) -> bool:
    """Whether an open file is that of a segment."""
    file = os.fstat(descriptor)
    if (file.st_dev, file.st_ino) != (handle.device, handle.inode):
        return False
    return os.pread(descriptor, 8, handle.nbytes) == handle.nonce.to_bytes(8, "little")


def pid_namespace() -> str:
    """The PID namespace of this process; empty where the system does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_closed(handle: Handle) -> bool:
    """Whether a peer that lives has closed its segment again."""
    occupy_standard_streams()
    try:
        descriptor = os.open(handle.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        return not _is_file_of(handle, descriptor)
    finally:
        os.close(descriptor)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, be it that its parent has not noticed yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process has no descriptor left, or may not look
        return False


def _unnamed_file() -> int:
    path = f"{_DIRECTORY}/flagcx-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    except OSError as error:
        reason = remedy(error) or f"{_DIRECTORY} takes no file"
        raise ResourceError(f"no shared memory can be made ({error.strerror}): {reason}") from None
    return descriptor


def _why_not(nbytes: int, error: OSError) -> str:
    """Why there is no shared memory of ``nbytes`` bytes, and what to do."""
    refused = f"{nbytes:,} bytes of shared memory cannot be made ({error.strerror})"
    if way_out := remedy(error):
        return f"{refused}: {way_out}"
    return (
        f"{refused}; other processes may hold the machine's memory, or a limit be too low (ulimit -v, the "
        f"container's memory)"
    )


def _size(descriptor: int, nbytes: int) -> None:
    whole = nbytes + mmap.PAGESIZE  # with the nonce
    os.ftruncate(descriptor, whole)
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_DIRECTORY):
        try:
            os.posix_fallocate(descriptor, 0, whole)
        except OSError as error:
            free = os.statvfs(_DIRECTORY)
            raise ResourceError(
                f"{_DIRECTORY} has no room for {nbytes:,} bytes of shared memory ({error.strerror}; "
                f"{free.f_bavail * free.f_frsize:,} bytes are free); make it larger, e.g. mount -o remount,"
                f"size=8G {_DIRECTORY}, or run the container with --shm-size=8g or --ipc=host"
            ) from None
