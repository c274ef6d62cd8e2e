"""NumPy arrays between any number of hosts, by MPI's messages: any schedule, step by step.

MPI only carries the messages. What is sent to whom, and the adding up, is the schedule's, so results are the
same as on one host. Every wait has a deadline: a rank that waits for long says in the store which call it is
in, and reads what the others say, so that a call that differs, or a rank that is absent, gets named.

The tag of a message comes from the words of its call. Messages of different calls therefore never meet, and
a rank that called something else is late instead of wrong.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.arguments import host_array, result_array
from flagcx.bootstrap.store import Store
from flagcx.config import Config
from flagcx.dtypes import DType, ReduceOp, check_for_host
from flagcx.errors import (
    AbortedError,
    BootstrapError,
    CommunicationError,
    FlagcxError,
    MismatchError,
    MissingDependencyError,
    PeerTimeoutError,
)
from flagcx.schedule.model import Buffer, Copy, Local, Recv, Send, Span, Step
from flagcx.transport.base import Call, Plan
from flagcx.transport.shared_memory.reduction import Scaled, divide_by

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


class MpiTransport:
    """Carries NumPy arrays between ranks that one MPI job started, on any hosts.

    Args:
        rank: This rank.
        size: Number of ranks.
        exchange: Sends bytes to all ranks and returns everybody's, in rank order.
        config: Settings; ``timeout_s`` matters here.
        store: The ranks' part of the store.

    Raises:
        MissingDependencyError: mpi4py is not installed, on any of the ranks.
        BootstrapError: MPI did not start all of the ranks.
    """

    name = "mpi"

    def __init__(
        self, rank: int, size: int, exchange: Callable[[bytes], list[bytes]], config: Config, store: Store
    ) -> None:
        self.rank, self.size = rank, size
        mpi, problem = _find_mpi()
        cards = [
            json.loads(card) for card in exchange(json.dumps(problem or mpi.COMM_WORLD.Get_rank()).encode())
        ]
        problems = [(q, each) for q, each in enumerate(cards) if isinstance(each, str)]
        if problems:
            raise MissingDependencyError(f"rank {problems[0][0]}: {problems[0][1]}")
        if len(set(cards)) != size:
            raise BootstrapError(
                f"MPI knows the {size} ranks of this job as its ranks {cards}: it did not start all of them; "
                f"start them with the mpirun that mpi4py was built for"
            )
        self._mpi, world = mpi, mpi.COMM_WORLD
        # A communicator of our own: messages of the user's MPI calls never meet ours.
        self._comm = world.Create_group(world.Get_group().Incl(cards), tag=_TRANSFER_TAG)
        self._most_tags = min(self._comm.Get_attr(self._mpi.TAG_UB), 1 << 30)
        self.watch = Watch(store, config.timeout_s)

    def compile(self, call: Call) -> Plan:
        """See ``transport.base.Transport``.

        Raises:
            OperationError: The operation is a kernel for GPUs.
        """
        check_for_host(call.op)
        what = call.describe()
        plan = _Steps(self, call, 2 + zlib.crc32(what.encode()) % (self._most_tags - 2), what)
        scale = None if call.op is None else call.op.scale
        return plan if scale is None else Scaled(plan, scale, call.in_place)

    def transfer(
        self, sends: Sequence[tuple[np.ndarray, int]], receives: Sequence[tuple[np.ndarray, int]]
    ) -> None:
        """Sends and receives at once; see ``transport.base.Transport``."""
        requests: list[Any] = []
        for array, peer in receives:
            requests += self.post(False, array.reshape(-1), peer, _TRANSFER_TAG)
        for array, peer in sends:
            requests += self.post(True, array.reshape(-1), peer, _TRANSFER_TAG)
        what = f"send to {[p for _, p in sends]} and receive from {[p for _, p in receives]}"
        self.finish(requests, what, alike=False)

    def post(self, sends: bool, array: np.ndarray, peer: int, tag: int) -> list[Any]:
        """Begins a message, in pieces where it is very long. The array stays as it is until all is done."""
        raw = array.view(np.uint8)
        begin = self._comm.Isend if sends else self._comm.Irecv
        starts = range(0, max(raw.nbytes, 1), _PIECE_NBYTES)
        return [begin([raw[s : s + _PIECE_NBYTES], self._mpi.BYTE], peer, tag) for s in starts]

    def finish(self, requests: list[Any], what: str, alike: bool = True) -> None:
        """Waits until all messages have come and gone.

        Args:
            requests: The messages.
            what: The call, for messages.
            alike: Whether all ranks make this very call.

        Raises:
            CommunicationError: A rank died, gave up, called something else or came too late.
        """
        test, start = self._mpi.Request.Testall, time.monotonic()
        look_at = start + _LOOK_S
        try:
            while not test(requests):
                now = time.monotonic()
                if now >= look_at:
                    self.watch.look(what, now - start, alike)
                    look_at = now + _LOOK_S
                if now - start > _SPIN_S:
                    time.sleep(_SLEEP_S)
                else:
                    os.sched_yield()
        except self._mpi.Exception as error:
            raise CommunicationError(f"rank {self.rank}: MPI failed in {what}: {error}") from error

    def take(self, array: Any, what: str, writable: bool) -> np.ndarray:
        """Takes a caller's array. See ``flagcx.arguments.host_array``."""
        return host_array(array, what, writable=writable)

    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Takes or makes the array of a result. See ``flagcx.arguments.result_array``."""
        return result_array(out, what, shape, dtype)

    def empty(self, shape: tuple[int, ...] | int, dtype: np.dtype) -> np.ndarray:
        """An uninitialised array. Hosts share no memory, so it is like any other."""
        return np.empty(shape, dtype)

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers that this rank cannot go on, and whose fault it is."""
        self.watch.tell(reason, culprit)

    def close(self) -> None:
        """Nothing to do: MPI takes its communicator back when all ranks end. Freeing it needs all of them."""


