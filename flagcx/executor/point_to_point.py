"""Sends and receives under way, which wait neither for collectives nor for each other.

Messages of one direction with one peer move one after the other, all others together. The thread of a caller
that waits for one of them moves all of them. While no caller waits, a thread of the communicator's own does,
so that they end beside a computation or a collective.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic
from time import perf_counter_ns as now
from typing import Any, Protocol

from flagcx.bootstrap.clock import ActiveClock
from flagcx.daemon import Daemon
from flagcx.errors import CommunicationError, CommunicatorError, PeerTimeoutError
from flagcx.executor.progress_thread import no_thread
from flagcx.executor.transfer import After, Transfer
from flagcx.executor.work import Work, seconds
from flagcx.profiler import OperationInfo, RecordBuffer
from flagcx.transport.messenger import Message, Messenger
from flagcx.transport.slices import ask_for_short_slices

TWO_THREADS = (
    "two threads use one communicator at the same time; give each thread its own, from comm.split(), or let "
    "one thread make all calls"
)
_EXAMINE_S = 5e-3
_EXAMINE_BESIDE_S = 50e-3
_LINGER_S = 0.5
"""How long the thread waits for further messages before it ends."""
_STOP_S = 1.0

Messages = Sequence[tuple[Any, int]]


class Owner(Protocol):
    """The executor that messages belong to.

    Attributes:
        rank: This rank.
        turn: Held by the thread of a caller that is in a call.
        over: Why no further call can be made; empty where one can.
        ring: Where calls are recorded, if they are.
    """

    rank: int
    turn: threading.Lock
    over: str
    ring: RecordBuffer | None

    def check(self) -> None:
        """Raises CommunicatorError where no further call can be made."""

    def broke(self, error: BaseException) -> None:
        """Ends the communicator after an error."""

    def leave_untold(self, error: BaseException) -> None:
        """Keeps an error for the next caller."""

    def take_untold(self) -> BaseException | None:
        """The error that no caller has got so far, which this one gets."""


class PointToPoint:
    """The sends and receives of one rank in one communicator.

    Args:
        messenger: Carries the messages.
        owner: The executor that they belong to.
    """

    def __init__(self, messenger: Messenger, owner: Owner) -> None:
        self._messenger, self._owner = messenger, owner
        self._channels: dict[tuple[bool, int], deque[tuple[Message, Transfer]]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._to_self = Transfer(None, None)  # no call waits for what a rank sends to itself
        self.callers = 0  # threads that wait for messages
        self._thread: threading.Thread | None = None

    # -- calls ------------------------------------------------------------------------------------

    def run(self, sends: Messages, receives: Messages, after: After | None, what: OperationInfo) -> None:
        """Sends and receives at once, and returns when all of it has ended.

        Args:
            sends: Plain arrays, and the rank that each goes to.
            receives: Plain arrays, and the rank whose data each gets.
            after: What is left to do then, such as to copy what came to where it belongs.
            what: What the records call it.

        Raises:
            CommunicatorError: Closed, broken, or another thread is in a call.
            CommunicationError: A peer died, came late, or sent something else.
        """
        owner = self._owner
        if not owner.turn.acquire(blocking=False):
            raise CommunicatorError(TWO_THREADS)
        try:
            transfer = self._begin(sends, receives, after, what)
            if transfer.left:
                self.wait(transfer)
        finally:
            owner.turn.release()

    def start(
        self, sends: Messages, receives: Messages, after: After | None, what: OperationInfo, value: Any
    ) -> TransferWork:
        """Begins what ``run`` does, and returns work whose ``wait`` returns ``value``."""
        transfer = self._begin(sends, receives, after, what)
        if transfer.left:
            with self._wake:
                problem = None if self._thread else self._start_thread()
                self._wake.notify()
            if problem is not None:
                raise no_thread("sends and receives", problem, self._owner.broke) from None
        return TransferWork(self, transfer, value)

    def _start_thread(self) -> RuntimeError | None:
        """Starts the thread that moves what was started; what Python says where it cannot."""
        self._thread = Daemon(self._work, "flagcx-messages")
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            return error
        return None

    def _begin(
        self, sends: Messages, receives: Messages, after: After | None, what: OperationInfo
    ) -> Transfer:
        """Begins messages, and moves those that can be moved at once.

        What a rank sends to itself is copied, so that it can be received at any time.
        """
        owner, messenger = self._owner, self._messenger
        owner.check()
        transfer = Transfer(after, what)
        try:
            with self._lock:
                for array, peer in receives:
                    self._add(messenger.begin(False, array, peer), transfer)
                for array, peer in sends:
                    if peer == owner.rank:
                        self._add(messenger.begin(True, array.copy(), peer), self._to_self)
                    else:
                        self._add(messenger.begin(True, array, peer), transfer)
                self._advance()
                transfer.count_down(owner.ring)
        except BaseException as error:
            owner.broke(error)
            raise
        return transfer

    def _add(self, message: Message, transfer: Transfer) -> None:
        transfer.left += 1
        self._channels.setdefault((message.sends, message.peer), deque()).append((message, transfer))

    def _advance(self) -> bool:
        """Moves all that can be moved now, with the lock held. Returns whether anything could."""
        moved, ring = False, self._owner.ring
        for key, channel in list(self._channels.items()):
            while channel and channel[0][0].ready():
                message, transfer = channel[0]
                start_ns = now()
                ended = message.advance()
                transfer.moved_ns += now() - start_ns
                moved = True
                if not ended:
                    break
                channel.popleft()
                transfer.count_down(ring)
            if not channel:
                self._channels.pop(
                    key, None
                )  # gone already where this thread's handler of a signal has ended all
        return moved

    # -- waiting ----------------------------------------------------------------------------------

    def poll(self, transfer: Transfer) -> bool:
        """Moves what can be moved, unless another thread does. Returns whether a transfer has ended."""
        owner = self._owner
        if transfer.left and not owner.over and self._lock.acquire(blocking=False):
            error: BaseException | None = None
            try:
                self._advance()
            except CommunicationError as caught:
                error = caught
            finally:
                self._lock.release()
            if error is not None:
                self._fail(error)
        return not transfer.left or bool(owner.over)

    def wait(self, transfer: Transfer, limit_s: float = math.inf) -> None:
        """Waits for a transfer, and moves all messages meanwhile.

        Args:
            transfer: The messages.
            limit_s: How long to wait at most, in seconds; then this returns all the same.

        Raises:
            CommunicationError: A peer died, came late, or sent something else.
            CommunicatorError: The communicator was closed or broken meanwhile.
        """
        self._check()
        with self._lock:
            self.callers += 1
        try:
            self._wait(transfer, limit_s)
        except BaseException as error:
            self._owner.broke(error)
            raise
        finally:
            self._messenger.end_wait()
            with self._wake:
                self.callers -= 1
                self._wake.notify()

    def _wait(self, transfer: Transfer, limit_s: float) -> None:
        messenger = self._messenger
        start = idle_since = monotonic()
        clock, quiet_since_s = ActiveClock(), -transfer.waited_s
        examine_at, looks = start + _EXAMINE_S / 5, 0
        while transfer.left:
            self._check()
            moved_ns = transfer.moved_ns
            with self._lock:
                moved = self._advance()
            if not transfer.left:
                return
            at = monotonic()
            if moved:
                idle_since, looks = at, 0
            if transfer.moved_ns != moved_ns:
                quiet_since_s = clock.now()
            if at >= examine_at or at - start >= limit_s:
                transfer.waited_s = clock.now() - quiet_since_s
            if at >= examine_at:
                self._examine(transfer)
                examine_at = at + _EXAMINE_S
            if at - start >= limit_s:
                return
            messenger.rest(looks, at - idle_since, True)
            looks += 1

    def _check(self) -> None:
        """Raises the error that ended the communicator, once, and later that it has ended."""
        if self._owner.over:
            untold = self._owner.take_untold()
            if untold is not None:
                raise untold
            self._owner.check()

    def _examine(self, transfer: Transfer) -> None:
        """Looks for a reason to give up a transfer that a caller waits for."""
        messenger = self._messenger
        late = transfer.waited_s >= messenger.timeout_s
        for message in self._first(transfer):
            to_itself = message.peer == self._owner.rank
            messenger.examine(message, transfer.waited_s, late and not to_itself, caller=True)
            if late and to_itself and not message.ready():
                what, other = ("send", "receive") if message.sends else ("receive", "send")
                raise PeerTimeoutError(
                    f"rank {message.peer} waited {transfer.waited_s:.1f} s in a {what} of a message to "
                    f"itself, and has made no {other} for it; make the {other} before, or call comm.sendrecv",
                    peer=message.peer,
                )

    def _first(self, transfer: Transfer | None) -> list[Message]:
        """The first message of each channel, or of one channel in which a transfer has messages."""
        with self._lock:
            channels = list(self._channels.values())
            if transfer is not None:
                channels = [c for c in channels if any(one is transfer for _, one in c)][:1]
            return [channel[0][0] for channel in channels]

    # -- beside the caller --------------------------------------------------------------------------

    def _work(self) -> None:
        """Moves messages while no caller does, until there have been none for a while."""
        ask_for_short_slices()
        looks, idle_since = 0, monotonic()
        examine_at = idle_since + _EXAMINE_BESIDE_S
        try:
            while self._is_needed():
                with self._lock:
                    moved = self._advance()
                at = monotonic()
                if moved:
                    looks, idle_since = 0, at
                if at >= examine_at:
                    for message in self._first(None):
                        self._messenger.examine(message, 0.0, late=False, caller=False)
                    examine_at = at + _EXAMINE_BESIDE_S
                self._messenger.rest(looks, at - idle_since, False)
                looks += 1
        except BaseException as error:
            self._fail(error)

    def _is_needed(self) -> bool:
        """Waits until there are messages and no caller moves them; False if none came."""
        with self._wake:
            while not self._owner.over and (self.callers or not self._channels):
                if not self._wake.wait(_LINGER_S) and not (self.callers or self._channels):
                    break
            if self._owner.over or not self._channels:
                self._thread = None
                return False
            return True

    def _fail(self, error: BaseException) -> None:
        """Ends the communicator with an error that no caller has got so far."""
        if not self._owner.over:
            self._owner.leave_untold(error)
            self._owner.broke(error)

    # -- the end ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits until all that was begun has ended, but what this rank sent to itself.

        Raises:
            CommunicationError: A peer died, came late, or sent something else.
        """
        with self._lock:
            transfers = [transfer for channel in self._channels.values() for _, transfer in channel]
        for transfer in transfers:
            if transfer is not self._to_self:
                self.wait(transfer)

    def stop(self, forked: bool = False) -> None:
        """Lets nothing move any more. In a forked child the lock may belong to a thread that is not there."""
        held = not forked and self._lock.acquire(timeout=_STOP_S)
        left, self._channels = self._channels, {}
        if held:
            self._messenger.abandon([message for channel in left.values() for message, _ in channel])
            self._lock.release()


