"""Says why a rank waits: ranks that have waited long leave notes for each other in the store.

A rank that has waited nearly ``Config.explain_wait_s`` notes which call of which communicator it is in, and
for which rank it waits. After that time it follows the notes of the others from rank to rank, and warns once.
The notes count the calls of both kinds too: so two ranks find that one of them calls with NumPy arrays, and
the other one with arrays on GPUs. Short waits cost nothing.

The rank's page shows its waits too, to ``flagcx status``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flagcx.bootstrap.clock import ActiveClock
from flagcx.bootstrap.store import Store
from flagcx.bootstrap.store_state import NOTES
from flagcx.errors import ArgumentError, CommunicationError, FlagcxError, MismatchError, PeerTimeoutError

logger = logging.getLogger("flagcx")

ON_HOST, ON_GPU = "NumPy arrays", "arrays on GPUs"
IN_MESSAGES = "sends and receives"
_KINDS = ON_HOST, ON_GPU
_NOTES = *_KINDS, IN_MESSAGES
"""A rank may wait for a message while a collective that it has started waits too, so each has a note."""
_REFUSAL = "refusal"
_NOTE = 0.8
"""The part of ``after_s`` after which a note is left, so that notes are there when they are looked for."""
_EARLY_S, _LATEST_S = 0.1, 0.5
"""The length of a wait with NumPy arrays at which a rank looks whether others make their first call with
arrays on GPUs; again after twice that time, and so on, at last in steps of the latter."""
_SOON_S = 0.6
"""How long a rank that has found ranks with arrays of the other kind leaves these to find it too."""
_POLL_S = 0.25
_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*)(?!\d|, \d| of the job)")
_MARGIN_S = 0.5
_SHOW_S = 0.5
"""The length of a wait from which on the rank's page shows it."""

Note = Mapping[str, Any]


