"""A rank's end of the store, through which the ranks of a job find each other and exchange small values.

``Store`` is the interface. ``RemoteStore`` (in remote_store.py) asks a ``StoreServer``; ``LocalStore`` is the
store of a job of one rank, without a socket; ``Store.scoped`` gives a view for part of the ranks. Values are
bytes: a store unpickles nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from flagcx.bootstrap.rank_page import RankPage
from flagcx.bootstrap.store_server import StoreServer
from flagcx.bootstrap.store_state import StoreAnswer, StoreRequest, StoreState
from flagcx.errors import (
    AbortedError,
    ArgumentError,
    BootstrapError,
    CommunicationError,
    PeerDiedError,
    PeerTimeoutError,
    ResourceError,
)

__all__ = ["LocalStore", "Store", "StoreServer"]

MAX_VALUE_NBYTES = 32 << 20
_FOREVER_S = 1e8


class Store:
    """A rank's connection to its job's store. A context manager; ``close()`` may be called again.

    All methods may be called from any thread of the rank; calls of one rank run one after another. When a
    rank of the job has died, every call of the others raises ``PeerDiedError``.

    Attributes:
        rank: This rank.
        size: How many ranks share the store.
        elastic: Whether lost ranks may be started again: then the ranks that join agree on which are there.
        blames: The failure of a peer that is why this rank will leave, in words, so that its launcher and the
            other ranks blame the peer; "" where there is none.
        page: The page on which this rank shows where it is, if it has one; of the whole job's store alone.
    """

    rank: int
    size: int
    elastic: bool = False
    blames: Callable[[], str] = staticmethod(lambda: "")
    page: RankPage | None = None

    def set(self, key: str, value: bytes) -> None:
        """Sets a key, and wakes the ranks that wait for it.

        Args:
            key: The key.
            value: Its value, at most 32 MiB.
        """
        self._ask(StoreRequest("set", _text(key), _value(value)))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Returns the value of a key, waiting for it if need be.

        Raises:
            PeerTimeoutError: No rank set it in time. Names the ranks that are not connected.
            PeerDiedError: A rank died meanwhile.
        """
        return self._ask(StoreRequest("get", _text(key), timeout_s=_seconds(timeout_s))).values[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0, and returns the sum. A counter is no key of ``get``."""
        return self._ask(StoreRequest("add", _text(key), amount=int(amount))).number

    def delete(self, key: str) -> bool:
        """Removes a key or counter. Returns whether it was there."""
        return bool(self._ask(StoreRequest("delete", _text(key))).number)

    def barrier(self, name: str, timeout_s: float) -> None:
        """Waits until all ranks have come to the barrier of this name, which may be used again.

        Raises:
            PeerTimeoutError: Ranks did not come in time. Names them.
            PeerDiedError: A rank died meanwhile.
            CommunicationError: A rank has left and will not come.
        """
        self.exchange(name, b"", timeout_s)

    def exchange(self, name: str, value: bytes, timeout_s: float) -> list[bytes]:
        """Gives every rank every rank's value, in one round trip.

        Args:
            name: What the exchange is called, the same on all ranks; by a call's name, such as "fc.init()",
                messages mean the call. It may be used again afterwards.
            value: This rank's contribution.
            timeout_s: How long to wait for the others, in seconds.

        Returns:
            The contributions in the order of the ranks.

        Raises:
            PeerTimeoutError: Ranks did not come in time. Names them.
            PeerDiedError: A rank died meanwhile.
            CommunicationError: A rank has left and will not come.

        Example:
            >>> LocalStore().exchange("names", b"a", timeout_s=1)
            [b'a']
        """
        request = StoreRequest("exchange", _text(name), _value(value), timeout_s=_seconds(timeout_s))
        return list(self._ask(request).values)

    def agree(self, name: str, value: bytes, timeout_s: float) -> dict[int, bytes]:
        """Finds out which ranks are left, alike on all of them: waits until each has come or is gone.

        Args:
            name: What the agreement is called, the same on all ranks. It may be used again afterwards.
            value: This rank's contribution.
            timeout_s: How long to wait for ranks that live, in seconds.

        Returns:
            The contribution of each rank that is left, by rank, in order.

        Raises:
            PeerTimeoutError: Ranks that live did not come in time. Names them.

        Example:
            >>> LocalStore().agree("left", b"a", timeout_s=1)
            {0: b'a'}
        """
        request = StoreRequest("agree", _text(name), _value(value), timeout_s=_seconds(timeout_s))
        answer = self._ask(request)
        left = [rank for rank in range(self.size) if rank not in answer.ranks]
        return dict(zip(left, answer.values, strict=True))

    def expel(self, rank: int, why: str) -> None:
        """Goes on without a rank that lives: for all others it is as if it had died.

        Every call of its own store raises ``AbortedError`` from now on, should it wake.
        """
        self._ask(StoreRequest("expel", _text(why), amount=self.in_job()[1][rank]))

    def lost(self) -> dict[int, str]:
        """The ranks that are known to have died or to have failed, and how. Costs about a microsecond."""
        return {}

    def has_failed(self, rank: int) -> bool:
        """Whether a rank that is ``lost`` lives: it could not join, and may try again."""
        return False

    def silent(self) -> int | None:
        """The rank that serves the store, if the last request to it had no answer; else None."""
        return None

    def check(self) -> None:
        """Raises if a rank is known to have died. Costs about a microsecond: for loops that wait.

        Raises:
            PeerDiedError: A rank died.
            AbortedError: A rank could not join.
        """
        for rank, how in self.lost().items():
            if self.has_failed(rank):
                raise AbortedError(f"{self._name(rank)} gave up: {how}", peer=rank)
            raise PeerDiedError(f"{self._name(rank)} died ({how})", peer=rank)
        self.check_open()

    def check_open(self) -> None:
        """Raises if what runs the store is gone, or this rank was expelled."""

    def scoped(self, prefix: str, ranks: Sequence[int] | None = None) -> Store:
        """A view whose keys begin with ``prefix``, shared by some of the ranks.

        Args:
            prefix: The text that its keys begin with.
            ranks: Ranks of this store that share the view, in the order of their ranks in it; all of them
                by default. The view ignores deaths of other ranks.

        Returns:
            The view. Closing it does nothing; it ends with this store.

        Raises:
            ArgumentError: ``ranks`` has duplicates, unknown ranks or lacks this rank.
        """
        return _View(self, _text(prefix), tuple(range(self.size)) if ranks is None else tuple(ranks))

    def stand_by(self, timeout_s: float) -> None:
        """Gets ready to serve the store, should the rank that does be lost. All ranks call it."""

    def recover(self, timeout_s: float) -> None:
        """Goes on with another rank that serves the store, if the one that did is gone. Nothing is kept.

        Args:
            timeout_s: How long to wait for a rank that lives, in seconds.

        Raises:
            PeerTimeoutError: It did not come.
            BootstrapError: What ran the store is gone, and no rank may take its place.
        """

    def in_job(self) -> tuple[Store, tuple[int, ...]]:
        """The store that this one is a view of, and each rank's number in it."""
        return self, tuple(range(self.size))

    def close(self) -> None:
        """Leaves the store in good order."""

    def abort(self, reason: str, lives_on: bool = False, returns: bool = False) -> None:
        """Leaves the store because this rank failed: the others are told, as if it had died.

        Args:
            reason: What happened, such as "it raised ValueError: no such file".
            lives_on: Whether the process lives on without its main thread, so that its launcher must end it.
            returns: Whether this rank only could not join, and may try again, as all may that are told.
        """
        self.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} rank={self.rank} size={self.size}>"

    def _ask(self, request: StoreRequest) -> StoreAnswer:
        """Makes a request and returns the answer; raises the error that its fault stands for."""
        answer = self._submit(request)
        if answer.fault:
            self._fail(request, answer)
        return answer

    def _submit(self, request: StoreRequest) -> StoreAnswer:
        raise NotImplementedError

    def _name(self, rank: int) -> str:
        return f"rank {rank}"

    def _fail(self, request: StoreRequest, answer: StoreAnswer) -> NoReturn:
        kind = {"exchange": "exchange or barrier", "agree": "agreement"}.get(request.kind, request.kind)
        what = request.key if request.key.endswith("()") else f"{kind} {request.key!r}"
        names = ", ".join(self._name(rank) for rank in answer.ranks)
        peer = answer.ranks[0] if answer.ranks else None
        if answer.fault == "died":
            raise PeerDiedError(
                f"{names} died ({answer.detail}), so {what} on {self._name(self.rank)} cannot go on; look "
                f"for the first error in that rank's output",
                peer=peer,
            )
        if answer.fault == "failed":
            raise AbortedError(
                f"{names} gave up: {answer.detail}; all ranks may call fc.init() again", peer=peer
            )
        if answer.fault == "left" and answer.detail:
            raise AbortedError(
                f"{names} has left the job because a peer failed ({answer.detail}), so {what} on "
                f"{self._name(self.rank)} cannot go on"
            )
        if answer.fault == "left":
            raise CommunicationError(
                f"{names} has left the job (closed its communicator or ended) and will not take part in "
                f"{what} on {self._name(self.rank)}; every rank must make the same calls",
                peer=peer,
            )
        if answer.fault == "timeout":
            whole, late = self.in_job()[1], answer.ranks if request.kind in ("exchange", "agree") else ()
            text = self._lateness(request, what, names)
            raise PeerTimeoutError(text, peer=peer, late=tuple(whole[rank] for rank in late))
        if answer.fault == "full":
            raise ResourceError(
                f"{what}: the store is full ({answer.detail}); delete keys that are done with"
            )
        raise BootstrapError(f"{self._name(self.rank)} is already waiting in {what}", rank=self.rank)

    def _lateness(self, request: StoreRequest, what: str, names: str) -> str:
        if request.kind in ("exchange", "agree"):
            return (
                f"{names} did not come to {what} within {request.timeout_s:g} s; every rank must make the "
                f"same calls, and slow ones need a longer time-out (FLAGCX_INIT_TIMEOUT_S for init)"
            )
        reason = f"not connected: {names}" if names else "all ranks are connected and none has set it"
        return f"key {request.key!r} was not set within {request.timeout_s:g} s ({reason})"


