"""What a message between two ranks is: a head that says what it belongs to, and data.

A short message has both in one piece. The data of a long one follows its head in pieces of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

from flagcx.errors import MismatchError

HEAD_NBYTES = 192
SHORT_NBYTES = 3 << 10
"""Up to so many bytes, with the head, MPI sends at once on one host; it asks the receiver about more."""
_PIECE_NBYTES = 32 << 20
"""Each piece that comes shows that a slow link is not stuck; see ``Wait.moved``."""
_DIGEST_NBYTES = 16
_NUMBER_NBYTES = 8
SAME_CALLS = (
    "every rank must make the same calls in the same order, with the same count, dtype, operation, algorithm "
    "and root"
)


def kind_of(words: str, nbytes: int) -> bytes:
    """The part of a message's head that is the same in every run of a call: a digest, its length, and words.

    Args:
        words: The call that it belongs to, in words that are the same on every rank.
        nbytes: Bytes of the whole message.
    """
    text = words.encode()
    digest = blake2b(text, digest_size=_DIGEST_NBYTES).digest()
    room = HEAD_NBYTES - _NUMBER_NBYTES
    return (nbytes.to_bytes(8, "little") + digest + text)[:room].ljust(room, b"\0")


def stamp_of(number: int) -> bytes:
    """The other part of a head, which comes first: the number of the call, or 0 between two ranks."""
    return number.to_bytes(_NUMBER_NBYTES, "little")


def in_words(head: bytes) -> str:
    """The message that begins with ``head``.

    Example:
        >>> in_words(stamp_of(3) + kind_of("barrier", 8))
        '8 bytes of barrier (call 3)'
    """
    number, nbytes = (int.from_bytes(head[at : at + 8], "little") for at in (0, _NUMBER_NBYTES))
    text = head[_NUMBER_NBYTES + 8 + _DIGEST_NBYTES :].rstrip(bytes(1)).decode(errors="replace")
    return f"{nbytes:,} bytes of {text}" + (f" (call {number})" if number else "")


class Message:
    """A message, less its data.

    Args:
        peer: The rank that it goes to or comes from.
        kind: What its head says of it; see ``kind_of``.
        count: Elements.
        dtype: Their type.
        adds: Whether the data is added to what is there.

    Attributes:
        long: Whether the data follows the head.
        stop: Bytes of the piece with the head.
        rest: Where each piece that follows starts and stops, in elements.
    """

    __slots__ = ("adds", "count", "dtype", "kind", "long", "peer", "rest", "stop")

    def __init__(self, peer: int, kind: bytes, count: int, dtype: np.dtype, adds: bool = False) -> None:
        self.peer, self.kind, self.count, self.dtype = peer, kind, count, dtype
        self.adds = adds
        nbytes, each = count * dtype.itemsize, _PIECE_NBYTES // dtype.itemsize
        self.long = nbytes > SHORT_NBYTES
        self.stop = HEAD_NBYTES + (0 if self.long else nbytes)
        starts = range(0, count if self.long else 0, each)
        self.rest = tuple((start, min(start + each, count)) for start in starts)

    def check(self, rank: int, stamp: bytes, slot: Slot) -> None:
        """Checks that the head that came to this rank is that of this message; see ``check_head``."""
        came, expected = slot.head.tobytes(), stamp + self.kind
        if came != expected:
            check_head(came, expected, self.peer, rank)


def check_head(came: bytes, expected: bytes, peer: int, rank: int) -> None:
    """Checks the head that a peer has left for this rank.

    Raises:
        MismatchError: It is that of another message.
    """
    if came != expected:
        raise MismatchError(
            f"ranks disagree: rank {peer} sent {in_words(came)}, and rank {rank} expects "
            f"{in_words(expected)}; {SAME_CALLS}",
            peer=peer,
        )


class Slot:
    """Memory for a head and the data of a short message. It stays prepared for the last message it served.

    Args:
        memory: What the engine sends and receives for an array; see ``Engine.memory``.

    Attributes:
        message: The message that it is prepared for.
        head: The part for the head.
        stamp: The part of the head that differs from call to call.
        data: The part for the data of ``message``.
        piece: The head and ``data``, as the engine sends them.
        whole: All of the memory, as the engine receives into it.
    """

    __slots__ = ("_array", "_memory", "data", "head", "message", "piece", "stamp", "whole")

    def __init__(self, memory: Callable[[np.ndarray], Any]) -> None:
        self._array, self._memory = np.empty(HEAD_NBYTES + SHORT_NBYTES, np.uint8), memory
        self.head = self._array[:HEAD_NBYTES].data
        self.stamp = self.head[:_NUMBER_NBYTES]
        self.whole = memory(self._array)
        self.message: Message | None = None

    def prepare(self, message: Message) -> None:
        """Prepares the memory for a message."""
        self.message, stop = message, message.stop
        self.data = self._array[HEAD_NBYTES:stop].view(message.dtype)
        self.piece = self._memory(self._array[:stop])
        self.head[_NUMBER_NBYTES:] = message.kind


def put(message: Message, array: np.ndarray, slot: Slot, ufunc: Any) -> None:
    """Copies the data of a short message to where it belongs, or adds it to what is there."""
    if slot.message is not message:
        slot.prepare(message)
    data = slot.data
    if message.adds:
        ufunc(array, data, out=array)
    else:
        array[...] = data