class Watch:
    """What a rank looks at while it waits, and what it lets the others see.

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

    def look(self, what: str, waited_s: float, alike: bool) -> None:
        """Looks whether there is a reason to give up.

        Args:
            what: The call that waits.
            waited_s: For how long it has, in seconds.
            alike: Whether all ranks make this very call.

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
            seen = self._ask(what, alike, late)
        except PeerTimeoutError:
            # The store's messages may share a slow link with those that are waited for.
            seen = {}
        self._compare(seen, what, alike)
        if late:
            raise self._lateness(seen, what)

    def _ask(self, what: str, alike: bool, late: bool) -> dict[int, tuple[int, str]]:
        """Says where this rank is, and reads where others are: the numbers and words of their calls."""
        store = self._store
        if store.add("mpi/failures", 0):
            reason, culprit = json.loads(store.get("mpi/reason", 1.0))
            here = f"rank {store.rank} waited in {what}"
            raise AbortedError(f"another rank gave up: {reason}; {here}", peer=culprit)
        if self._told != (self.calls, alike):
            store.set(f"mpi/call/{store.rank}", json.dumps([self.calls, what if alike else ""]).encode())
            self._told = self.calls, alike
        others = self._others(store.size) if late else self._next(store.size)
        return {rank: self._call_of(rank) for rank in others}

    def _compare(self, seen: dict[int, tuple[int, str]], what: str, alike: bool) -> None:
        for peer, (number, other) in seen.items():
            if number == self.calls and alike and other not in ("", what):
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

    def _others(self, size: int) -> list[int]:
        return [q for q in range(size) if q != self._store.rank]

    def _next(self, size: int) -> list[int]:
        """The ranks to ask this time: a few of many, and others the next time."""
        others = self._others(size)
        self._asked %= len(others)
        chosen = (others + others)[self._asked : self._asked + min(_ASKED, len(others))]
        self._asked += len(chosen)
        return chosen

    def _call_of(self, rank: int) -> tuple[int, str]:
        """The call in which another rank waits, as far as it said so; "" for one in which others differ."""
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


