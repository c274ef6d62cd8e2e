"""Calls that work in the peers' own arrays, with a barrier before and after.

An array of ``comm.empty`` is reached through its mapping, any other by cross-memory attach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flagcx.errors import CommunicationError, ResourceError
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.heap import SHARED
from flagcx.transport.shared_memory.words import (
    ABORTED,
    CALL_LOG_MASK,
    CLOSED,
    DONE,
    LOCATIONS,
    SHARED_BIT,
)


class InPlace:
    """A call that works in the peers' arrays.

    Args:
        arena: The shared memory.
        call: The call.
        signature: Its signature.
    """

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        self._arena, self._signals, self._signature = arena, arena.signals, signature
        self._dtype, self._count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]

    def _enter(self, sent_from: int, received_at: int, shared: int = 0) -> int:
        """Enters the call with where its arrays lie, and waits for all. Returns its place in the log."""
        signals = self._signals
        own, index = signals.own, signals.sequence & CALL_LOG_MASK
        at = LOCATIONS + 2 * index
        own[at], own[at + 1] = sent_from, received_at
        if signals.fence:
            signals.fence()
        value = signals.enter(self._signature | SHARED_BIT if shared else self._signature)
        signals.await_calls(index, value)
        return index

    def _finish(self, work: Callable[..., object], *arguments: Any) -> None:
        """Works on the arrays where they lie, and waits until no peer touches this rank's any more."""
        signals = self._signals
        try:
            work(*arguments)
        except (CommunicationError, ResourceError):
            for q, words in enumerate(signals.words):
                if words[ABORTED] or words[CLOSED]:  # its memory went with it
                    signals.blame(q, False)
            raise
        self._arena.done = done = self._arena.done + 1
        signals.count(DONE, done)
        signals.await_counts(DONE, done)

    def _map(self, peer: int, location: int, count: int) -> np.ndarray | None:
        """A peer's array that is shared, or None for one that only cross-memory attach reaches."""
        if peer == self._arena.rank or not location & SHARED:
            return None
        raw = self._arena.peer_heaps.view(peer, location, count * self._dtype.itemsize)
        return raw.view(self._dtype)
