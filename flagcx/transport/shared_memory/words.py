"""The words that ranks leave for each other at the start of their segments, and where each lies.

Each rank writes only into its own segment, and every segment has the same layout, so a word has one
index in all of them. Words are read and written through ``memoryview.cast("Q")``. A cache line has 8 words;
counters that peers poll have a line of their own.
"""

from __future__ import annotations

import mmap

CALL_LOG_DEPTH = 16
CALL_LOG_MASK = CALL_LOG_DEPTH - 1
SEQUENCE_MASK = 0xFFFF
SIGNATURE_SHIFT = 17
SHARED_BIT = 1
"""Bit of a word of the call log: the arrays of that call lie in memory that peers map."""

# The call log is at 0, then two words for each of its words: where INPUT and OUTPUT of that call lie.
LOCATIONS = 16
CLOSED, ABORTED, WAITING_FOR, HEARTBEAT, READY, HEAP_COUNT, MESSAGE_FROM = range(48, 55)
WAITING_SINCE, MESSAGE_SINCE, MESSAGE_SENDS = range(56, 59)
ARRIVED, REDUCED, DONE, WAYS, BROADCAST, BROADCAST_READ, EXCHANGE = range(64, 120, 8)
HEAPS, HEAP_WORDS, MOST_HEAPS = 120, 5, 64  # a handle each, less its process
_PAIRS = HEAPS + HEAP_WORDS * MOST_HEAPS
_PAIR_WORDS = 24  # three lines a lane and peer: SENT to it, headers of what is sent, RECEIVED from it

STEPS, MESSAGES = range(2)
"""The lanes of a pair of ranks: for the steps of collectives, and for what the ranks send on their own."""
LANES = 2

# After the words: why this rank gave up, then the calls that signatures stand for.
# There are as many texts as an executor keeps plans, so that each plan's is there.
TEXT_NBYTES, TEXTS, REASON_NBYTES = 256, 4096, 1024

# A header mixes the bytes of its message with its kind (a signature): see ``header_of``.
IN_PLACE = 1 << 62
"""Bit of a header: the message is read where it lies."""
_KIND_SHIFT, _NUMBER_SHIFT = 15, 31
_MOST_NBYTES = 1 << 40


def reason_offset(size: int) -> int:
    """Byte at which the reason begins, for ``size`` ranks; the texts follow it."""
    return 8 * (_PAIRS + LANES * _PAIR_WORDS * size)


def words_nbytes(size: int) -> int:
    """Bytes at the start of a segment that hold words and texts, for ``size`` ranks: whole pages."""
    nbytes = reason_offset(size) + REASON_NBYTES + TEXTS * TEXT_NBYTES
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def sent_index(peer: int, lane: int) -> int:
    """Word that counts the pieces sent to ``peer``."""
    return _PAIRS + _PAIR_WORDS * (LANES * peer + lane)


def header_index(peer: int, lane: int, number: int) -> int:
    """First of the two words that describe piece ``number`` to ``peer``."""
    return sent_index(peer, lane) + 8 + 2 * (number % 4)


def received_index(peer: int, lane: int) -> int:
    """Word that counts the pieces received from ``peer``."""
    return sent_index(peer, lane) + 16


def header_of(kind: int, nbytes: int) -> int:
    """The header of a message: two messages have one header only if their kinds and lengths are the same."""
    return kind << _KIND_SHIFT ^ nbytes


def numbered(kind: int, number: int) -> int:
    """The kind of the messages of a collective call with this number: those of other calls have others."""
    return kind ^ (number & SEQUENCE_MASK) << _NUMBER_SHIFT


def number_of_header(number: int) -> int:
    """What the number of a collective call adds to the headers of its messages, bit by bit (``^``)."""
    return (number & SEQUENCE_MASK) << _NUMBER_SHIFT + _KIND_SHIFT


def nbytes_of_header(header: int, kind: int) -> int | None:
    """The bytes of a message of this kind; None where the header is of a message of another kind."""
    nbytes = (header & ~IN_PLACE) ^ kind << _KIND_SHIFT
    return nbytes if nbytes < _MOST_NBYTES else None
