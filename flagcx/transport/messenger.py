"""Sends and receives that ranks make on their own, any number of them under way at once.

They share nothing with the steps of collectives: neither slots nor tags, and no order. A transport carries
each message; ``flagcx.executor.point_to_point`` keeps the messages of a pair of ranks in order and decides
whose thread moves them.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

_SPINS = 50
_PATIENCE_S = 2e-3
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


class Message(Protocol):
    """One send or receive under way.

    Attributes:
        peer: The rank that it goes to or comes from.
        sends: Whether it is a send.
    """

    peer: int
    sends: bool

    def ready(self) -> bool:
        """Whether ``advance`` could do something. Called often, and only for the first message of a peer."""

    def advance(self) -> bool:
        """Moves what can be moved now, without waiting for the peer. Returns whether the message has ended.

        Raises:
            MismatchError: The peer's message has another count or dtype.
            CommunicationError: The peer died or gave up.
        """


class Messenger(ABC):
    """Carries the messages of one rank; one thread at a time calls it, ``rest`` and ``examine`` excepted.

    Attributes:
        timeout_s: How long a caller waits for a peer, in seconds.
    """

    timeout_s: float

    @abstractmethod
    def begin(self, sends: bool, array: Any, peer: int) -> Message:
        """Begins a message. Messages of one direction with one peer are begun, and meet, in the same order.

        Args:
            sends: Whether ``array`` is sent; else it is overwritten by what comes.
            array: A contiguous array, which stays as it is until the message has ended.
            peer: The rank at the other end.
        """

    @abstractmethod
    def examine(self, message: Message, waited_s: float, late: bool, caller: bool) -> None:
        """Checks whether there is a reason to give up a message that has not ended.

        Args:
            message: The first message of its peer and direction.
            waited_s: How long the caller has waited for it, in seconds.
            late: Whether the time-out has passed.
            caller: Whether a caller waits for it; else it is only under way.

        Raises:
            CommunicationError: The peer died, ended or gave up; or, if ``late``, it did not come in time.
        """

    def end_wait(self) -> None:  # noqa: B027
        """A caller's wait, which may have been examined, is over."""

    def abandon(self, messages: Sequence[Message]) -> None:  # noqa: B027
        """Lets go of messages that won't end, since the communicator has."""

    def rest(self, looks: int, waited_s: float, caller: bool) -> None:
        """Waits a little before the messages are looked at again: soon for a caller, who has nothing to do.

        Args:
            looks: How often they were looked at since something moved last.
            waited_s: For how long nothing has moved, in seconds.
            caller: Whether a caller waits; else the thread that works beside the caller's computation.
        """
        if caller and looks < _SPINS:
            return
        if caller and waited_s < _PATIENCE_S:
            os.sched_yield()
        else:
            time.sleep(min(max(waited_s / 16, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
