"""Checks on the other ranks while one waits, tells them where it is, and explains why it waits.

A rank that waits for half a second writes into the store which call it is in, and reads what the others have
written, so that calls that differ, and a rank that is absent, are named. What lasts longer is explained as on
one host; see ``flagcx.transport.waits``.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flagcx.bootstrap.clock import ActiveClock
from flagcx.bootstrap.store import Store
from flagcx.errors import (
    AbortedError,
    CommunicationError,
    FlagcxError,
    MismatchError,
    PeerDiedError,
    PeerTimeoutError,
)
from flagcx.transport.at_exit import call_at_exit
from flagcx.transport.network.message import SAME_CALLS
from flagcx.transport.waits import IN_MESSAGES, ON_HOST, Waits

_SPIN_S = 2e-3
_SLEEP_S = 50e-6
_LOOK_S = 0.25
_TELL_S, _MOST_BETWEEN_S = 0.5, 10.0
"""When a wait is first told to the others, and how long it is at most until they are asked again."""
_ASKED = 16
"""Ranks that are asked each time what they are doing."""
_REASON_S = 1.0
_ENDS, _FAILURE = "network/ends", 1 << 32
"""Counts the ranks that have closed and, added to that, those that gave up."""
_END_S, _END_POLL_S = 0.05, 1e-3


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank has told the others.

    Attributes:
        calls: How many collective calls it had begun.
        what: The call that it waits in, in words; empty for one of two ranks.
        waits: Whether it waits.
        closed: Whether it makes no further call.
    """

    calls: int = -1
    what: str = ""
    waits: bool = False
    closed: bool = False


