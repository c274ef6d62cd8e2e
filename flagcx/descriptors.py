"""Keeps the library's descriptors away from the numbers 0, 1 and 2, to which programs print.

A program may close its standard streams, or be started without them. The system then gives their numbers to
the next files, and what is printed goes into shared memory, or into the connection of another rank. So every
function that makes a descriptor calls ``occupy_standard_streams`` before.
"""

from __future__ import annotations

import os

_STREAMS = 0, 1, 2


def occupy_standard_streams(path: str = "/", flags: int = os.O_PATH | os.O_CLOEXEC) -> None:
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
