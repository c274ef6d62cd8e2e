"""Keeps the library's descriptors apart from the program's, whatever the program closes.

A program may close its standard streams, or be started without them. The system then gives their numbers to
the next files, and what is printed goes into shared memory, or into the connection of another rank. So every
function that makes a descriptor calls ``occupy_standard_streams`` before.

A program may also close all descriptors, as one that becomes a daemon does, and then has files of its own
under the library's numbers. So what the library keeps is written and closed only while ``is_own`` holds.
"""

from __future__ import annotations

import contextlib
import os

Identity = tuple[int, int]
"""Device and inode, by which an open file is known again."""
_STREAMS = 0, 1, 2
_UNUSABLE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC


def occupy_standard_streams(path: str = "/", flags: int = _UNUSABLE) -> None:
    """Takes the number of each standard stream that is closed, so that no other file gets it.

    A descriptor that is made with O_PATH can neither be read nor written: what the program prints fails as
    before (EBADF), and its subprocesses see a closed stream as before. It stays, since files that MPI, UCX
    and CUDA open later must not get the number either, nor the copy of a descriptor that ``mmap.mmap`` keeps.

    Args:
        path: What is opened in place of a stream.
        flags: How it is opened.
    """
    for stream in _STREAMS:
        try:
            os.fstat(stream)
        except OSError:
            taken = os.open(path, flags)  # It gets the lowest free number, which is this one,
            if taken not in _STREAMS:  # unless another thread was quicker.
                os.close(taken)


def identity_of(descriptor: int) -> Identity:
    """The identity of an open file."""
    file = os.fstat(descriptor)
    return file.st_dev, file.st_ino


def is_own(descriptor: int, identity: Identity) -> bool:
    """Whether a descriptor is still that of the library's file, which the program has not closed."""
    try:
        return identity_of(descriptor) == identity
    except OSError:
        return False


def close_own(descriptor: int, identity: Identity) -> None:
    """Closes a descriptor of the library's, unless the program has done so."""
    if is_own(descriptor, identity):
        with contextlib.suppress(OSError):
            os.close(descriptor)
