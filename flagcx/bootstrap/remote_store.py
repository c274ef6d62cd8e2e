"""A rank's end of a store that another process serves."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

from flagcx.bootstrap import wire
from flagcx.bootstrap.clock import TICK_S, ActiveClock
from flagcx.bootstrap.greeting import greet, open_connection
from flagcx.bootstrap.store import Store
from flagcx.bootstrap.store_server import StoreServer
from flagcx.bootstrap.store_state import StoreAnswer, StoreRequest
from flagcx.bootstrap.takeover import Standby
from flagcx.descriptors import occupy_standard_streams
from flagcx.errors import (
    AbortedError,
    BootstrapError,
    CommunicationError,
    CommunicatorError,
    PeerDiedError,
    PeerTimeoutError,
)
from flagcx.forks import abandon_in_children

_MARGIN_S, _SILENT_MARGIN_S = 5.0, 0.1
"""How long an answer may take beyond the request's own time-out; and where the last one never came."""
_LONGEST_OPEN_S = 10.0
_MAX_ANSWER_NBYTES = (1 << 31) - 1


class RemoteStore(Store):
    """A rank's connection to a ``StoreServer``.

    Args:
        address: The server's address.
        authkey: The key.
        rank: This rank.
        size: How many ranks the job has.
        timeout_s: How long to wait for the server, in seconds.

    Attributes:
        address: The server's address.
        authkey: The key.

    Raises:
        BootstrapError: Nothing listens there, or it is no store of this key, or it refused this rank.
    """

    def __init__(self, address: str, authkey: bytes, rank: int, size: int, timeout_s: float = 10.0) -> None:
        self.rank, self.size = rank, size
        self.authkey = authkey
        self._lock = threading.Lock()
        self._clock = ActiveClock()
        self._number = 0
        self._owner = os.getpid()
        self._broken: Exception | None = None
        self._silent = False
        self._dead: dict[int, str] = {}
        self._failed: set[int] = set()
        self._host: dict[str, Any] = {}
        self._standby: Standby | None = None
        self._connect(address, timeout_s)

    def _connect(self, address: str, timeout_s: float) -> None:
        self.address, deadline = address, self._clock.now() + timeout_s
        self._connection = open_connection(address, min(timeout_s, _LONGEST_OPEN_S), self.rank)
        self._poller = select.poll()
        self._poller.register(self._connection.fileno(), select.POLLIN)
        abandon_in_children(self)
        try:
            self._greet(self.authkey, deadline)
        except BaseException:
            self._drop()
            raise

    def stand_by(self, timeout_s: float) -> None:
        if self._host["host_rank"] is None:
            return
        address = b""
        if self._host["host_rank"] != self.rank:
            self._standby = Standby(self.rank, self.size, _own_address(self._connection), self.authkey)
            address = self._standby.server.address.encode()
        addresses = [other.decode() for other in self.exchange("standby", address, timeout_s)]
        if self._standby is not None:
            self._standby.addresses = addresses

    def recover(self, timeout_s: float) -> None:
        self.lost()  # reads what has come
        with self._lock:
            if self._broken is None:
                return
            expelled = isinstance(self._broken, AbortedError)
            if self._standby is None or expelled or os.getpid() != self._owner:
                raise self._broken
            self._drop()
            self._find_host(self._standby, self._clock.now() + timeout_s)
            self._broken = None

    def _find_host(self, standby: Standby, deadline: float) -> None:
        """Connects to the first rank that lives, which may be this one; see takeover.py."""
        for rank, address in enumerate(standby.addresses):
            if not address:
                self._dead.setdefault(rank, "it ran the store, and left")
            if rank in self._dead:
                continue
            if rank == self.rank and not standby.serves:
                standby.serve(self._dead)
            try:
                return self._connect(address, max(deadline - self._clock.now(), 0.1))
            except RefusedError:
                raise
            except BootstrapError:
                if self._clock.now() >= deadline:
                    raise PeerTimeoutError(
                        f"rank {rank}, the first that may serve the store now that {self._host['host']} is "
                        f"gone, did not come in time; every rank that is left must call comm.shrink()",
                        peer=rank,
                        late=(rank,),
                    ) from None
                self._dead.setdefault(rank, "nothing listens at its address any more")
        raise self._broken or BootstrapError("no rank is left to serve the store")

    @property
    def server(self) -> StoreServer | None:
        """The server that this rank has taken over, if it has."""
        return self._standby.server if self._standby is not None and self._standby.serves else None

    def expel(self, rank: int, why: str) -> None:
        if self._broken is None and rank != self._host["host_rank"]:
            return super().expel(rank, why)
        with self._lock:  # nothing serves the store now: ``recover`` passes it on
            if self._broken is None:
                self._leave_word(StoreRequest("expel", why, amount=rank))
                self._broken = self._loss()
            self._dead.setdefault(rank, why)

    def _leave_word(self, request: StoreRequest) -> None:
        """Sends a request that the server reads should its process, which stands still, ever wake."""
        self._number += 1
        with contextlib.suppress(OSError):
            self._connection.send_bytes(wire.write_request(self._number, request))

    def lost(self) -> dict[int, str]:
        # The thread that holds the lock reads the notices too; a poll object serves one thread at a time.
        if self._lock.acquire(blocking=False):
            try:
                while self._broken is None and self._poller.poll(0):
                    with contextlib.suppress(CommunicationError, BootstrapError):
                        self._read(self._clock.now() + _MARGIN_S, None)
            finally:
                self._lock.release()
        return dict(self._dead)

    def silent(self) -> int | None:
        return self._host["host_rank"] if self._silent else None

    def has_failed(self, rank: int) -> bool:
        return rank in self._failed

    def check_open(self) -> None:
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        self._close_with({"kind": "leave", "detail": self.blames()})

    def abort(self, reason: str, lives_on: bool = False, returns: bool = False) -> None:
        self._close_with({"kind": "abort", "detail": reason, "lives_on": lives_on, "returns": returns})

    def _close_with(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._connection.closed:
                return
            if self._broken is None and os.getpid() == self._owner:
                with contextlib.suppress(OSError):
                    self._connection.send_bytes(wire.pack(message))
            self._drop()
            if self._standby is not None:
                self._standby.close()

    def abandon(self) -> None:
        """Closes the connection: a child's copy would keep it open after its rank was killed."""
        self._lock = threading.Lock()  # The parent's other threads do not exist here to release it.
        self._drop()

    def _drop(self) -> None:
        self._poller = select.poll()
        self._connection.close()

    def _submit(self, request: StoreRequest) -> StoreAnswer:
        with self._lock:
            if self._connection.closed:
                forked = os.getpid() != self._owner
                raise CommunicatorError(
                    f"the store of rank {self.rank} is closed" + (" in a forked child" if forked else "")
                )
            if self._broken is not None:
                raise self._broken
            self._number += 1
            # If sending fails, the server is gone, and its last message is still there to be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._connection.send_bytes(wire.write_request(self._number, request))
            margin_s = _SILENT_MARGIN_S if self._silent else _MARGIN_S
            deadline = self._clock.now() + request.timeout_s + margin_s
            while True:
                header, body = self._read(deadline, request)
                if header.get("number") == self._number:  # else a notice, or a late answer to an earlier call
                    return wire.read_answer(header, body)

    def _read(self, deadline: float, request: StoreRequest | None) -> tuple[dict[str, Any], bytes]:
        """Reads a message; if it is a notice, notes which rank died or that the store is closed."""
        self._silent = not self._is_readable(deadline)
        if self._silent:
            raise PeerTimeoutError(
                f"the store, which {self._host['host']} runs, does not answer "
                f"{request.kind if request else 'a call'} of rank {self.rank}; is that process stopped?",
                peer=self._host["host_rank"],
                late=() if self._host["host_rank"] is None else (self._host["host_rank"],),
            )
        try:
            header, body = wire.unpack(self._connection.recv_bytes(_MAX_ANSWER_NBYTES))
        except (EOFError, OSError, wire.MalformedError):
            self._broken = self._loss()
            raise self._broken from None
        if header.get("notice") in ("died", "failed"):
            self._dead.setdefault(header["rank"], header["detail"])
            if header["notice"] == "failed":
                self._failed.add(header["rank"])
        elif header.get("notice") == "expelled":
            self._broken = AbortedError(f"the other ranks go on without rank {self.rank}: {header['detail']}")
            raise self._broken
        elif header.get("notice") == "closed":
            host = self._host["host"]
            self._broken = BootstrapError(
                f"the store is closed: {host}, which ran it, has ended", rank=self._host["host_rank"]
            )
            raise self._broken
        return header, body

    def _is_readable(self, deadline: float) -> bool:
        """Waits for the server. (Time in which this process is stopped counts for nothing.)"""
        while True:
            left_s = max(0.0, deadline - self._clock.now())
            if self._poller.poll(min(left_s, TICK_S) * 1000):
                return True
            if not left_s:
                return False

    def _loss(self) -> Exception:
        host, host_rank = self._host["host"], self._host["host_rank"]
        if host_rank is None:
            return BootstrapError(f"{host}, which ran the store, is gone")
        how = "it ran the store, and its connection ended"
        self._dead.setdefault(host_rank, how)
        return PeerDiedError(f"{host} died ({how})", peer=host_rank)

    def _greet(self, authkey: bytes, deadline: float) -> None:
        claim = {"rank": self.rank, "size": self.size, "pid": os.getpid()}
        header, _ = greet(self.address, authkey, claim, self._connection, lambda: self._hear(deadline))
        if "error" in header:
            kind = BootstrapError if header.get("again") else RefusedError
            raise kind(f"the store turned rank {self.rank} away: {header['error']}", rank=self.rank)
        self._host = header
        self.elastic = bool(header.get("elastic"))

    def _hear(self, deadline: float) -> bytes:
        if not self._is_readable(deadline):
            raise BootstrapError(
                f"the server at {self.address} sends nothing; is it a flagcx store?", rank=self.rank
            )
        try:
            return self._connection.recv_bytes(wire.MAX_GREETING_NBYTES)
        except (EOFError, OSError):
            raise BootstrapError(
                f"the store at {self.address} closed the connection of rank {self.rank}: the key "
                f"(FLAGCX_STORE_KEY) is not this job's, or the store is just closing",
                rank=self.rank,
            ) from None


class RefusedError(BootstrapError):
    """The job's own store refused this rank, so there is no use in trying again."""


def _own_address(connection: Connection) -> str:
    """This host's address in a connection; "" in one that stays on one host."""
    occupy_standard_streams()
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        own = link.getsockname()[0] if link.family != socket.AF_UNIX else ""
    return f"[{own}]" if ":" in own else own
