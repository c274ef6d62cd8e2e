"""Watches the operations that a rank has enqueued on its GPU, so that none can hang without an error.

A thread of each rank publishes the rank's progress in the store and looks for four things: a rank that died,
a rank that gave up, an operation of its own that is not done within the time-out, and ranks that call
different things. It then ends the communicator with an error that names every rank's last operation, and
aborts NCCL's operations, which frees the streams that wait for them.

A rank whose operation takes long asks all ranks for their last calls, and the threads of the others answer,
whatever the ranks do. While calls go on, neighbours compare now and then what stands for all calls so far.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Protocol

from flagcx.bootstrap.clock import ActiveClock
from flagcx.bootstrap.store import Store
from flagcx.daemon import Daemon
from flagcx.errors import (
    AbortedError,
    CommunicationError,
    CommunicatorError,
    FlagcxError,
    MismatchError,
    PeerDiedError,
    PeerTimeoutError,
)
from flagcx.transport.at_exit import call_at_exit
from flagcx.transport.compared import compare_marks
from flagcx.transport.questions import Questions, Told, compare, unpacked
from flagcx.transport.stream_order import StreamOrder
from flagcx.transport.waits import ON_GPU, Waits

logger = logging.getLogger("flagcx")

_TICK_S = 0.25
_PUBLISH_S = 1.0
_ABORT_LIMIT_S = 3.0
_END_S, _ENDED_S = 0.5, 0.5
"""How long a close compares calls, and after what wait ranks that have closed are looked for, in seconds."""


class Watched(Protocol):
    """The parts of a transport that its watchdog calls, from the watchdog's thread."""

    def fault(self) -> CommunicationError | None:
        """The error of a wait that timed out on the GPU, or None."""

    def fail(self, error: FlagcxError) -> None:
        """Ends the communicator with an error, which later calls and waits raise."""

    def abort_enqueued(self) -> None:
        """Aborts the operations that are under way. May take long."""