Part = tuple[int, int, int]
"""A buffer, and the first and last element in it."""


@dataclass(frozen=True, slots=True)
class _Messages:
    """One step: what is sent and received at once, and what is done with it afterwards.

    Attributes:
        sends: Parts, and whom they go to.
        receives: Parts, who sends what comes there, and whether it is added to what is there, in this order.
        local: Whether to reduce, the source and the target of each piece of local work.
    """

    sends: tuple[tuple[Part, int], ...]
    receives: tuple[tuple[Part, int, bool], ...]
    local: tuple[tuple[bool, Part, Part], ...]


class _Steps:
    """One call, compiled.

    Args:
        transport: What carries the messages.
        call: The call.
        tag: The tag of its messages.
        what: The call in words.
    """

    def __init__(self, transport: MpiTransport, call: Call, tag: int, what: str) -> None:
        self._transport, self._tag, self._what = transport, tag, what
        program = call.program()
        self._layout = call.layout(program)
        self._dtype = call.dtype.numpy
        self._ufunc = None if call.op is None else call.op.ufunc
        self._divide = _divider(call.op, call.dtype, call.schedule.size)
        self._steps = [self._compile(step) for step in program.steps]
        self._scratch = np.empty(self._layout.count(Buffer.SCRATCH), self._dtype)
        longest = max(
            (sum(b - a for (_, a, b), _, adds in s.receives if adds) for s in self._steps), default=0
        )
        self._arrived = np.empty(longest, self._dtype)

    def _part(self, span: Span) -> Part:
        return (int(span.buffer), *self._layout.slice(span))

    def _compile(self, step: Step) -> _Messages:
        sends = tuple((self._part(t.src), t.peer) for t in step.transfers if isinstance(t, Send))
        receives = tuple(
            (self._part(t.dst), t.peer, not isinstance(t, Recv))
            for t in step.transfers
            if not isinstance(t, Send)
        )
        return _Messages(sends, receives, tuple(self._local(work) for work in step.local))

    def _local(self, work: Local) -> tuple[bool, Part, Part]:
        return not isinstance(work, Copy), self._part(work.src), self._part(work.dst)

    def run(self, given: np.ndarray | None, result: np.ndarray | None) -> None:
        """See ``transport.base.Plan``."""
        self._transport.watch.calls += 1
        empty = self._scratch[:0]
        arrays = [empty if a is None else a.reshape(-1) for a in (given, result, self._scratch)]
        for step in self._steps:
            self._run(step, arrays)
        if self._divide is not None and result is not None:
            self._divide(arrays[Buffer.OUTPUT])

    def _run(self, step: _Messages, arrays: Sequence[np.ndarray]) -> None:
        post, tag, requests, taken = self._transport.post, self._tag, [], 0
        arrived = []
        for (buffer, a, b), peer, adds in step.receives:
            target = arrays[buffer][a:b]
            if adds:
                data, taken = self._arrived[taken : taken + b - a], taken + b - a
                arrived.append((target, data))
            requests += post(False, data if adds else target, peer, tag)
        for (buffer, a, b), peer in step.sends:
            requests += post(True, arrays[buffer][a:b], peer, tag)
        if requests:
            self._transport.finish(requests, self._what)
        for target, data in arrived:
            self._ufunc(target, data, target)  # type: ignore[misc]
        for reduces, (x, x0, x1), (y, y0, y1) in step.local:
            source, target = arrays[x][x0:x1], arrays[y][y0:y1]
            if reduces:
                self._ufunc(target, source, target)  # type: ignore[misc]
            else:
                target[...] = source


def _divider(op: ReduceOp | None, dtype: DType, size: int) -> Callable[[np.ndarray], object] | None:
    return divide_by(size, dtype) if op is not None and op.average else None
