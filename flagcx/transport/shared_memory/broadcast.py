"""Short broadcasts: the root leaves its message once, and all others read it there.

The root waits for nobody, unless it is so many broadcasts ahead of a peer that it would write the slot that
the peer has yet to read. A slot begins with the word of the call and a hash of the calls before it, which
each reader compares with its own. The root is never so far ahead that its call log does not show a call that
differs.
"""

from __future__ import annotations

import numpy as np

from flagcx.transport.base import Call
from flagcx.transport.shared_memory.areas import BROADCAST_HEAD_NBYTES, BROADCASTS, ONE_SHOT_NBYTES
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.words import BROADCAST, BROADCAST_READ


class Broadcast:
    """Broadcast ``direct`` of a message that fits into a slot."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._root = root = int(call.schedule.root)  # type: ignore[arg-type]
        self._sends = root == arena.rank
        count, dtype = int(call.counts), call.dtype.numpy  # type: ignore[arg-type]
        starts = [arena.areas.broadcast(number) for number in range(BROADCASTS)]
        self._slots = [arena.view(root, start + BROADCAST_HEAD_NBYTES, count, dtype) for start in starts]
        self._heads = [start // 8 for start in starts]
        self._words = arena.signals.words[root]

    @staticmethod
    def serves(collective: str, algorithm: str, nbytes: int, size: int) -> bool:
        """Whether a call is a broadcast of ``nbytes`` bytes that goes through a slot."""
        return (
            (collective, algorithm) == ("broadcast", "direct") and size > 1 and 0 < nbytes <= ONE_SHOT_NBYTES
        )

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        arena, signals = self._arena, self._signals
        number = arena.broadcasts
        arena.broadcasts = number + 1
        turn = number % BROADCASTS
        sequence, before = signals.sequence, signals.before
        value = signals.enter(self._signature)
        if self._sends:
            if number - arena.broadcasts_read >= BROADCASTS:
                self._await_readers(number)
            self._slots[turn][...] = sendbuf.reshape(-1)
            if recvbuf is not sendbuf:
                recvbuf[...] = sendbuf
            signals.own[self._heads[turn]], signals.own[self._heads[turn] + 1] = value, before
            if signals.fence:
                signals.fence()
            signals.own[BROADCAST] = number + 1
        else:
            words = self._words
            if words[BROADCAST] <= number:
                signals.wait_count(words, BROADCAST, number + 1)
            if signals.fence:
                signals.fence()
            head = self._heads[turn]
            if words[head] != value:
                signals.log.refuse_call(self._root, words[head], sequence)
            if words[head + 1] != before:
                signals.log.refuse_calls_before(self._root, sequence)
            recvbuf.reshape(-1)[...] = self._slots[turn]
            if signals.fence:
                signals.fence()
        signals.own[BROADCAST_READ] = number + 1

    def _await_readers(self, number: int) -> None:
        signals, least = self._signals, number - BROADCASTS + 1
        signals.await_counts(BROADCAST_READ, least)
        self._arena.broadcasts_read = min(words[BROADCAST_READ] for words in signals.words)
