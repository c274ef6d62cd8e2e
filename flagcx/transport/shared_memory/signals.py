"""Words that ranks leave for each other in shared memory, and waiting for them.

Each rank writes only into its own segment, and every segment has the same layout, so a word has one
index in all of them. Words are read and written through ``memoryview.cast("Q")``.

The ledger
----------
The n-th collective call of a rank leaves ``n << 21 | signature << 1 | shared`` in ledger word n mod 16.
The signature stands for collective, count, dtype, operation, root and algorithm, so a rank that waits
finds out when a peer called something else; the text behind a signature lies in the peer's segment.
``shared`` tells whether the arrays of that call lie in memory that peers map.

Waiting
-------
A rank looks a few times, then yields the processor between looks, then sleeps; behind a computation
(``background``) it sleeps at once, so that the core and Python's lock are left to that. Now and then it
examines its peers: a dead process, a closed communicator, another call in the ledger, a rank that gave
up, and the deadline each end the wait with an error that names the rank at fault.
"""

from __future__ import annotations

import os
import select
import time
import zlib
from collections.abc import Callable, Sequence
from time import perf_counter_ns as now

from flagcx.errors import AbortedError, MismatchError, PeerDiedError, PeerTimeoutError
from flagcx.transport.shared_memory.fence import memory_fence
from flagcx.transport.shared_memory.segment import Segment

LEDGER_DEPTH = 16
LEDGER_MASK = LEDGER_DEPTH - 1
SEQUENCE_SHIFT = 21
SHARED_BIT = 1

# Word indices; a cache line has 8 words. Counters that peers poll have a line of their own.
LEDGER = 0
LOCATIONS = 16  # two a ledger word: INPUT and OUTPUT of that call
CLOSED, ABORTED, WAITING_FOR, HEARTBEAT, READY, HEAP_COUNT = range(48, 54)
ARRIVED, REDUCED, DONE = 64, 72, 80
HEAPS, MOST_HEAPS = 96, 64  # two words each: descriptor and size
PAIRS = HEAPS + 2 * MOST_HEAPS  # three lines a peer: SENT to it, headers of what is sent, TAKEN from it
_PAIR_WORDS = 24
_TEXT_NBYTES, _TEXTS, _REASON_NBYTES = 160, 128, 1024

# A header holds the bytes of its message, its kind (a signature), and whether it is read where it lies.
NBYTES_BITS = 40
IN_PLACE = 1 << 62

_SPINS = 50
_LOOK_NS = 40  # about; reading the clock would take longer than most of the short waits
_SPINS_CROWDED = 20
_SPINS_BEHIND = range(1)
_GIVE_WAY = range(200)
_YIELDS = 32
_PATIENCE_NS = 2_000_000
_EXAMINE_NS = 5_000_000
_STALE_NS = 500_000_000
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


