"""What a process that is no rank sees of a rank's segment: its last calls, and for which rank it waits.

Nothing is written, and the rank need not run: ``flagcx status`` looks at ranks that hang or are stopped.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from flagcx.transport.shared_memory.call_log import CallLog
from flagcx.transport.shared_memory.segment import Handle
from flagcx.transport.shared_memory.words import (
    ABORTED,
    CLOSED,
    MESSAGE_FROM,
    MESSAGE_SENDS,
    MESSAGE_SINCE,
    WAITING_FOR,
    WAITING_SINCE,
    words_nbytes,
)


@dataclass(frozen=True, slots=True)
class SegmentWait:
    """One wait of a rank.

    Attributes:
        peer: The rank of the communicator for which it waits.
        message: "send of 8 bytes" or the like, if that is what waits; "" for the last call of all ranks.
        since_ns: When it began, on the host's monotonic clock.
    """

    peer: int
    message: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class SegmentState:
    """What the words of a rank say.

    Attributes:
        calls: Its last calls of all ranks, oldest first: their numbers modulo 65536, in words.
        waits: What it waits for, unless it has closed the communicator.
        reason: Why it gave up; "" where it has not.
    """

    calls: list[tuple[int, str]]
    waits: list[SegmentWait]
    reason: str


def peek(handle: Handle, process: int, size: int) -> SegmentState | None:
    """Reads the words of a rank.

    Args:
        handle: Its segment.
        process: Its process, as this one numbers it.
        size: Ranks of the communicator.

    Returns:
        What they say; None where the segment is gone or cannot be opened.
    """
    try:
        descriptor = os.open(f"/proc/{process}/fd/{handle.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        file = os.fstat(descriptor)
        if (file.st_dev, file.st_ino) != (handle.device, handle.inode):
            return None
        with mmap.mmap(descriptor, words_nbytes(size), mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            return _read(bytes(memory), size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _read(memory: bytes, size: int) -> SegmentState:
    words = memoryview(memory).cast("Q")
    log = CallLog(0, [words] * size, [memoryview(memory)] * size)
    waits = []
    if words[WAITING_FOR] and not words[CLOSED]:
        waits.append(SegmentWait(words[WAITING_FOR] - 1, "", words[WAITING_SINCE]))
    if words[MESSAGE_FROM] and not words[CLOSED]:
        nbytes, sends = divmod(words[MESSAGE_SENDS], 2)
        message = f"{'send' if sends else 'receive'} of {nbytes:,} bytes"
        waits.append(SegmentWait(words[MESSAGE_FROM] - 1, message, words[MESSAGE_SINCE]))
    return SegmentState(log.calls_of(0), waits, log.reason_of(0) if words[ABORTED] else "")
