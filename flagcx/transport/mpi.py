"""NumPy arrays between any number of hosts, by MPI's messages: any schedule, step by step.

MPI only carries the messages. The schedule says which rank sends what and where it is added up, so results
are the same as on one host. Every wait has a deadline: a rank that waits for long writes into the store
which call it is in, and reads what the others have written, so that a call that differs, or a rank that is
absent, gets named.

The tag of a message comes from the words of its call. Messages of different calls therefore never meet, and
a rank that called something else is late instead of wrong.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from functools import partial
from typing import Any

import numpy as np

from flagcx.bootstrap.store import Store
from flagcx.errors import (
    AbortedError,
    BootstrapError,
    CommunicationError,
    FlagcxError,
    MismatchError,
    MissingDependencyError,
    PeerTimeoutError,
)
from flagcx.transport.average import averaging
from flagcx.transport.base import Call, Plan, TransportContext
from flagcx.transport.steps import HostTransport, Messages, MessageSteps

_PIECE_NBYTES = 1 << 30
"""MPI counts in ints."""
_SPIN_S = 2e-3
_SLEEP_S = 50e-6
_LOOK_S = 0.25
_TELL_S, _MOST_BETWEEN_S = 0.5, 10.0
"""When a wait is first told to the others, and how long it is at most until they are asked again."""
_TRANSFER_TAG = 1
_ASKED = 16
"""Ranks that are asked each time what they are doing."""


def _find_mpi() -> tuple[Any, str]:
    """The module ``mpi4py.MPI``, which starts MPI when it is first imported; or why it cannot be had."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return None, (
            f"NumPy arrays travel between hosts by MPI, which needs mpi4py ({error}): "
            f"pip install 'flagcx[mpi]', and start the ranks with its mpirun (or srun)"
        )
    return MPI, ""


class MpiTransport(HostTransport):
    """Carries NumPy arrays between ranks that one MPI job started, on any hosts.

    Args:
        context: The communicator, which must have a store; ``config.timeout_s`` matters here.

    Raises:
        MissingDependencyError: mpi4py is not installed, on any of the ranks.
        BootstrapError: MPI did not start all of the ranks.
    """

    name = "mpi"
    takes_cores = False

    def __init__(self, context: TransportContext) -> None:
        self.rank, self.size = context.rank, context.size
        mpi, problem = _find_mpi()
        mine = json.dumps(problem or mpi.COMM_WORLD.Get_rank()).encode()
        cards = [json.loads(card) for card in context.exchange(mine)]
        problems = [(q, each) for q, each in enumerate(cards) if isinstance(each, str)]
        if problems:
            raise MissingDependencyError(f"rank {problems[0][0]}: {problems[0][1]}")
        if len(set(cards)) != self.size:
            raise BootstrapError(
                f"MPI knows the {self.size} ranks of this job as its ranks {cards}: it did not start all of "
                f"them; start them with the mpirun that mpi4py was built for"
            )
        self._mpi, world = mpi, mpi.COMM_WORLD
        # A communicator of flagcx's own: messages of the user's MPI calls never meet those of flagcx.
        self._comm = world.Create_group(world.Get_group().Incl(cards), tag=_TRANSFER_TAG)
        self._most_tags = min(self._comm.Get_attr(self._mpi.TAG_UB), 1 << 30)
        assert context.store is not None
        self._watch = Watch(context.store, context.config.timeout_s)

    def _compile(self, call: Call) -> Plan:
        what = call.describe()
        tag = 2 + zlib.crc32(what.encode()) % (self._most_tags - 2)
        exchange = partial(self._exchange, what=what, tag=tag)
        return averaging(call, lambda call: MessageSteps(call, self.scratch, exchange, self._watch.enter))

    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Sends and receives at once; see ``Transport.transfer``."""
        what = f"send to {[p for _, p in sends]} and receive from {[p for _, p in receives]}"
        self._exchange(sends, receives, what, _TRANSFER_TAG, shared=False)

    def _exchange(
        self, sends: Messages, receives: Messages, what: str, tag: int, shared: bool = True
    ) -> None:
        """Sends and receives at once.

        Args:
            sends: Arrays, and the rank each goes to.
            receives: Arrays, and the rank whose data each gets.
            what: The call, for messages.
            tag: The tag of the call's messages.
            shared: Whether all ranks make this very call.
        """
        requests: list[Any] = []
        for array, peer in receives:
            requests += self._post(False, array.reshape(-1), peer, tag)
        for array, peer in sends:
            requests += self._post(True, array.reshape(-1), peer, tag)
        if requests:
            self._finish(requests, what, shared)

    def _post(self, sends: bool, array: np.ndarray, peer: int, tag: int) -> list[Any]:
        """Begins a message, in pieces where it is very long. The array stays as it is until all is done."""
        raw = array.view(np.uint8)
        begin = self._comm.Isend if sends else self._comm.Irecv
        starts = range(0, max(raw.nbytes, 1), _PIECE_NBYTES)
        return [begin([raw[s : s + _PIECE_NBYTES], self._mpi.BYTE], peer, tag) for s in starts]

    def _finish(self, requests: list[Any], what: str, shared: bool) -> None:
        """Waits until all messages have come and gone.

        Args:
            requests: The messages.
            what: The call, for messages.
            shared: Whether all ranks make this very call.

        Raises:
            CommunicationError: A rank died, gave up, called something else or came too late.
        """
        test, start = self._mpi.Request.Testall, time.monotonic()
        look_at = start + _LOOK_S
        try:
            while not test(requests):
                now = time.monotonic()
                if now >= look_at:
                    self._watch.look(what, now - start, shared)
                    look_at = now + _LOOK_S
                if now - start > _SPIN_S:
                    time.sleep(_SLEEP_S)
                else:
                    os.sched_yield()
        except self._mpi.Exception as error:
            raise CommunicationError(f"rank {self.rank}: MPI failed in {what}: {error}") from error

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers why this rank cannot go on; see ``Transport.abort``."""
        self._watch.tell(reason, culprit)

    def close(self) -> None:
        """Does nothing: MPI takes its communicator back when all ranks end. To free it needs all of them."""


