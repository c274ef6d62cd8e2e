"""The messages of one step, sent and received as far as each can move."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as now
from typing import Any

import numpy as np

from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.channel import Receiving, Sending
from flagcx.transport.shared_memory.places import Places


class Exchange:
    """The messages of one step, in the order in which they are sent and applied.

    Args:
        arena: The shared memory.
        sends: What leaves.
        receives: What comes.
        point_to_point: Whether only the ranks named take part.
    """

    def __init__(
        self,
        arena: Arena,
        sends: Sequence[Sending],
        receives: Sequence[Receiving],
        point_to_point: bool = False,
    ) -> None:
        self._arena, self._sends, self._receives = arena, sends, receives
        self._point_to_point = point_to_point

    def run(self, arrays: Sequence[np.ndarray], places: Places, number: int) -> None:
        """Sends and receives all messages, whichever can move first; see ``Sending.begin``."""
        for send in self._sends:
            send.begin(arrays, places, number)
        for receive in self._receives:
            receive.begin(arrays, places, number)
        sending, receiving = _advance(self._sends), _advance(self._receives)
        while sending or receiving:
            self._pause(_held_up_by_peers([*receiving, *sending]))
            sending, receiving = _advance(sending), _advance(receiving)
        for receive in self._receives:
            receive.settle()

    def _pause(self, waiting: list[Sending | Receiving]) -> None:
        signals = self._arena.signals
        ready = waiting[0].ready
        if len(waiting) > 1:

            def ready() -> bool:
                return any(message.ready() for message in waiting)

        if ready():
            return
        start = now()
        for _ in signals.spins:
            if ready():
                signals.waited_ns += now() - start
                return
        words = signals.words[waiting[0].peer]
        what = ("send" if waiting[0].sends else "receive") if self._point_to_point else ""
        signals.wait_for(words, ready, point_to_point=what)
        signals.waited_ns += now() - start


def _advance(messages: Sequence[Any]) -> list[Any]:
    """Advances messages; those of one peer strictly one after the other. Returns those that are not done."""
    left: list[Any] = []
    for message in messages:
        if (left and message.peer in [one.peer for one in left]) or not message.advance():
            left.append(message)
    return left


def _held_up_by_peers(messages: list[Sending | Receiving]) -> list[Sending | Receiving]:
    """The messages that nothing but a peer holds up, of each peer the first."""
    if len(messages) == 1:
        return messages
    first: dict[tuple[type, int], Sending | Receiving] = {}
    for message in messages:
        first.setdefault((type(message), message.peer), message)
    return [message for message in first.values() if not message.waits()]