def words_nbytes(size: int) -> int:
    """Bytes at the start of a segment that hold words and texts, for ``size`` ranks."""
    nbytes = 8 * (PAIRS + _PAIR_WORDS * size) + _REASON_NBYTES + _TEXTS * _TEXT_NBYTES
    return -(-nbytes // 4096) * 4096


def sent_index(peer: int) -> int:
    """Word that counts the pieces sent to ``peer``."""
    return PAIRS + _PAIR_WORDS * peer


def header_index(peer: int, number: int) -> int:
    """First of the two words that describe piece ``number`` to ``peer``."""
    return PAIRS + _PAIR_WORDS * peer + 8 + 2 * (number % 4)


def taken_index(peer: int) -> int:
    """Word that counts the pieces taken from ``peer``."""
    return PAIRS + _PAIR_WORDS * peer + 16


class Signals:
    """One rank's view of everybody's words.

    Attributes:
        own: This rank's words.
        words: Every rank's words, by rank.
        others: Those of the peers, in rank order.
        sequence: Number of collective calls made so far.
        waited_ns: Time spent waiting for peers so far, in ns.
        fence: Memory fence, or None where the hardware keeps the order.
    """

    def __init__(self, rank: int, segments: list[Segment], timeout_s: float) -> None:
        self.rank = rank
        self.size = len(segments)
        self.words = [memoryview(s.memory).cast("Q") for s in segments]
        self.own = self.words[rank]
        self.others = [w for q, w in enumerate(self.words) if q != rank]
        self.sequence = 0
        self.waited_ns = 0
        self.timeout_s = timeout_s
        self.fence = memory_fence()
        crowded = self.size > (os.cpu_count() or 1)
        self._busy_spins = range(_SPINS_CROWDED if crowded else _SPINS)
        self.background = False
        self._bytes = [memoryview(s.memory) for s in segments]
        self._texts_at = 8 * (PAIRS + _PAIR_WORDS * self.size) + _REASON_NBYTES
        self._texts = 0
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}
        for q, segment in enumerate(segments):
            if q != rank:
                self._watch(q, segment.handle.pid)

    @property
    def background(self) -> bool:
        """Whether waits leave the core to others at once."""
        return self._background

    @background.setter
    def background(self, behind: bool) -> None:
        self._background = behind
        self.spins = _SPINS_BEHIND if behind else self._busy_spins
        self._give_way = range(0) if behind else _GIVE_WAY

    def _watch(self, peer: int, pid: int) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise PeerDiedError(f"rank {peer} (process {pid}) died during init", peer=peer) from None
        except OSError:
            return  # an old kernel: the deadline is what is left
        self._descriptors[descriptor] = peer
        self._poll.register(descriptor, select.POLLIN)

    def close(self) -> None:
        """Tells the peers that this rank makes no further call, and lets go of their memory."""
        if not self.words:
            return
        self.own[CLOSED] = self.sequence + 1
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self.own = None  # type: ignore[assignment]
        self.words, self.others, self._bytes = [], [], []

    # -- the ledger -------------------------------------------------------------------------------

    def signature(self, text: str) -> int:
        """Leaves ``text`` for peers to read, and returns the signature that stands for it.

        Returns:
            A signature, shifted to where a ledger word has it.
        """
        return self.kind(text) << 1

    def kind(self, text: str) -> int:
        """The same, for headers of messages, where it is not shifted."""
        signature = zlib.crc32(text.encode()) & 0xFFFFF
        at = self._texts_at + self._texts % _TEXTS * _TEXT_NBYTES
        record = signature.to_bytes(4, "little") + text.encode()[: _TEXT_NBYTES - 5]
        self._bytes[self.rank][at : at + _TEXT_NBYTES] = record.ljust(_TEXT_NBYTES, b"\0")
        self._texts += 1
        return signature

    def _text_of(self, peer: int, signature: int) -> str:
        for i in range(_TEXTS):
            at = self._texts_at + i * _TEXT_NBYTES
            record = bytes(self._bytes[peer][at : at + _TEXT_NBYTES])
            if int.from_bytes(record[:4], "little") == signature and record[4]:
                return record[4:].rstrip(b"\0").decode(errors="replace")
        return "another call"

    def enter(self, signature: int) -> int:
        """Enters the next collective call into the ledger. Returns the word that peers must show."""
        sequence = self.sequence
        self.sequence = sequence + 1
        value = sequence << SEQUENCE_SHIFT | signature
        self.own[sequence & LEDGER_MASK] = value
        return value

    def refuse(self, peer: int, header: int, expected: int) -> None:
        """Raises MismatchError for a message of a peer whose header is not the one that is expected."""
        (theirs, sent), (mine, wanted) = parts_of_header(header), parts_of_header(expected)
        raise MismatchError(
            f"ranks disagree: rank {peer} sent {sent:,} bytes of {self._text_of(peer, theirs)}, and rank "
            f"{self.rank} expects {wanted:,} bytes of {self._text_of(self.rank, mine)}; every rank must make "
            f"the same calls in the same order, with the same count, dtype, operation, algorithm and root",
            peer=peer,
        )

    def examine_end(self, taken: Sequence[int]) -> None:
        """Looks for signs, when all calls have been made, that a peer made others.

        Args:
            taken: How many pieces this rank has taken from each.

        Raises:
            MismatchError: It called something else lately, or sent what this rank has never received.
        """
        self._examine_ledgers()
        for peer, words in enumerate(self.words):
            if words[sent_index(self.rank)] > taken[peer]:
                kind, nbytes = parts_of_header(words[header_index(self.rank, taken[peer])])
                raise MismatchError(
                    f"rank {peer} sent {nbytes:,} bytes of {self._text_of(peer, kind)}, which rank "
                    f"{self.rank} never received; every rank must make the same calls",
                    peer=peer,
                )

    def compare_last(self, sequence: int) -> None:
        """Looks whether the peers, which have come to call ``sequence``, made the same call before it.

        Raises:
            MismatchError: A peer called something else.
        """
        index = (sequence - 1) & LEDGER_MASK
        mine = self.own[index]
        for words in self.others:
            if (words[index] ^ mine) > SHARED_BIT:
                self._examine_ledgers()

    # -- waiting ----------------------------------------------------------------------------------

    def wait_ledger(self, words: memoryview, index: int, value: int) -> None:
        """Waits until ledger word ``index`` of a peer is ``value``, the ``shared`` bit aside."""
        wanted = value | SHARED_BIT
        for looks in self.spins:
            if words[index] | SHARED_BIT == wanted:
                self.waited_ns += looks * _LOOK_NS
                return
        start = now()
        give_way = os.sched_yield
        for _ in self._give_way:
            give_way()
            if words[index] | SHARED_BIT == wanted:
                self.waited_ns += now() - start
                return
        self.wait_for(words, lambda: words[index] | SHARED_BIT == wanted)
        self.waited_ns += now() - start

    def wait_count(self, words: memoryview, index: int, value: int) -> None:
        """Waits until counter ``index`` of a peer is at least ``value``."""
        for looks in self.spins:
            if words[index] >= value:
                self.waited_ns += looks * _LOOK_NS
                return
        start = now()
        give_way = os.sched_yield
        for _ in self._give_way:
            give_way()
            if words[index] >= value:
                self.waited_ns += now() - start
                return
        self.wait_for(words, lambda: words[index] >= value)
        self.waited_ns += now() - start

    def wait_for(
        self,
        words: memoryview,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        point_to_point=False,
    ) -> None:
        """Waits, with patience, until ``ready()``.

        Args:
            words: The words of the peer that is waited for.
            ready: Whether the wait is over.
            timeout_s: Deadline in seconds from now; the communicator's by default.
            point_to_point: Whether only the two ranks take part, so that the ledger says nothing.

        Raises:
            PeerDiedError, MismatchError, AbortedError, PeerTimeoutError: See the module.
        """
        peer = next(q for q, w in enumerate(self.words) if w is words)
        start = time.monotonic_ns()
        deadline = start + int((timeout_s or self.timeout_s) * 1e9)
        examine = start + _EXAMINE_NS // 5
        self.own[HEARTBEAT] = start
        self.own[WAITING_FOR] = peer + 1
        yields = range(1 if self._background else _YIELDS)
        while not self._looked(ready, yields):
            now = time.monotonic_ns()
            if now >= examine:
                self.own[HEARTBEAT] = now
                self._examine(peer, ready, now >= deadline, point_to_point, (now - start) / 1e9)
                examine = now + _EXAMINE_NS
            if self._background or now - start > _PATIENCE_NS:
                yields = range(1)
                time.sleep(min(max((now - start) / 16e9, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
        self.own[WAITING_FOR] = 0  # not after an error: a rank that gives up is not the one at fault

    def blame(self, peer: int, point_to_point: bool) -> None:
        """Raises the error that ends the call, where a rank is known to have died or given up.

        Args:
            peer: The rank whose message came to nothing.
            point_to_point: Whether only the two ranks take part.
        """
        self._examine(peer, lambda: False, False, point_to_point, 0.0)

    @staticmethod
    def _looked(ready: Callable[[], bool], yields: range) -> bool:
        for _ in yields:
            os.sched_yield()
            if ready():
                return True
        return False

    def _examine(
        self, peer: int, ready: Callable[[], bool], late: bool, point_to_point: bool, waited_s: float
    ) -> None:
        dead = self._dead()
        call = " in a send or receive" if point_to_point else self._own_call()
        if ready():
            return
        if dead:
            names = _names(dead)
            raise PeerDiedError(
                f"{names} died while rank {self.rank} waited for rank {peer}{call}; the job cannot go on: "
                f"look for the reason in the output of {names}",
                peer=dead[0],
            )
        if not point_to_point:
            self._examine_ledgers()
        self._examine_aborted()
        self._examine_closed(peer, point_to_point, call)
        if late:
            suspects = self._suspects(peer, point_to_point)
            raise PeerTimeoutError(
                f"{_names(suspects)} did not take part within {waited_s:.1f} s (rank {self.rank} waits for "
                f"rank {peer}{call}); it is stopped, computing, or stuck elsewhere. A longer time-out: "
                f"fc.init(timeout_s=...) or FLAGCX_TIMEOUT_S",
                peer=suspects[0],
            )

    def _dead(self) -> list[int]:
        """The peers that died without a word; who gave up or closed has said so."""
        ended = [self._descriptors[d] for d, _ in self._poll.poll(0)] if self._descriptors else []
        return [q for q in ended if not self.words[q][ABORTED] and not self.words[q][CLOSED]]

    def _own_call(self) -> str:
        if not self.sequence:
            return ""
        word = self.own[(self.sequence - 1) & LEDGER_MASK]
        return f" in {self._text_of(self.rank, _signature_of(word))}"

    def _examine_closed(self, peer: int, point_to_point: bool, call: str) -> None:
        for q, words in enumerate(self.words):
            closed = words[CLOSED]
            if not closed or (point_to_point and q != peer):
                continue
            if point_to_point or closed - 1 < self.sequence:
                raise PeerDiedError(
                    f"rank {q} has ended or closed its communicator while rank {self.rank} waited{call}; "
                    f"every rank must make the same calls",
                    peer=q,
                )

    def _examine_ledgers(self) -> None:
        """Compares the calls that are still in sight, the latest first."""
        for sequence in range(self.sequence - 1, max(self.sequence - LEDGER_DEPTH, 0) - 1, -1):
            mine = self.own[sequence & LEDGER_MASK]
            for q, words in enumerate(self.words):
                theirs = words[sequence & LEDGER_MASK]
                same_call = theirs >> SEQUENCE_SHIFT == sequence and mine >> SEQUENCE_SHIFT == sequence
                if same_call and _signature_of(theirs) != _signature_of(mine) and theirs:
                    raise MismatchError(
                        f"ranks disagree on call {sequence}: rank {self.rank} called "
                        f"{self._text_of(self.rank, _signature_of(mine))}, rank {q} called "
                        f"{self._text_of(q, _signature_of(theirs))}; every rank must make the same calls in "
                        f"the same order, with the same count, dtype, operation and root",
                        peer=q,
                    )

    def _examine_aborted(self) -> None:
        for q, words in enumerate(self.words):
            if q != self.rank and words[ABORTED]:
                raise AbortedError(
                    f"rank {q} gave up: {self._reason(q)}",
                    peer=words[ABORTED] - 2 if words[ABORTED] > 1 else q,
                )

    def _suspects(self, peer: int, point_to_point: bool) -> list[int]:
        """The ranks that keep the rest waiting: those that do not wait themselves, or stand still."""
        if point_to_point:
            return [peer]
        now = time.monotonic_ns()
        suspects = []
        for q, words in enumerate(self.words):
            breathing = words[WAITING_FOR] and now - words[HEARTBEAT] < _STALE_NS
            if q != self.rank and not breathing:
                suspects.append(q)
        return suspects or [peer]

    # -- giving up --------------------------------------------------------------------------------

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers that this rank cannot go on. The first reason stays."""
        if not self.words or self.own[ABORTED]:
            return
        at = self._texts_at - _REASON_NBYTES
        text = reason.encode()[: _REASON_NBYTES - 1]
        self._bytes[self.rank][at : at + _REASON_NBYTES] = text.ljust(_REASON_NBYTES, b"\0")
        self.own[ABORTED] = 1 if culprit is None else culprit + 2

    def _reason(self, peer: int) -> str:
        at = self._texts_at - _REASON_NBYTES
        raw = bytes(self._bytes[peer][at : at + _REASON_NBYTES])
        return raw.rstrip(b"\0").decode(errors="replace")


def parts_of_header(header: int) -> tuple[int, int]:
    """The kind of a message, and its bytes; see ``IN_PLACE``."""
    return (header & ~IN_PLACE) >> NBYTES_BITS, header & ((1 << NBYTES_BITS) - 1)


def _signature_of(word: int) -> int:
    return word >> 1 & 0xFFFFF


def _names(ranks: list[int]) -> str:
    ranks = sorted(set(ranks))
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
