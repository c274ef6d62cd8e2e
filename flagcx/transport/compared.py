"""The debug mode: before each collective call, the ranks tell each other what they are about to do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flagcx.bootstrap.clock import ActiveClock
from flagcx.bootstrap.store import Store
from flagcx.errors import AbortedError, FlagcxError, MismatchError, PeerDiedError, PeerTimeoutError
from flagcx.transport.base import HOST, Call, Plan, TransportContext
from flagcx.transport.waits import ON_GPU, ON_HOST

_POLL_S = 0.05


class Comparing:
    """A transport whose calls run only if all ranks are about to make the same one. That is slow.

    What it does not do itself it leaves to the transport inside.

    Args:
        transport: What carries the arrays.
        store: The communicator's part of the store.
        context: The communicator.
    """

    def __init__(self, transport: Any, store: Store, context: TransportContext) -> None:
        self._inner, self._store = transport, store
        self._waits, self._timeout_s = context.waits, context.config.timeout_s
        self._kind = ON_HOST if transport.kind == HOST else ON_GPU
        self._place, self._calls = f"check/{transport.kind}", 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(self, call: Call) -> Plan:
        """Compiles a call that is compared before each run."""
        return Compared(self._inner.compile(call), self, call)

    def compile_rows(self, rows: Any, call: Call | None, add: Callable[[], Plan]) -> Plan:
        """Compiles an all-reduce of rows; where ``add`` compiles its plan here, that is compared already."""
        plan = self._inner.compile_rows(rows, call, add)
        fused = call is not None and getattr(plan, "call", None) is call
        return Compared(plan, self, call) if fused and call is not None else plan

    def compare(self, words: str) -> None:
        """Compares this rank's next call with those of all others.

        Raises:
            MismatchError: On every rank, if they differ.
            AbortedError: A rank gave up.
            PeerTimeoutError: A rank makes no call. Named.
        """
        store, number = self._store, self._calls
        self._calls = number + 1
        store.set(f"{self._place}/{number}/{store.rank}", words.encode())
        told = {q: words if q == store.rank else self._told(q, number, words) for q in range(store.size)}
        if number:  # all have come to this call, so none looks at the one before any more
            store.delete(f"{self._place}/{number - 1}/{store.rank}")
        check_alike(told)

    def _told(self, peer: int, number: int, words: str) -> str:
        store, waits, clock = self._store, self._waits, ActiveClock()
        while True:
            try:  # in short waits, since each keeps the store from this rank's other threads
                told = store.get(f"{self._place}/{number}/{peer}", _POLL_S).decode()
                break
            except PeerTimeoutError as late_or_left:
                if late_or_left.peer == peer:
                    raise PeerDiedError(
                        f"rank {peer} has left the job, and rank {store.rank} is about to make {words}; "
                        f"every rank must make the same calls",
                        peer=peer,
                    ) from None
            waited_s = clock.now()
            late, why = waited_s > self._timeout_s, ""
            if store.add(f"{self._place}/failures", 0):
                reason, culprit = json.loads(store.get(f"{self._place}/reason", _POLL_S))
                raise AbortedError(f"another rank gave up: {reason}", peer=culprit)
            if waits is not None:
                why = waits.look(self._kind, words, peer, waited_s, late)
            if late:
                raise PeerTimeoutError(
                    f"rank {peer} did not come to call {number} within {self._timeout_s:g} s (rank "
                    f"{store.rank} is about to make {words}{why}); every rank must make the same calls "
                    f"(FLAGCX_TIMEOUT_S sets the time-out)",
                    peer=peer,
                )
        if waits is not None:
            waits.end(self._kind)
        return told

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers, those too that wait to compare, why this rank cannot go on."""
        try:
            self._store.set(f"{self._place}/reason", json.dumps([reason, culprit]).encode())
            self._store.add(f"{self._place}/failures", 1)
        except FlagcxError:
            pass  # the store is gone; the others find out by themselves
        self._inner.abort(reason, culprit)


class Compared:
    """A plan that runs only if all ranks are about to make the same call.

    Args:
        plan: The plan.
        comparing: Compares the calls.
        call: What it does.
    """

    def __init__(self, plan: Plan, comparing: Comparing, call: Call) -> None:
        self._plan, self._comparing, self._words = plan, comparing, call.describe()

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Runs the call; see ``Plan.run``, and ``Comparing.compare``."""
        self._comparing.compare(self._words)
        self._plan.run(sendbuf, recvbuf)


def comparing(transport: Any, context: TransportContext) -> Any:
    """Compares the calls of a transport before they run, where the setting asks for it."""
    if context.config.debug != "check" or context.store is None or context.size == 1:
        return transport
    return Comparing(transport, context.store, context)


def check_alike(told: Mapping[int, str]) -> None:
    """Raises MismatchError that names the call of each rank of ``told``, unless all are alike."""
    counts = Counter(told.values())
    if len(counts) == 1:
        return
    usual = counts.most_common(1)[0][0]
    odd = next(rank for rank, what in told.items() if what != usual)
    lines = "\n".join(f"  rank {rank}: {what}" for rank, what in told.items())
    raise MismatchError(
        f"the ranks call different operations, first rank {odd}; all must make the same call:\n{lines}",
        peer=odd,
    )


def compare_last(told: Mapping[int, Sequence[tuple[int, str]]]) -> None:
    """Compares the last calls of ranks.

    Args:
        told: For each rank the number and the words of its last calls.

    Raises:
        MismatchError: They differ in a call that all of them still know. The first one is named.
    """
    calls = {rank: dict(few) for rank, few in told.items()}
    for number in sorted(set.intersection(*(set(few) for few in calls.values()))):
        check_alike({rank: few[number] for rank, few in calls.items()})


def compare_marks(told: Mapping[int, Sequence[tuple[int, int]]]) -> None:
    """Compares what stands for all calls of ranks so far.

    Args:
        told: For each rank its marks: (number of calls, what stands for all calls up to it).

    Raises:
        MismatchError: They differ. The calls that are known to agree, and those that do not, are numbered.
    """
    marks = {rank: dict(few) for rank, few in told.items()}
    agreed = 0
    for number in sorted(set.intersection(*(set(few) for few in marks.values()))):
        counts = Counter(few[number] for few in marks.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            odd = next(rank for rank, few in marks.items() if few[number] != usual)
            raise MismatchError(
                f"the ranks made different calls, first rank {odd}, somewhere between their calls {agreed:,} "
                f"and {number:,}; every rank must make the same calls in the same order. FLAGCX_DEBUG=check "
                f"names the call",
                peer=odd,
            )
        agreed = number
