"""What a message between two ranks is: a head that says what it belongs to, and data, in pieces.

The first piece has the head and up to 64 KiB of data, so a small message is one piece.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from flagcx.errors import MismatchError

HEAD_NBYTES = 192
FIRST_NBYTES = 64 << 10
_PIECE_NBYTES = 256 << 10
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
        first: Elements of the first piece.
        stop: Bytes of the first piece, with the head.
        rest: Where each other piece starts and stops, in elements.
        long: Whether there are others.
    """

    __slots__ = ("adds", "count", "dtype", "first", "kind", "long", "peer", "rest", "stop")

    def __init__(self, peer: int, kind: bytes, count: int, dtype: np.dtype, adds: bool = False) -> None:
        self.peer, self.kind, self.count, self.dtype = peer, kind, count, dtype
        self.adds = adds
        each = _PIECE_NBYTES // dtype.itemsize
        self.first = first = min(count, FIRST_NBYTES // dtype.itemsize)
        self.stop = HEAD_NBYTES + first * dtype.itemsize
        self.rest = tuple((start, min(start + each, count)) for start in range(first, count, each))
        self.long = bool(self.rest)

    def check(self, rank: int, stamp: bytes, slot: Slot) -> None:
        """Checks that the first piece that came to this rank is that of this message.

        Raises:
            MismatchError: It is that of another one.
        """
        head = slot.head.tobytes()
        if head != stamp + self.kind:
            raise MismatchError(
                f"ranks disagree: rank {self.peer} sent {in_words(head)}, and rank {rank} expects "
                f"{in_words(stamp + self.kind)}; {SAME_CALLS}",
                peer=self.peer,
            )


class Slot:
    """Memory for one piece, with room for a head.

    Args:
        byte: MPI's datatype of bytes.

    Attributes:
        memory: The memory.
        head: Its part for the head.
        whole: The memory, as MPI takes it.
    """

    __slots__ = ("head", "memory", "whole")

    def __init__(self, byte: Any) -> None:
        self.memory = np.empty(HEAD_NBYTES + _PIECE_NBYTES, np.uint8)
        self.head = self.memory[:HEAD_NBYTES].data
        self.whole = [self.memory, byte]

    def first(self, message: Message) -> np.ndarray:
        """The data of a message's first piece."""
        return self.memory[HEAD_NBYTES : message.stop].view(message.dtype)

    def rest(self, count: int, dtype: np.dtype) -> np.ndarray:
        """The data of another piece, which has no head."""
        return self.memory[: count * dtype.itemsize].view(dtype)


def put(message: Message, array: np.ndarray, data: np.ndarray, ufunc: Any) -> None:
    """Copies data that has come to where it belongs, or adds it to what is there."""
    if message.adds:
        ufunc(array, data, out=array)
    else:
        array[...] = data
