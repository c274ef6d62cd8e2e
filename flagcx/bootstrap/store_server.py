"""The store's server: one thread, one loop, and no connection that can hold up another.

Every socket is non-blocking, so a stranger that connects and says nothing, sends garbage or stops half way
costs the ranks nothing: it has ``handshake_s`` seconds to show that it knows the key, then it is cut off.

How a connection begins (sha256 proofs, both ways; see ``wire.proof``)::

    server                                      client
      | -- magic, server's nonce ----------------> |
      | <-- client's nonce, proof, {rank, size} -- |      a wrong proof: closed, without a word
      | -- proof, {"ok": host} or {"error": ...} > |      the client checks that the server knows the key

A rank that says "leave" before it closes has left in good order. A rank whose connection simply ends has
died: its kernel closes the socket within microseconds of a kill -9. All ranks that wait for it are told by
an answer, all others by a notice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from flagcx.bootstrap import wire
from flagcx.bootstrap.clock import TICK_S, ActiveClock
from flagcx.bootstrap.generations import Generations
from flagcx.bootstrap.membership import Membership
from flagcx.bootstrap.peer import Peer
from flagcx.bootstrap.sockets import format_address, is_own_user, listen, tune
from flagcx.bootstrap.store_state import NOTES, OBSERVER, Answers, StoreAnswer
from flagcx.daemon import Daemon
from flagcx.descriptors import occupy_standard_streams
from flagcx.forks import abandon_in_children

logger = logging.getLogger("flagcx")

_MAX_STRANGERS = 256


class StoreServer:
    """Serves one job's store from a daemon thread. A context manager; ``close()`` may be called again.

    Args:
        size: How many ranks the job has.
        address: Where to listen: ``host:port``, or None for an abstract Unix socket (one host; nothing is
            left on disk).
        authkey: The key that ranks must know; None makes a random one.
        host: What runs this server, as messages name it when it is gone: "rank 0", "the launcher".
        host_rank: The rank whose process runs this server, or None if no rank's does.
        handshake_s: How long a stranger has to show the key, in seconds.
        elastic: Whether the launcher may start lost ranks again; see ``Generations``.
        moves: Whether another process may be ``host_rank`` next time, and listen at the same address: once
            that rank has left, the server ends as soon as no rank is connected.

    Attributes:
        address: Where it listens, as ``RemoteStore`` takes it.
        authkey: The key.
        blaming: The ranks that left because a peer had failed.
        ended: Whether it serves no more.
        on_failure: Called, from the server's thread, with a rank that has failed and whose process lives on.

    Raises:
        BootstrapError: The address cannot be listened on.
    """

    def __init__(
        self,
        size: int,
        address: str | None = None,
        authkey: bytes | None = None,
        *,
        host: str = "the launcher",
        host_rank: int | None = None,
        handshake_s: float = 5.0,
        elastic: bool = False,
        moves: bool = False,
    ) -> None:
        self.size = size
        self.authkey = secrets.token_bytes(32) if authkey is None else authkey
        self._host: dict[str, Any] = {"host": host, "host_rank": host_rank, "elastic": elastic}
        self._handshake_s, self._moves = handshake_s, moves
        self._on_complete: Callable[[], None] | None = None
        self._listener = listen(address)
        self.address = format_address(self._listener)
        self._selector = selectors.DefaultSelector()
        self._clock = ActiveClock()
        self._waker, self._woken = socket.socketpair()
        self._calls: deque[Callable[[], object]] = deque()
        self._peers: dict[Peer, None] = {}
        self._members = Generations(size) if elastic else Membership(size)
        self.blaming: set[int] = set()
        self.on_failure: Callable[[int], object] = lambda rank: None
        self.ended = False
        self._ends_when_idle = False
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        abandon_in_children(self)

    def start(self) -> StoreServer:
        """Starts the thread. (Connections made before this wait in the listening socket's queue.)"""
        if self._thread is None and not self.ended:
            self._listener.setblocking(False)
            self._woken.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(4096))
            self._thread = Daemon(self._serve, "flagcx-store")
            self._thread.start()
        return self

    def rank_ended(self, rank: int, how: str = "") -> None:
        """Tells the store that a rank's process ended, as its launcher sees.

        Args:
            rank: The rank.
            how: "" if it ended well, otherwise what happened, such as "was killed by SIGKILL".
        """

        def tell() -> None:
            if how:
                self._lose(rank, how, returns=False)
            else:
                self._deliver(self._members.finish(rank))

        self._call(tell)

    def rank_restarts(self, rank: int, how: str) -> None:
        """Tells the store that a rank's process ended, and that its launcher is about to start it again."""
        self._call(partial(self._part_with, rank, how))  # a process that it forked may hold the connection

    def connected(self) -> list[int]:
        """The ranks that are connected now."""
        return list(self._members.connected)

    def settle(self, timeout_s: float = 5.0) -> None:
        """Waits until what ranks have sent so far is dealt with, at most ``timeout_s`` seconds."""
        settled = threading.Event()
        self._call(settled.set)
        if self._thread is not None and self._thread.is_alive():
            settled.wait(timeout_s)

    def when_complete(self, call: Callable[[], None]) -> None:
        """Has a function called once, from the server's thread, when all ranks have come (again)."""
        self._call(partial(setattr, self, "_on_complete", call))

    def close_when_idle(self) -> None:
        """Has the server end by itself as soon as no rank is connected any more."""
        self._call(partial(setattr, self, "_ends_when_idle", True))

    def linger(self, longest_s: float) -> None:
        """Serves until no rank is connected any more, at most for ``longest_s`` seconds, and ends."""
        self.close_when_idle()
        if self._thread is not None:
            self._thread.join(longest_s)
        self.close()

    def close(self) -> None:
        """Tells all connected ranks that the store is closed, and ends."""
        if self.ended or os.getpid() != self._owner:
            return
        self.ended = True
        if self._thread is None:
            self._release()
            return
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        """Closes all sockets: a child's copies would keep connections open after the server has ended."""
        self.ended = True
        self._release()

    def __enter__(self) -> StoreServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.ended else f"{len(self.connected())} of {self.size} ranks connected"
        return f"<StoreServer at {self.address}, {state}>"

    def _call(self, function: Callable[[], object]) -> None:
        """Has the server's thread call a function."""
        self._calls.append(function)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0", socket.MSG_DONTWAIT)

    # The loop. Everything below runs in the server's thread alone.

    def _serve(self) -> None:
        try:
            while not self.ended:
                for key, events in self._selector.select(self._patience_s()):
                    key.data(events)
                while self._calls:
                    self._calls.popleft()()
                now = self._clock.now()
                self._deliver(self._members.expire(now))
                for stranger in self._strangers():
                    if stranger.deadline <= now:
                        self._drop(stranger)
                if (self._ends_when_idle or self._has_moved) and not self._members.connected:
                    break
        finally:
            self.ended = True
            self._notify({"notice": "closed"}, [peer for peer in self._peers if peer.joined])
            self._release()

    @property
    def _has_moved(self) -> bool:
        return self._moves and self._members.has_left(self._host["host_rank"])

    def _patience_s(self) -> float | None:
        deadlines = [*self._members.deadlines(), *(peer.deadline for peer in self._strangers())]
        first = min(deadlines, default=math.inf)
        return None if first == math.inf else min(max(0.0, first - self._clock.now()), TICK_S)

    def _strangers(self) -> list[Peer]:
        """The connections that have not shown the key yet, oldest first."""
        return [peer for peer in self._peers if peer.rank < 0]

    def _accept(self, _events: int) -> None:
        occupy_standard_streams()
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # No descriptor is left: make room, and don't spin while there is none.
            self._drop_strangers(keep=0)
            time.sleep(0.01)
            return
        welcome = False
        with contextlib.suppress(OSError):  # It has gone already.
            connection.setblocking(False)
            tune(connection)
            welcome = is_own_user(connection)
        if not welcome:
            connection.close()
            return
        self._drop_strangers(keep=_MAX_STRANGERS - 1)
        peer = Peer(connection, self._clock.now() + self._handshake_s, self._selector, self._attend)
        self._peers[peer] = None
        peer.send(wire.MAGIC + peer.nonce)

    def _drop_strangers(self, keep: int) -> None:
        for peer in self._strangers()[::-1][keep:]:
            self._drop(peer)

    def _attend(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.flush()
        if not events & selectors.EVENT_READ or peer not in self._peers:
            return
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for payload in peer.reader.feed(data):
                if peer not in self._peers:
                    return
                if peer.rank < 0:
                    self._greet(peer, payload)
                else:
                    self._receive(peer, payload)
        except wire.MalformedError as error:
            self._drop(peer, f"it sent an invalid message ({error})")
            return
        except Exception as error:  # Whatever one connection brings about, the others' store goes on.
            logger.exception("a message of rank %d ended its connection", peer.rank)
            self._drop(peer, f"its message could not be dealt with ({error!r})")
            return
        if not data:
            self._drop(peer)

    def _greet(self, peer: Peer, payload: bytes) -> None:
        """Lets a stranger in, as a rank, if it knows the key and the rank may join."""
        client_nonce, header = wire.read_greeting(self.authkey, peer.nonce, payload)
        if header is None:
            self._drop(peer)
            return
        if header.get(OBSERVER) is True:
            answer = wire.pack({"ok": True}, json.dumps(self._members.observed(NOTES)).encode())
            peer.send(wire.proof(self.authkey, "server", peer.nonce, client_nonce, answer) + answer)
            return
        closing = False
        if not all(wire.is_integer(header.get(name)) for name in ("rank", "size", "pid")):
            error = "the greeting has no rank, size and pid"
        elif closing := self._has_moved and header["rank"] != self._host["host_rank"]:
            error = "it serves the ranks of before until they have left"
        else:
            error = self._members.refusal(header["rank"], header["size"])
        if not error:
            peer.rank, peer.joined = header["rank"], True
            peer.reader.limit = wire.MAX_MESSAGE_NBYTES
            self._members.join(peer.rank, header["pid"])
            self.blaming.discard(peer.rank)
        answer = wire.pack({"error": error, "again": closing} if error else {"ok": True, **self._host})
        peer.send(wire.proof(self.authkey, "server", peer.nonce, client_nonce, answer) + answer)
        if error:
            self._drop(peer)
        elif self._members.complete and self._on_complete is not None:
            on_complete, self._on_complete = self._on_complete, None
            on_complete()

    def _receive(self, peer: Peer, payload: bytes) -> None:
        header, body = wire.unpack(payload)
        if not peer.joined:
            raise wire.MalformedError("a request after it had left")
        if header.get("kind") == "leave":
            end = wire.read_end(header)
            peer.joined = False
            if end.detail:
                self.blaming.add(peer.rank)
            self._deliver(self._members.leave(peer.rank, end.detail))
        elif header.get("kind") == "abort":
            end = wire.read_end(header)
            if end.returns:
                peer.joined = False
                self._deliver(self._members.fail(peer.rank, end.detail))
                self._tell_of(peer.rank, end.detail, "failed")
            self._drop(peer, end.detail)
            if end.lives_on:
                self.on_failure(peer.rank)
        else:
            request = wire.read_request(header, body, peer.rank, self.size)
            ticket = (peer, header["number"])
            if request.kind == "expel":
                self._part_with(request.amount, request.key)
                self._deliver([(ticket, StoreAnswer())])
            else:
                self._deliver(self._members.submit(peer.rank, request, ticket, self._clock.now()))

    def _part_with(self, rank: int, how: str) -> None:
        """Takes a rank for lost whose connection has not ended."""
        for peer in [peer for peer in self._peers if peer.joined and peer.rank == rank]:
            self._notify({"notice": "expelled", "detail": how}, [peer])
            self._drop(peer, how)
        self._lose(rank, how)

    def _drop(self, peer: Peer, how: str = "") -> None:
        """Ends a connection; if it is a rank's that has not left, the rank is lost."""
        if peer.joined:
            peer.joined = False
            self._members.end_stay(peer.rank)
            self._lose(peer.rank, how or "its process ended or was killed")
        if peer in self._peers:
            del self._peers[peer]
            peer.close()

    def _lose(self, rank: int, how: str, returns: bool = True) -> None:
        if rank not in self._members.lost:
            self._deliver(self._members.lose(rank, how, returns))
            self._tell_of(rank, how, "died")

    def _tell_of(self, rank: int, how: str, notice: str) -> None:
        """Tells the ranks that miss a rank what happened to it."""
        told = [p for p in self._peers if p.joined and self._members.misses(p.rank, rank)]
        self._notify({"notice": notice, "rank": rank, "detail": how}, told)

    def _deliver(self, answers: Answers) -> None:
        """Sends answers, that of the rank whose process this is last.

        That rank may then make a call, such as mpi4py's MPI_Init, that keeps Python's lock, which this thread
        needs, until the other ranks make it too.
        """
        host = self._host["host_rank"]
        for (peer, number), answer in sorted(answers, key=lambda pair: pair[0][0].rank == host):
            if peer in self._peers:
                peer.send(wire.write_answer(number, answer))

    def _notify(self, header: dict[str, Any], peers: list[Peer]) -> None:
        message = wire.pack(header)
        for peer in peers:
            peer.send(message)

    def _release(self) -> None:
        for peer in self._peers:
            peer.socket.close()
        self._peers.clear()
        for resource in (self._listener, self._waker, self._woken, self._selector):
            resource.close()