class TransferWork(Work):
    """Sends and receives that were started and may still be under way.

    Until ``wait`` has returned, the arrays of the call belong to it.

    Args:
        messages: All that are under way.
        transfer: Those of this call.
        value: What ``wait`` returns.

    Example:
        >>> work = comm.recv(x, source=1, async_op=True)  # doctest: +SKIP
        >>> comm.send(y, to=1)                            # doctest: +SKIP
        >>> x = work.wait()                               # doctest: +SKIP
    """

    def __init__(self, messages: PointToPoint, transfer: Transfer, value: Any) -> None:
        self._messages, self._transfer, self._value = messages, transfer, value
        self._what = "send and receive"

    def done(self) -> bool:
        """Whether all of it has ended, well or not."""
        return self._messages.poll(self._transfer)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits until the arrays of the call may be used again, and returns what the call would have.

        Args:
            timeout_s: How long to wait, in seconds; by default until the communicator's own time-out, which
                counts while callers wait and nothing comes.

        Raises:
            ArgumentError: ``timeout_s`` is no time.
            PeerTimeoutError: It is still under way; after ``timeout_s`` ``wait`` may be called again.
            CommunicationError: A peer died, came late, or sent something else.
            CommunicatorError: The communicator was closed or broken meanwhile.
        """
        limit_s = seconds(timeout_s)
        if self._transfer.left:
            self._messages.wait(self._transfer, math.inf if limit_s is None else limit_s)
        if self._transfer.left:
            raise PeerTimeoutError(f"{self._what} still runs after {timeout_s} s; wait again")
        return self._value