class Waits:
    """The long waits of one rank in one communicator.

    Args:
        store: The communicator's part of the store.
        name: What the communicator is called in messages.
        after_s: When a wait is long, in seconds.
        timeout_s: When it ends in an error, in seconds.

    Attributes:
        name: What the communicator is called in messages.
        after_s: When a wait is long, in seconds.
        calls: For each kind of array, what returns how many calls of all ranks this rank has made.
        shown: What the rank's page shows of the communicator; None where the rank has no page.
        waiting: Ranks of this communicator that waited for others themselves, when a wait was last
            explained.
        culprit: The rank of this communicator that waited for no rank then, if there was one.
        examine: Raises if a rank has given up, where the transport for NumPy arrays knows.
    """

    def __init__(self, store: Store, name: str, after_s: float, timeout_s: float = math.inf) -> None:
        self.name, self.after_s, self.rank, self.size = name, after_s, store.rank, store.size
        self._note_s = min(_NOTE * after_s, timeout_s / 2)
        self._grace_s = min(after_s, timeout_s) - self._note_s + _MARGIN_S
        whole, self._ranks = store.in_job()
        self._store, self._notes = store, whole.scoped(NOTES, self._ranks)
        self._me = self._ranks[self.rank]
        self.calls: dict[str, Callable[[], int]] = dict.fromkeys(_KINDS, int)
        self.examine: Callable[[], object] = lambda: None
        self.waiting: set[int] = set()
        self.culprit: int | None = None
        self._looks: dict[str, int] = {}
        self._early_s = _EARLY_S
        self.shown = None if whole.page is None else whole.page.add(name, self._ranks)
        self._showing: dict[str, Note] = {}
        self.offer("counts", lambda: {kind: count() for kind, count in self.calls.items()})

    def show(self, **fields: Any) -> None:
        """Shows something of the communicator on the rank's page."""
        if self.shown is not None:
            self.shown.set(**fields)

    def offer(self, name: str, source: Callable[[], Any]) -> None:
        """Says where the flight recorder gets something from, such as the last calls."""
        if self.shown is not None:
            self.shown.sources[name] = source

    def record(self, error: BaseException) -> None:
        """Writes the job's flight record after an error. An error of flagcx's own then says where it is.

        It says before what the ranks that it names are called in the job, where that is something else.
        """
        if isinstance(error, CommunicationError) and (names := self._in_job(str(error))):
            error.args = (f"{error}; {names}", *error.args[1:])
        where = "" if self.shown is None else self.shown.record(error)
        if where and isinstance(error, CommunicationError) and where not in str(error):
            error.args = (f"{error} ({where})", *error.args[1:])

    def _in_job(self, text: str) -> str:
        """The ranks that a text names, as the job calls them; empty where it calls them the same."""
        if self._is_alike():
            return ""
        named = {int(number) for group in _RANKS.findall(text) for number in group.split(", ")}
        names = [f"rank {q} is rank {self._ranks[q]} of the job" for q in sorted(named) if q < self.size]
        told = f"in communicator {self.name} {', '.join(names)}"
        return told if names and told not in text else ""

    def close(self) -> None:
        """Shows the communicator no more."""
        if self.shown is not None:
            self.shown.close()

    def due_s(self, kind: str) -> float:
        """The length of a wait at which to look into it next, in seconds."""
        looks = self._looks.get(kind)
        if not looks:
            return min(self._early_s, self._note_s) if self._is_early(kind) else self._note_s
        # Every look at GPUs brings messages of all ranks; a rank that comes later looks by itself.
        return self.after_s * (1 << looks - 1 if kind == ON_GPU else looks)

    def look(self, kind: str, call: str, peer: int | None, waited_s: float, late: bool = False) -> str:
        """Explains a wait that is long, now and then.

        Args:
            kind: The arrays of the call, ``ON_HOST`` or ``ON_GPU``; or ``IN_MESSAGES``.
            call: The call, in words.
            peer: The rank that is waited for; None where all ranks have come to the call.
            waited_s: How long this rank has waited so far, in seconds.
            late: Whether the wait is about to end in an error, which the explanation shall complete.

        Returns:
            Which rank waits for which, after a semicolon; empty where nothing is said now.

        Raises:
            MismatchError: A rank calls with arrays of the other kind.
        """
        if waited_s >= _SHOW_S and kind not in self._showing:
            target = None if peer is None else self._ranks[peer]
            self._showing[kind] = {"call": call, "for": target, "since": time.monotonic() - waited_s}
            self.show(waits=dict(self._showing))
        if not late and waited_s < self.due_s(kind):
            return ""
        early = self._is_early(kind) and not late and waited_s < self._note_s
        if early and not self._others_join_gpus():
            return ""
        looks = self._looks[kind] = self._looks.get(kind, 0) + 1
        try:
            self._leave(kind, call, peer, waited_s)
            if looks == 1:
                self._notes.add(kind, 1)
            if kind != IN_MESSAGES:
                self._meet_other_kind(kind, call, _SOON_S if early else self._grace_s)
            chain = self._chain(self._ranks[peer]) if peer is not None and (looks == 2 or late) else ""
        except MismatchError:
            raise
        except FlagcxError:
            return ""  # the store is closed, or a rank died: the rank that waits finds out by itself
        if chain and not late:
            logger.warning(
                "%s has waited %.3g s for %s in %s of communicator %s%s",
                *(self._name(self._me), waited_s, self._name(self._ranks[peer or 0]), call, self.name, chain),
            )
        return chain

    def end(self, kind: str) -> None:
        """Takes the note of a wait back that is over."""
        if kind == ON_HOST:
            self._early_s = _EARLY_S
        if self._showing.pop(kind, None):
            self.show(waits=dict(self._showing))
        if self._looks.pop(kind, 0):
            try:
                self._notes.delete(f"{self._me}/{kind}")
            except FlagcxError:
                logger.debug("the store is closed, and the note of a wait with it")

    def note_refusal(self, error: ArgumentError) -> None:
        """Leaves a note that this rank has refused its next call, for peers that wait for it in that call.

        It may make the call with other arrays, which makes the note out of date.
        """
        counts = {kind: count() for kind, count in self.calls.items()}
        note = {"communicator": self.name, "counts": counts, "why": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(FlagcxError):  # the store is closed
            self._notes.set(f"{self._me}/{_REFUSAL}", json.dumps(note).encode())

    def _refusal(self, rank: int) -> str:
        """The reason why a rank does not come to this rank's call, if it has refused its own."""
        note = self._read(rank, _REFUSAL)
        if note is None or note["communicator"] != self.name:
            return ""
        in_that_call = any(count() == note["counts"][kind] + 1 for kind, count in self.calls.items())
        return f": it has refused its call ({note['why']})" if in_that_call else ""

    def join_gpus(self, limit_s: float) -> None:
        """Waits until every rank has come to its first call with an array on a GPU.

        The other exchanges of that call keep the store from this rank's other threads, so they come later.

        Raises:
            MismatchError: A rank calls with NumPy arrays instead.
            AbortedError: A rank has given up.
            PeerTimeoutError: A rank did not come within ``limit_s``.
        """
        self.calls[ON_GPU] = lambda: 1
        clock, call = ActiveClock(), "the first call with arrays on GPUs"
        self._store.set(f"gpu/{self.rank}", b"1")
        for peer in range(self.size):
            while not self._has_come(peer, min(_POLL_S, limit_s, self.after_s)):
                self.examine()
                waited_s = clock.now()
                if not self._looks.get(ON_GPU):  # at once: others may wait in a call with NumPy arrays
                    self._looks[ON_GPU] = 1
                    self._leave(ON_GPU, call, peer, waited_s)
                    self._notes.add(ON_GPU, 1)
                self._meet_other_kind(ON_GPU, call, _SOON_S)
                late = waited_s > limit_s
                chain = self.look(ON_GPU, call, peer, waited_s, late)
                if late:
                    raise PeerTimeoutError(
                        f"rank {peer} did not come to {call} within {limit_s:g} s{chain}; every rank must "
                        f"make the same calls (FLAGCX_INIT_TIMEOUT_S sets the time-out)",
                        peer=peer,
                    )
        self.end(ON_GPU)

    def _has_come(self, peer: int, limit_s: float) -> bool:
        try:
            self._store.get(f"gpu/{peer}", limit_s)
        except PeerTimeoutError as late:
            return late.peer is not None  # a rank has left, which the next exchange says
        return True

    def _leave(self, kind: str, call: str, peer: int | None, waited_s: float) -> None:
        counts = {one: count() for one, count in self.calls.items()}
        target = None if peer is None else self._ranks[peer]
        place = {"communicator": self.name, "ranks": self._ranks, "since": time.time() - waited_s}
        note = {**place, "call": call, "for": target, "counts": counts}
        self._notes.set(f"{self._me}/{kind}", json.dumps(note).encode())

    def _read(self, rank: int, kind: str) -> Note | None:
        try:
            note: Note = json.loads(self._notes.get(f"{rank}/{kind}", 0.0))
        except PeerTimeoutError:
            return None
        return note

    def _is_early(self, kind: str) -> bool:
        """Whether this rank waits with NumPy arrays while others may make the job's first call on GPUs.

        Not so for work that was started: a rank may come to it later than to its next call.
        """
        if kind != ON_HOST or self._looks.get(kind) or self.calls[ON_GPU]():
            return False
        return threading.current_thread() is threading.main_thread()

    def _others_join_gpus(self) -> bool:
        """Whether a rank waits in a call with arrays on GPUs."""
        self._early_s += min(self._early_s, _LATEST_S)
        try:
            return self._notes.add(ON_GPU, 0) > 0
        except FlagcxError:
            return False  # the store is closed, or a rank died: this rank finds out by itself

    def _meet_other_kind(self, kind: str, call: str, grace_s: float) -> None:
        """Compares the kinds of calls; before this rank ends with an error, the others find it too."""
        try:
            self._compare_kinds(kind, call)
        except MismatchError:
            time.sleep(min(grace_s, self._grace_s))
            raise

    def _compare_kinds(self, kind: str, call: str) -> None:
        """Raises if another rank waits in a call of the other kind, before it has come to this rank's."""
        other = ON_GPU if kind == ON_HOST else ON_HOST
        if not self._notes.add(other, 0):
            return
        made, not_yet = self.calls[kind](), self.calls[other]()
        for peer, rank in enumerate(self._ranks):
            note = self._read(rank, other) if rank != self._me else None
            if note is None or note["communicator"] != self.name:
                continue
            if made > note["counts"][kind] and not_yet < note["counts"][other]:
                raise MismatchError(
                    f"ranks disagree: rank {self.rank} calls with {kind} ({call}), and rank {peer} with "
                    f"{other} ({note['call']}); every rank must make the same calls in the same order, with "
                    f"arrays of the same kind: cupy.asarray(x) takes a NumPy array to the GPU, x.get() a "
                    f"CuPy array to the host",
                    peer=peer,
                )

    def _chain(self, rank: int) -> str:
        """For which rank the one that is waited for waits, and so on from rank to rank."""
        seen, text, self.waiting, self.culprit = [self._me], "", set(), None
        if rank == self._me:
            return f"; {self._name(rank)} waits for itself"
        while rank not in seen:
            seen.append(rank)
            note = next((n for kind in _NOTES if (n := self._read(rank, kind)) is not None), None)
            if note is None:
                self.culprit = self._ranks.index(rank) if rank in self._ranks else None
                return f"{text}; {self._name(rank)} itself waits for no rank{self._refusal(rank)}"
            text += f"; {self._name(rank)} waits"
            if rank in self._ranks:
                self.waiting.add(self._ranks.index(rank))
            if note["for"] is None:
                return f"{text} in {note['call']} of communicator {note['communicator']}"
            text += f" for {self._name(note['for'])} in {note['call']} of communicator {note['communicator']}"
            rank = note["for"]
        return f"{text}, so none of them can go on"

    def _name(self, rank: int) -> str:
        return f"rank {rank}" if rank < self.size and self._is_alike() else f"rank {rank} of the job"

    def _is_alike(self) -> bool:
        return tuple(self._ranks) == tuple(range(self.size))