class Watch:
    """What one rank knows of the others.

    Args:
        store: The ranks' part of the store.
        timeout_s: How long a call may wait, in seconds.
        waits: What explains long waits, or None.

    Attributes:
        calls: How many collective calls this rank has begun.
    """

    def __init__(self, store: Store, timeout_s: float, waits: Waits | None = None) -> None:
        self._store, self._timeout_s, self._waits = store, timeout_s, waits
        self.calls = 0
        self._own, self._asked, self._ask_at_s = _Told(), 0, _TELL_S
        self._gave_up = ""
        self._at_exit = call_at_exit(self.close)
        if waits is not None:
            waits.calls[ON_HOST] = lambda: self.calls

    def look(self, what: str, peer: int, waited_s: float, shared: bool, noticed: bool = False) -> None:
        """Checks whether there is a reason to give up.

        Args:
            what: The call that waits.
            peer: The rank that it waits for.
            waited_s: For how long it has, in seconds.
            shared: Whether all ranks make this very call.
            noticed: Whether a rank has let this one know that it gave up.

        Raises:
            CommunicationError: A rank died, gave up, called something else or came too late.
        """
        if self._gave_up:
            raise AbortedError(f"this rank gave up: {self._gave_up}", peer=self._store.rank)
        self._store.check()
        late = waited_s > self._timeout_s
        if waited_s < 2 * _LOOK_S:
            self._ask_at_s = _TELL_S  # another wait has begun
        seen: dict[int, _Told] = {}
        if late or noticed or waited_s >= self._ask_at_s:
            self._ask_at_s = waited_s + min(waited_s, _MOST_BETWEEN_S)
            try:
                seen = self._ask(what, shared, late)
                self._compare(seen, what, shared)
                closed = seen if shared else {q: told for q, told in seen.items() if q == peer}
                self._examine_closed(closed, what, shared)
            except PeerTimeoutError:
                seen = {}  # the store's messages may share a slow link with those that are waited for
        why = ""
        if self._waits is not None:
            why = self._waits.look(ON_HOST, what, peer, waited_s, late)
        if late:
            raise self._lateness(seen, what, peer, waited_s, shared, why)

    def look_at_message(self, what: str, peer: int, waited_s: float, late: bool, noticed: bool) -> None:
        """Checks whether there is a reason to give up a message between this rank and another one.

        Args:
            what: "a send" or "a receive".
            peer: The other rank.
            waited_s: For how long a caller has waited for it, in seconds; 0 where none does.
            late: Whether the time-out has passed.
            noticed: Whether a rank has let this one know that it gave up.

        Raises:
            CommunicationError: A rank died, ended, gave up or came too late.
        """
        self._store.check()
        try:
            if noticed or late:
                self.check_failures(what)
            self._examine_closed({peer: self._told_by(peer)}, what)
        except PeerTimeoutError:
            pass  # as in ``look``
        why = ""
        if self._waits is not None and waited_s:
            why = self._waits.look(IN_MESSAGES, what, peer, waited_s, late)
        if late:
            raise self._lateness({}, what, peer, waited_s, False, why)

    def end_message(self) -> None:
        """A caller's wait for a message is over."""
        if self._waits is not None:
            self._waits.end(IN_MESSAGES)

    def end(self) -> None:
        """A wait is over: the others are told so if they were told of it."""
        if self._waits is not None:
            self._waits.end(ON_HOST)
        if self._own.waits:
            try:
                self._tell(_Told(self.calls, self._own.what))
            except FlagcxError:
                return  # the next call says so

    def _tell(self, told: _Told) -> None:
        record = [told.calls, told.what, told.waits, told.closed]
        self._store.set(f"network/call/{self._store.rank}", json.dumps(record).encode())
        self._own = told

    def _ask(self, what: str, shared: bool, late: bool) -> dict[int, _Told]:
        """Says where this rank is, and reads where others are."""
        store = self._store
        self.check_failures(what)
        told = _Told(self.calls, what if shared else "", True)
        if self._own != told:
            self._tell(told)
        others = [q for q in range(store.size) if q != store.rank]
        if not late:  # a few of many, in turns
            self._asked %= max(len(others), 1)
            others = (others + others)[self._asked : self._asked + min(_ASKED, len(others))]
            self._asked += len(others)
        return {rank: self._told_by(rank) for rank in others}

    def explain_failure(self, what: str, cut_off: Sequence[int], engine: str) -> CommunicationError | None:
        """Why the engine failed: a rank died, which it may know a moment before the store does, or ended.

        Args:
            what: What this rank was in.
            cut_off: The ranks that the engine cannot reach any more.
            engine: Its name.
        """
        end = time.monotonic() + _REASON_S
        here = f"rank {self._store.rank} was in {what}"
        while True:
            for rank, how in self._store.lost().items():
                return PeerDiedError(f"rank {rank} died ({how}); {here}", peer=rank)
            try:
                self.check_failures(what)
                self._examine_closed({rank: self._told_by(rank) for rank in cut_off}, what)
            except (AbortedError, PeerDiedError) as told:
                return told
            except FlagcxError:
                return None
            if time.monotonic() >= end:
                break
            time.sleep(_LOOK_S / 10)
        for rank in cut_off:
            return PeerDiedError(f"rank {rank} died ({engine} has lost it); {here}", peer=rank)
        return None

    def has_lost(self) -> bool:
        """Whether a rank has died or given up, or the store is lost."""
        try:
            self._store.check()
            return self._store.add(_ENDS, 0) >= _FAILURE
        except PeerTimeoutError:
            return False  # the store is slow
        except FlagcxError:
            return True

    def check_failures(self, what: str) -> None:
        """Raises AbortedError if a rank has given up."""
        store = self._store
        if store.add(_ENDS, 0) >= _FAILURE:
            rank, reason, culprit = json.loads(store.get("network/reason", _REASON_S))
            raise AbortedError(
                f"rank {rank} gave up: {reason}; rank {store.rank} was in {what}",
                peer=rank if culprit is None else culprit,
            )

    def _told_by(self, rank: int) -> _Told:
        try:
            return _Told(*json.loads(self._store.get(f"network/call/{rank}", 1e-3)))
        except PeerTimeoutError:
            return _Told()

    def _compare(self, seen: dict[int, _Told], what: str, shared: bool) -> None:
        for peer, told in seen.items():
            if shared and told.waits and told.calls == self.calls and told.what not in ("", what):
                raise MismatchError(
                    f"ranks disagree on call {self.calls}: rank {self._store.rank} called {what}, rank "
                    f"{peer} called {told.what}; {SAME_CALLS}",
                    peer=peer,
                )

    def _examine_closed(self, seen: dict[int, _Told], what: str, shared: bool = False) -> None:
        """Raises PeerDiedError if a rank of ``seen`` makes no further call, or not this one of all ranks."""
        for q, told in seen.items():
            if told.closed and (told.calls < self.calls or not shared):
                self.check_failures(
                    what
                )  # it may have given up, and then closed, since that was looked at last
                raise PeerDiedError(
                    f"rank {q} has ended or closed its communicator while rank {self._store.rank} waited in "
                    f"{what}; every rank must make the same calls",
                    peer=q,
                )

    def _lateness(
        self, seen: dict[int, _Told], what: str, peer: int, waited_s: float, shared: bool, why: str
    ) -> PeerTimeoutError:
        """Names the ranks that keep the rest waiting: those that do not wait in this call themselves.

        Raises:
            AbortedError: A rank has given up since the others were asked, which it may have done before this.
        """
        with suppress(PeerTimeoutError):
            self.check_failures(what)
        there = {q for q, told in seen.items() if told.waits and told.calls >= self.calls}
        suspects = [q for q in seen if q not in there] if shared else []
        host = self._store.silent()  # then nothing is known of the others, who may all wait for that rank
        suspects = suspects or [peer if host is None else host]
        if why and self._waits is not None:
            culprit = self._waits.culprit  # for which the peer waits itself
            suspects = [q for q in suspects if q not in self._waits.waiting] or suspects
            suspects = suspects if shared or culprit is None else [culprit]
        names = f"rank{'s' * (len(suspects) > 1)} {', '.join(map(str, suspects))}"
        return PeerTimeoutError(
            f"{names} did not take part within {waited_s:.1f} s (rank {self._store.rank} waits for rank "
            f"{peer} in {what}{why}); it is stopped, computing, or stuck elsewhere. A longer time-out: "
            f"fc.init(timeout_s=...) or FLAGCX_TIMEOUT_S",
            peer=peer if peer in suspects else suspects[0],
        )

    def give_up(self, reason: str, culprit: int | None) -> None:
        """Tells the others, and a thread that waits, why this rank cannot go on. The first reason stays."""
        store, self._gave_up = self._store, reason
        try:
            if not store.add("network/failing", 1) > 1:
                told = [store.rank, reason.splitlines()[0][:500], culprit]
                store.set("network/reason", json.dumps(told).encode())
            store.add(_ENDS, _FAILURE)
        except FlagcxError:
            return  # the store is gone; the others find out by themselves

    def check_end(self) -> None:
        """Looks whether a rank gave up in the calls that end here, for a moment, if not all have closed yet.

        Raises:
            AbortedError: A rank did.
        """
        end = time.monotonic() + _END_S
        try:
            ends = self._store.add(_ENDS, 1)
            while self.calls and ends % _FAILURE < self._store.size and time.monotonic() < end:
                self.check_failures("close()")
                time.sleep(_END_POLL_S)
                ends = self._store.add(_ENDS, 0)
            self.check_failures("close()")
        except AbortedError:
            raise
        except FlagcxError:
            return  # the store is closed: the job is ending

    def all_have_ended(self) -> bool:
        """Whether no rank makes a further call, or the job is over."""
        try:
            return self._store.add(_ENDS, 0) % _FAILURE >= self._store.size
        except FlagcxError:
            return True

    def close(self) -> None:
        """Tells the other ranks that this one makes no further call."""
        atexit.unregister(self._at_exit)
        try:
            self._tell(_Told(self.calls, closed=True))
        except FlagcxError:
            return