class Watch:
    """Checks on the other ranks while this one waits, and tells them where it is.

    Args:
        store: The ranks' part of the store.
        timeout_s: How long a call may wait, in seconds.

    Attributes:
        calls: How many collective calls this rank has begun.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self.calls = 0
        self._told, self._asked, self._ask_at_s = (-1, True), 0, _TELL_S

    def enter(self) -> None:
        """Counts a collective call that begins."""
        self.calls += 1

    def look(self, what: str, waited_s: float, shared: bool) -> None:
        """Checks whether there is a reason to give up.

        Args:
            what: The call that waits.
            waited_s: For how long it has, in seconds.
            shared: Whether all ranks make this very call.

        Raises:
            CommunicationError: A rank died, gave up, called something else or came too late.
        """
        self._store.check()
        late = waited_s > self._timeout_s
        if waited_s < 2 * _LOOK_S:
            self._ask_at_s = _TELL_S  # another wait has begun
        if waited_s < self._ask_at_s and not late:
            return
        self._ask_at_s = waited_s + min(waited_s, _MOST_BETWEEN_S)
        try:
            seen = self._ask(what, shared, late)
        except PeerTimeoutError:
            # The store's messages may share a slow link with those that are waited for.
            seen = {}
        self._compare(seen, what, shared)
        if late:
            raise self._lateness(seen, what)

    def _ask(self, what: str, shared: bool, late: bool) -> dict[int, tuple[int, str]]:
        """Says where this rank is, and reads where others are: the numbers and words of their calls."""
        store = self._store
        if store.add("mpi/failures", 0):
            reason, culprit = json.loads(store.get("mpi/reason", 1.0))
            here = f"rank {store.rank} waited in {what}"
            raise AbortedError(f"another rank gave up: {reason}; {here}", peer=culprit)
        if self._told != (self.calls, shared):
            store.set(f"mpi/call/{store.rank}", json.dumps([self.calls, what if shared else ""]).encode())
            self._told = self.calls, shared
        others = [q for q in range(store.size) if q != store.rank]
        if not late:  # a few of many, in turns
            self._asked %= len(others)
            others = (others + others)[self._asked : self._asked + min(_ASKED, len(others))]
            self._asked += len(others)
        return {rank: self._call_of(rank) for rank in others}

    def _compare(self, seen: dict[int, tuple[int, str]], what: str, shared: bool) -> None:
        for peer, (number, other) in seen.items():
            if number == self.calls and shared and other not in ("", what):
                raise MismatchError(
                    f"ranks disagree on call {number}: rank {self._store.rank} called {what}, rank {peer} "
                    f"called {other}; every rank must make the same calls in the same order, with the same "
                    f"count, dtype and operation",
                    peer=peer,
                )

    def _lateness(self, seen: dict[int, tuple[int, str]], what: str) -> PeerTimeoutError:
        behind = [q for q, (number, _) in seen.items() if number < self.calls]
        names = ", ".join(f"rank {q}" for q in behind) or "a rank that is further on already"
        return PeerTimeoutError(
            f"rank {self._store.rank} waited in {what} (call {self.calls}) for {self._timeout_s:g} s, and "
            f"{names} did not come; FLAGCX_TIMEOUT_S sets the time-out",
            peer=behind[0] if behind else None,
        )

    def _call_of(self, rank: int) -> tuple[int, str]:
        """The call in which another rank waits, if it has written so; "" for one that few ranks make."""
        try:
            number, what = json.loads(self._store.get(f"mpi/call/{rank}", 1e-3))
        except PeerTimeoutError:
            return -1, ""
        return number, what

    def tell(self, reason: str, culprit: int | None) -> None:
        """Tells the other ranks that this one gives up."""
        try:
            self._store.set("mpi/reason", json.dumps([reason.splitlines()[0][:500], culprit]).encode())
            self._store.add("mpi/failures", 1)
        except FlagcxError:
            return  # The store is gone; the others find out by themselves.
