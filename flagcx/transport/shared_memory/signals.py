"""Waiting for what peers leave in their words, without missing that a peer died, left, gave up or is late.

A rank looks a few times, then yields the processor between looks, then sleeps; beside a computation
(``background``) it sleeps at once, so that the core and Python's lock are left to that. Now and then it
examines its peers: a dead process, a closed communicator, another call in the log, a rank that gave up,
and the deadline each end the wait with an error that names the rank at fault.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from time import perf_counter_ns as now

from flagcx.bootstrap.clock import ActiveClock
from flagcx.errors import AbortedError, PeerDiedError, PeerTimeoutError
from flagcx.transport.shared_memory.call_log import CallLog
from flagcx.transport.shared_memory.deaths import Deaths
from flagcx.transport.shared_memory.fence import memory_fence
from flagcx.transport.shared_memory.segment import Segment
from flagcx.transport.shared_memory.words import (
    ABORTED,
    CALL_LOG_MASK,
    CLOSED,
    HEARTBEAT,
    MESSAGE_FROM,
    MESSAGE_SENDS,
    MESSAGE_SINCE,
    SEQUENCE_MASK,
    SHARED_BIT,
    SIGNATURE_SHIFT,
    WAITING_FOR,
    WAITING_SINCE,
)
from flagcx.transport.slices import ask_for_short_slices
from flagcx.transport.waits import IN_MESSAGES, ON_HOST, Waits

_WORD = (1 << 64) - 1
_SIGNATURE = _WORD ^ (1 << SIGNATURE_SHIFT) - 1
_SPINS = 50
_LOOK_NS = 40  # about; reading the clock would take longer than most of the short waits
_SPINS_CROWDED = 20
_SPINS_BACKGROUND = range(1)
_GIVE_WAY = range(200)
_YIELDS = 32
_PATIENCE_NS = 2_000_000
_EXAMINE_NS = 5_000_000
_STALE_NS = 500_000_000
_SLOW_NS = 6_000_000_000
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


class Signals:
    """One rank's view of every rank's words.

    Attributes:
        own: This rank's words.
        words: Every rank's words, by rank.
        others: Those of the peers, in rank order.
        log: What each rank called.
        sequence: Number of collective calls made so far.
        before: A hash of the calls made so far in which this rank need not wait for all others; its lowest
            bits are 0, so that it goes into the word of an exchange by ``^``.
        waited_ns: Time spent waiting for peers so far, in ns.
        crowded: Whether ranks outnumber the cores, so that one that waits keeps another from its work.
        fence: Memory fence, or None where the hardware keeps the order.
    """

    def __init__(self, rank: int, segments: list[Segment], timeout_s: float) -> None:
        self.rank = rank
        self.size = len(segments)
        self.words = [memoryview(s.memory).cast("Q") for s in segments]
        self.own = self.words[rank]
        self.others = [w for q, w in enumerate(self.words) if q != rank]
        self.sequence = self.before = 0
        self.waited_ns = 0
        self.timeout_s = timeout_s
        self.fence = memory_fence()
        self.crowded = crowded = self.size > (os.cpu_count() or 1)
        self._busy_spins = range(_SPINS_CROWDED if crowded else _SPINS)
        if crowded:
            ask_for_short_slices()
        self.background = False
        self.log = CallLog(rank, self.words, [memoryview(s.memory) for s in segments])
        self._waits: Waits | None = None
        self._deaths = Deaths()
        for q, segment in enumerate(segments):
            if q != rank and not self._deaths.watch(q, segment.handle.pid):
                self._deaths.close()
                raise PeerDiedError(f"rank {q} (process {segment.handle.pid}) died during init", peer=q)

    @property
    def background(self) -> bool:
        """Whether waits leave the core to others at once."""
        return self._background

    @background.setter
    def background(self, background: bool) -> None:
        self._background = background
        self.spins = _SPINS_BACKGROUND if background else self._busy_spins
        self._give_way = range(0) if background else _GIVE_WAY

    def explain(self, waits: Waits | None) -> None:
        """From now on long waits are explained."""
        self._waits = waits
        if waits is not None:
            waits.calls[ON_HOST] = lambda: self.sequence
            waits.offer("calls", self.last_calls)
            waits.examine = self._examine_aborted

    def close(self) -> None:
        """Tells the peers that this rank makes no further call, and lets go of their memory."""
        if not self.words:
            return
        self.own[CLOSED] = self.sequence + 1
        if self._waits is not None:
            self._waits.end(ON_HOST)
        self.abandon()

    def abandon(self) -> None:
        """Lets go of the peers' memory without a word."""
        self._deaths.close()
        self.own = None  # type: ignore[assignment]
        self.words, self.others = [], []
        self.log.close()

    def __del__(self) -> None:
        """A communicator that is dropped makes no further call either."""
        if getattr(self, "words", None):
            self.own[CLOSED] = self.sequence + 1

    def last_calls(self) -> list[tuple[int, str]]:
        """The last calls of all ranks that this one has made: their numbers, and their words."""
        before = self.sequence - 1
        calls = self.log.calls_of(self.rank) if self.words else []
        return [(before - ((before - number) & SEQUENCE_MASK), words) for number, words in calls]

    def enter(self, signature: int) -> int:
        """Enters the next collective call into the log. Returns the word that peers must show."""
        sequence = self.sequence
        self.sequence = sequence + 1
        value = signature | (sequence & SEQUENCE_MASK) << 1
        self.own[sequence & CALL_LOG_MASK] = value
        self.before = (3 * self.before + (signature & _SIGNATURE)) & _WORD  # SHARED_BIT differs between ranks
        return value

    def count(self, counter: int, value: int) -> None:
        """Sets a counter of this rank, after all that it has written."""
        if self.fence:
            self.fence()
        self.own[counter] = value

    # -- waiting ----------------------------------------------------------------------------------

    def await_calls(self, index: int, value: int) -> None:
        """Waits until word ``index`` of every peer's log is ``value``, the ``shared`` bit aside."""
        for words in self.others:
            if words[index] != value:
                self.wait_call(words, index, value)
        if self.fence:
            self.fence()

    def await_counts(self, counter: int, value: int) -> None:
        """Waits until a counter of every peer is at least ``value``."""
        for words in self.others:
            if words[counter] < value:
                self.wait_count(words, counter, value)
        if self.fence:
            self.fence()

    def wait_call(self, words: memoryview, index: int, value: int) -> None:
        """Waits until word ``index`` of a peer's log is ``value``, the ``shared`` bit aside."""
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
            if now() - start > _PATIENCE_NS:
                break
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
            if now() - start > _PATIENCE_NS:
                break
        self.wait_for(words, lambda: words[index] >= value)
        self.waited_ns += now() - start

    def wait_for(
        self,
        words: memoryview,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        point_to_point: str = "",
    ) -> None:
        """Waits, with patience, until ``ready()``.

        Args:
            words: The words of the peer that is waited for.
            ready: Whether the wait is over.
            timeout_s: Deadline in seconds from now; the communicator's by default.
            point_to_point: "send" or "receive" if only the two ranks take part, so that the log says nothing.

        Raises:
            CommunicationError: A rank died, left, gave up, called something else or is late.
        """
        peer = next(q for q, w in enumerate(self.words) if w is words)
        clock: ActiveClock | None = None  # until the first examination, before which most waits are over
        start, limit_s = time.monotonic_ns(), timeout_s or self.timeout_s
        examine = start + _EXAMINE_NS // 5
        self.own[HEARTBEAT] = self.own[WAITING_SINCE] = start
        self.own[WAITING_FOR] = peer + 1
        yields = range(1 if self._background else _YIELDS)
        while not self._looked(ready, yields, examine):
            now = time.monotonic_ns()
            if now >= examine:
                clock = clock or ActiveClock()
                self.own[HEARTBEAT], waited_s = now, clock.now()
                self._examine(peer, ready, waited_s >= limit_s, point_to_point, waited_s)
                examine = now + _EXAMINE_NS
            if self._background or now - start > _PATIENCE_NS:
                yields = range(1)
                time.sleep(min(max((now - start) / 16e9, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
        if self._waits is not None:
            self._waits.end(ON_HOST)
        self.own[WAITING_FOR] = 0  # not after an error: a rank that gives up is not the one at fault

    def blame(self, peer: int, point_to_point: bool) -> None:
        """Raises the error that ends the call, where a rank is known to have died or given up.

        Args:
            peer: The rank whose message came to nothing.
            point_to_point: Whether only the two ranks take part.
        """
        what = "send or receive" if point_to_point else ""
        self._examine(peer, lambda: False, False, what, 0.0)

    def examine_message(
        self,
        peer: int,
        ready: Callable[[], bool],
        late: bool,
        what: str,
        nbytes: int,
        waited_s: float,
        caller: bool,
    ) -> None:
        """Looks for a reason to give up a message between this rank and a peer.

        Args:
            peer: The peer.
            ready: Whether the message can go on.
            late: Whether the time-out has passed.
            what: "send" or "receive".
            nbytes: Its length.
            waited_s: How long a caller has waited.
            caller: Whether a caller waits at all.

        Raises:
            CommunicationError: A rank died, left, gave up or is late.
        """
        if caller:
            self.own[HEARTBEAT] = now = time.monotonic_ns()
            self.own[MESSAGE_SINCE] = now - int(waited_s * 1e9)
            self.own[MESSAGE_SENDS] = 2 * nbytes + (what == "send")
            self.own[MESSAGE_FROM] = peer + 1
        self._examine(peer, ready, late, f"{what} of {nbytes:,} bytes", waited_s, IN_MESSAGES)

    def end_message_wait(self) -> None:
        """A caller's wait for a message is over."""
        if self.own is not None and self.own[MESSAGE_FROM]:
            self.own[MESSAGE_FROM] = 0
            if self._waits is not None:
                self._waits.end(IN_MESSAGES)

    @staticmethod
    def _looked(ready: Callable[[], bool], yields: range, until_ns: int) -> bool:
        for _ in yields:
            os.sched_yield()
            if ready():
                return True
            if time.monotonic_ns() >= until_ns:  # where many ranks share a core a yield takes milliseconds
                break
        return False

    def _examine(
        self,
        peer: int,
        ready: Callable[[], bool],
        late: bool,
        point_to_point: str,
        waited_s: float,
        kind: str = ON_HOST,
    ) -> None:
        # What a peer did before it ended is there once its end is seen, so its end is looked for first.
        dead, closed = self.dead(), [words[CLOSED] for words in self.words]
        call = f" in a {point_to_point}" if point_to_point else self.log.last_call(self.sequence)
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
            self.log.compare(self.sequence)
        self._examine_aborted()
        self._examine_closed(closed, peer, point_to_point, call)
        suspects = self._suspects(peer, point_to_point) if late else []
        why = ""
        if self._waits is not None and (late or waited_s >= self._waits.due_s(kind)):
            # While the store is slow, this rank does not seem to stand still.
            self.own[HEARTBEAT] = time.monotonic_ns() + _SLOW_NS
            why = self._waits.look(kind, call.removeprefix(" in "), peer, waited_s, late)
            self.own[HEARTBEAT] = time.monotonic_ns()
        if late:
            self._examine_aborted()  # a rank that gave up meanwhile waits no more, and is not to blame
            if point_to_point and why and self._waits is not None and self._waits.culprit is not None:
                suspects = [self._waits.culprit]  # for which the peer waits itself
            raise PeerTimeoutError(
                f"{_names(suspects)} did not take part within {waited_s:.1f} s (rank {self.rank} waits for "
                f"rank {peer}{call}{why}); it is stopped, computing, or stuck elsewhere. A longer time-out: "
                f"fc.init(timeout_s=...) or FLAGCX_TIMEOUT_S",
                peer=peer if peer in suspects else suspects[0],
            )

    def dead(self) -> list[int]:
        """The peers that died without a word; a rank that gave up or closed has said so."""
        ended = self._deaths.peers()
        return [q for q in ended if not self.words[q][ABORTED] and not self.words[q][CLOSED]]

    def _examine_closed(self, ends: Sequence[int], peer: int, point_to_point: str, call: str) -> None:
        for q, closed in enumerate(ends):
            if not closed or (point_to_point and q != peer):
                continue
            if point_to_point or closed - 1 < self.sequence:
                raise PeerDiedError(
                    f"rank {q} has ended or closed its communicator while rank {self.rank} waited{call}; "
                    f"every rank must make the same calls",
                    peer=q,
                )

    def _examine_aborted(self) -> None:
        for q, words in enumerate(self.words):
            if words[ABORTED]:  # this rank's own too: another thread of it may have given up
                raise AbortedError(
                    f"rank {q} gave up: {self.log.reason_of(q)}",
                    peer=words[ABORTED] - 2 if words[ABORTED] > 1 else q,
                )

    def _suspects(self, peer: int, point_to_point: str) -> list[int]:
        """The ranks that keep the rest waiting: those that do not wait themselves, or stand still."""
        if point_to_point:
            return [peer]
        now = time.monotonic_ns()
        suspects = []
        for q, words in enumerate(self.words):
            breathing = (words[WAITING_FOR] or words[MESSAGE_FROM]) and now - words[HEARTBEAT] < _STALE_NS
            if q != self.rank and not breathing:
                suspects.append(q)
        return suspects or [peer]

    # -- giving up --------------------------------------------------------------------------------

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers that this rank cannot go on. The first reason stays."""
        if not self.words or self.own[ABORTED]:
            return
        self.log.write_reason(reason)
        self.own[ABORTED] = 1 if culprit is None else culprit + 2


def _names(ranks: list[int]) -> str:
    ranks = sorted(set(ranks))
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