class Wait:
    """One wait, from the first look at messages that are not done until they are.

    Args:
        watch: What is known of the other ranks.
        what: The call that all ranks make, in words; empty for one of two ranks.
        noticed: Whether a rank has let this one know that it gave up.
    """

    def __init__(self, watch: Watch, what: str, noticed: Callable[[], bool]) -> None:
        self._watch, self._what, self._noticed = watch, what, noticed
        self._clock, self._since_s = ActiveClock(), 0.0
        now = time.monotonic()
        self._look_at, self._sleep_at = now + _LOOK_S, now + _SPIN_S

    def pause(self, held_up: Callable[[], tuple[int, bool]]) -> None:
        """Waits a little.

        Args:
            held_up: Returns the rank that is waited for, and whether to receive.

        Raises:
            CommunicationError: There is a reason to give up; see ``Watch.look``.
        """
        now = time.monotonic()
        if now < self._sleep_at:
            os.sched_yield()
            return
        noticed = self._noticed()
        if now >= self._look_at or noticed:
            peer, receives = held_up()
            what = self._what or f"a {'receive' if receives else 'send'}"
            self._watch.look(what, peer, self._clock.now() - self._since_s, bool(self._what), noticed)
            self._look_at = now + _LOOK_S
        time.sleep(_SLEEP_S)

    def moved(self) -> None:
        """A part has come or gone, so that the wait for the rest begins now."""
        self._watch.end()
        self._since_s = self._clock.now()
        self._look_at = time.monotonic() + _LOOK_S

    def end(self) -> None:
        """The wait is over."""
        self._watch.end()