class Watchdog:
    """The watching thread of one rank of one communicator.

    Args:
        order: The operations.
        watched: The transport.
        store: The communicator's part of the store.
        timeout_s: How long an operation may take after it is enqueued, in seconds.
        leave: Ends the process; called if a thread of the rank is still inside NCCL after the abort.
        waits: What explains long waits, if they are explained.
    """

    def __init__(
        self,
        order: StreamOrder,
        watched: Watched,
        store: Store,
        timeout_s: float,
        leave: Callable[[str], None],
        waits: Waits | None = None,
    ) -> None:
        self._order, self._watched, self._store = order, watched, store
        self._timeout_s, self._leave, self._waits = timeout_s, leave, waits
        self._since: float | None = None
        self._clock, self._stood_s = ActiveClock(), (time.monotonic(), time.monotonic())
        self._compared: object = None
        self._shown: tuple[int, int, float | None] | None = None
        if waits is not None:
            waits.calls[ON_GPU] = lambda: order.calls
            waits.offer("gpu_calls", order.last_calls)
        self._tick_s = min(_TICK_S, timeout_s / 8)
        self._questions = Questions(order, store, self._tick_s)
        self._stop = threading.Event()
        self._published = (0.0, -1)
        self._thread = Daemon(self._run, "flagcx-watchdog")
        self._looker = Daemon(self._keep_looking, "flagcx-looker")
        self._at_exit = call_at_exit(self.tell_closed)
        self._thread.start()
        self._looker.start()

    def close(self) -> None:
        """Stops watching."""
        atexit.unregister(self._at_exit)
        self._stop.set()
        for thread in (self._thread, self._looker):
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _keep_looking(self) -> None:
        """Asks the GPU on a thread of its own, since CUDA may keep it for as long as another thread waits."""
        while not self._stop.wait(self._tick_s):
            self._order.look()

    def _run(self) -> None:
        while not self._stop.wait(self._tick_s):
            try:
                error = self._look()
            except PeerDiedError as death:
                error = self._died(death)
            except MismatchError as different:
                error = different
            except CommunicatorError:
                return  # This rank has closed its store: the job is ending.
            except FlagcxError as silence:
                error = self._unheard(silence)
            if error is not None:
                self._give_up(error)
                return

    def _look(self) -> CommunicationError | None:
        """Publishes the progress, then looks for an error.

        Raises:
            MismatchError: The ranks call different things.
        """
        self._publish_progress()
        self._compare_with_neighbour()
        since = self._order.pending_since()
        fault = self._watched.fault()
        if fault is None:  # the operation that found one has ended, and the page shows it as it waited
            self._show(since)
        self._store.check()
        if fault is not None:
            return self.blamed(fault)
        if self._questions.look():
            return self._reason()
        waited_s = self._waited_s(since)
        if waited_s > self._timeout_s:
            return self._late()
        if waited_s > _ENDED_S:
            self._look_for_closed()
        self._explain(since, waited_s)
        return None

    def _unheard(self, silence: FlagcxError) -> CommunicationError | None:
        """The error of a late operation of which the other ranks tell nothing: the store does not answer."""
        if self._waited_s(self._order.pending_since()) <= self._timeout_s:
            return None
        return PeerTimeoutError(
            f"rank {self._store.rank}: {self._order.what} is not done after {self._timeout_s:g} s, and what "
            f"the other ranks do is not known: {silence}",
            peer=silence.peer if isinstance(silence, CommunicationError) else None,
        )

    def _waited_s(self, since: float | None) -> float:
        """For how long an operation has been under way, less the time in which this process was stopped."""
        at = time.monotonic()
        stood_s = at - self._clock.now()  # up to a constant
        # An operation that was not under way at the last look may have begun just before a pause.
        before_s = self._stood_s[0 if since == self._since else 1]
        self._stood_s = before_s, stood_s
        return 0.0 if since is None else at - since - (stood_s - before_s)

    def _show(self, since: float | None) -> None:
        """Shows on the rank's page how far it has come, and since when an operation is under way."""
        progress = self._order.calls, self._order.issued, since
        if self._waits is not None and progress != self._shown:
            self._shown = progress
            calls, issued, _ = progress
            what = str(self._order.what)
            self._waits.show(gpu={"calls": calls, "issued": issued, "what": what, "since": since})

    def blamed(self, error: CommunicationError) -> CommunicationError:
        """An error of a wait that timed out on the GPU, with the blame of a rank that may be further away.

        The rank that did not come may itself wait for another, which answers no question: it is stopped.
        """
        if not isinstance(error, PeerTimeoutError):
            return error
        answers = None if self._has_given_up() else self._answers()
        if self._has_given_up():  # a rank that did meanwhile may be the one that did not come
            return self._reason()
        if answers is None or error.peer not in answers:
            return error
        silent = [rank for rank in range(self._store.size) if rank not in answers]
        if not silent:
            return error
        names = ", ".join(f"rank {rank}" for rank in silent)
        return PeerTimeoutError(
            f"{names} did not answer, while rank {error.peer} did: {error}", peer=silent[0]
        )

    def _has_given_up(self) -> bool:
        """Whether a rank has told that it gave up."""
        try:
            return self._questions.look()
        except FlagcxError:
            return False  # the job is ending

    def _answers(self) -> dict[int, Told] | None:
        """What the ranks tell of their calls; None where the job is ending."""
        try:
            return self._questions.ask()
        except FlagcxError:
            return None

    def explained(self, error: CommunicationError) -> CommunicationError:
        """What a call that NCCL could not enqueue comes from, as far as the ranks tell, or else its error.

        NCCL fails too where a rank died or gave up, and where ranks connect for different calls.
        """
        try:
            compare(self._questions.ask())
            return self._reason() if self._questions.look() else error
        except MismatchError as different:
            return different
        except PeerDiedError as death:
            return self._died(death)
        except FlagcxError:
            return error  # the job is ending

    def _died(self, death: PeerDiedError) -> PeerDiedError:
        here = f"rank {self._store.rank} was in {self._order.what}"
        return PeerDiedError(f"{death}; {here}", peer=death.peer)

    def _compare_with_neighbour(self) -> None:
        """Compares this rank's calls so far with those that the next rank has published.

        Raises:
            MismatchError: They differ.
        """
        store, order = self._store, self._order
        if not order.marks or self._compared == order.marks[-1]:
            return
        peer = (store.rank + 1) % store.size
        try:
            theirs = unpacked(json.loads(store.get(f"nccl/progress/{peer}", 0.0))[2:])
        except PeerTimeoutError:
            return
        self._compared = order.marks[-1]
        if not (order.captured or theirs.captured):
            compare_marks({store.rank: list(order.marks), peer: theirs.marks})

    def _explain(self, since: float | None, waited_s: float) -> None:
        """Looks into an operation that takes long.

        Raises:
            MismatchError: The ranks call different things.
        """
        waits, changed = self._waits, since != self._since
        self._since = since
        if waits is None:
            return
        if since is None or changed:
            waits.end(ON_GPU)
            return
        if waited_s < waits.due_s(ON_GPU):
            return
        answers = self._questions.ask()
        made = {rank: answers[rank].calls if rank in answers else -1 for rank in range(self._store.size)}
        behind = min(made, key=lambda rank: made[rank])
        compare(answers)
        peer = behind if made[behind] < made[self._store.rank] else None
        waits.look(ON_GPU, str(self._order.what), peer, waited_s)

    def check_end(self) -> None:
        """Compares the last calls with those of the ranks that have closed, or do within half a second.

        Raises:
            MismatchError: They differ.
        """
        self.tell_closed()
        if not self._order.calls:
            return
        try:
            answers = self._questions.end(_END_S)
        except FlagcxError:
            return  # The job is ending.
        alike = {rank: told for rank, told in answers.items() if told.calls == self._order.calls}
        compare(alike)  # after other numbers of calls a difference may come from a graph of the caller

    def tell_closed(self) -> None:
        """Lets the other ranks know that this one makes no further call."""
        store, order = self._store, self._order
        try:
            store.set(f"nccl/closed/{store.rank}", json.dumps([order.calls, bool(order.captured)]).encode())
            store.add("nccl/closed", 1)
        except FlagcxError:
            return  # The job is ending.

    def _look_for_closed(self) -> None:
        """Looks for a rank that has closed and never came to the call that this one waits in.

        Raises:
            PeerDiedError: There is one.
        """
        store, order = self._store, self._order
        if order.captured or not store.add("nccl/closed", 0):
            return
        for rank in range(store.size):
            try:
                calls, captured = json.loads(store.get(f"nccl/closed/{rank}", 0.0))
            except PeerTimeoutError:
                continue
            if rank != store.rank and not captured and calls < order.calls:
                raise PeerDiedError(f"rank {rank} has ended or closed its communicator", peer=rank)

    def _publish_progress(self) -> None:
        at, issued = self._published
        now = time.monotonic()
        if now - at >= _PUBLISH_S and issued != self._order.issued:
            self._published = now, self._order.issued
            self._store.set(f"nccl/progress/{self._store.rank}", self._progress())

    def _progress(self) -> bytes:
        return json.dumps(
            [self._order.issued, str(self._order.what), *astuple(self._questions.told([]))]
        ).encode()

    def _late(self) -> PeerTimeoutError:
        """The error of a late operation: it names each rank's last operation, and the rank that is behind."""
        store = self._store
        store.set(f"nccl/progress/{store.rank}", self._progress())
        seen = {rank: self._progress_of(rank) for rank in range(store.size)}
        lines = [f"  rank {rank}: {what or 'nothing'} (operation {n})" for rank, (n, what) in seen.items()]
        least = min(seen, key=lambda rank: seen[rank][0])
        behind = least if seen[least][0] < self._order.issued else None
        blame = (
            f"rank {behind} is behind" if behind is not None else "all ranks have come to the same operation"
        )
        return PeerTimeoutError(
            f"rank {store.rank}: {self._order.what} is not done after {self._timeout_s:g} s; "
            f"{blame}. The last operation of each rank:\n" + "\n".join(lines) + "\n"
            "Every rank must make the same calls with the same counts and dtypes (FLAGCX_DEBUG=check "
            "compares them); FLAGCX_TIMEOUT_S sets the time-out",
            peer=behind,
        )

    def _progress_of(self, rank: int) -> tuple[int, str]:
        try:
            issued, what, *_ = json.loads(self._store.get(f"nccl/progress/{rank}", 2 * self._tick_s))
        except FlagcxError:
            return 0, ""
        return issued, what

    def _reason(self) -> CommunicationError:
        """The error of a rank that gave up, as this rank tells it."""
        try:
            disagree, peer, text = json.loads(self._store.get("nccl/reason", 0.5))
        except FlagcxError:
            disagree, peer, text = False, None, "it gave no reason"
        if disagree:
            return MismatchError(text, peer=peer)
        return AbortedError(
            f"another rank gave up: {text.splitlines()[0]}; rank {self._store.rank} was in {self._order.what}"
        )

    def _give_up(self, error: CommunicationError) -> None:
        if self._waits is not None:
            self._waits.record(error)
        self._watched.fail(error)
        logger.error("%s", error)
        if not isinstance(error, AbortedError):
            self.publish(error)
        aborter = Daemon(self._watched.abort_enqueued, "flagcx-abort")
        aborter.start()
        aborter.join(_ABORT_LIMIT_S)
        time.sleep(self._tick_s)
        if self._order.inside:
            here = f"rank {self._store.rank} is still inside NCCL {_ABORT_LIMIT_S:g} s after the abort"
            self._leave(f"{here}: {error}")

    def publish(self, error: CommunicationError) -> None:
        """Lets the other ranks know that this one gave up."""
        try:
            reason = isinstance(error, MismatchError), error.peer, str(error)
            self._store.set("nccl/reason", json.dumps(reason).encode())
            self._store.add("nccl/failures", 1)
        except FlagcxError:
            logger.debug("the store is closed; the other ranks find out by themselves")