class LocalStore(Store):
    """The store of a job of one rank: no server, no socket."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._state = StoreState(1)
        self._state.present.add(0)
        self._lock = threading.Lock()

    def _submit(self, request: StoreRequest) -> StoreAnswer:
        with self._lock:
            # No other rank could set a missing key, so waiting for it is pointless.
            answers = self._state.submit(0, request, None, 0.0) or self._state.expire(math.inf)
        return answers[0][1]


class _View(Store):
    """Part of another store: a prefix for the keys, and some of the ranks."""

    def __init__(self, parent: Store, prefix: str, ranks: tuple[int, ...]) -> None:
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < parent.size for rank in ranks):
            raise ArgumentError(
                f"ranks must be different ranks from 0 to {parent.size - 1}, got {list(ranks)}"
            )
        if parent.rank not in ranks:
            raise ArgumentError(f"rank {parent.rank} is not one of the ranks of the view, {list(ranks)}")
        self._parent, self._prefix, self._ranks = parent, prefix, ranks
        self.rank, self.size = ranks.index(parent.rank), len(ranks)

    def lost(self) -> dict[int, str]:
        lost = self._parent.lost()
        return {self._ranks.index(rank): how for rank, how in lost.items() if rank in self._ranks}

    def has_failed(self, rank: int) -> bool:
        return self._parent.has_failed(self._ranks[rank])

    def silent(self) -> int | None:
        host = self._parent.silent()
        return self._ranks.index(host) if host in self._ranks else None

    def check_open(self) -> None:
        with contextlib.suppress(PeerDiedError):  # it may be of another part
            self._parent.check_open()

    def recover(self, timeout_s: float) -> None:
        self._parent.recover(timeout_s)

    def in_job(self) -> tuple[Store, tuple[int, ...]]:
        whole, ranks = self._parent.in_job()
        return whole, tuple(ranks[rank] for rank in self._ranks)

    def _submit(self, request: StoreRequest) -> StoreAnswer:
        group = range(self.size) if request.group is None else request.group
        ranks = tuple(self._ranks[rank] for rank in group)
        answer = self._parent._submit(replace(request, key=self._prefix + request.key, group=ranks))
        return replace(answer, ranks=tuple(self._ranks.index(rank) for rank in answer.ranks))

    def _name(self, rank: int) -> str:
        above = self._parent._name(self._ranks[rank])
        return above if self._ranks[rank] == rank else f"rank {rank} ({above} of the whole job)"


def _text(key: str) -> str:
    if not isinstance(key, str):
        raise ArgumentError(f"a key must be a str, got {type(key).__name__}")
    return key


def _value(value: bytes) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"a value must be bytes, got {type(value).__name__}")
    if len(value) > MAX_VALUE_NBYTES:
        raise ArgumentError(f"a value may have at most {MAX_VALUE_NBYTES} bytes, got {len(value)}")
    return bytes(value)


def _seconds(timeout_s: float) -> float:
    if not 0 <= timeout_s <= math.inf:
        raise ArgumentError(f"a time-out must be a number of seconds from 0 up, got {timeout_s!r}")
    return min(float(timeout_s), _FOREVER_S)
