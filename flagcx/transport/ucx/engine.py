"""UCX as an engine: one worker a communicator, and a connection to each rank that something is sent to.

A receive is given to UCX only when its piece has come. UCX never takes a receive back; so it never writes to
memory that this rank has stopped to wait in. A tag of UCX is a tag of the engine and the rank that sends.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from flagcx.descriptors import occupy_standard_streams
from flagcx.transport.at_exit import call_at_exit
from flagcx.transport.network.engine import Engine

_RANK_BITS = 32
_RANKS = (1 << _RANK_BITS) - 1
_ANY_RANK = ((1 << 64) - 1) ^ _RANKS
_QUIET_S, _CLOSE_S = 0.01, 1.0
"""A worker is closed when nothing has moved for so long, and after so long in any case."""


class Channel:
    """What this rank receives from one other with one tag.

    Attributes:
        tag: UCX's tag.
        waiting: The receives that have met no piece yet.
    """

    __slots__ = ("tag", "waiting")

    def __init__(self, tag: Any) -> None:
        self.tag, self.waiting = tag, deque[Request]()


class Request:
    """A piece under way.

    Attributes:
        memory: What it is sent from, or received into.
        peer: The rank that it goes to or comes from.
        ucx: UCX's request; None before a piece to receive has come.
        channel: Where it waits for a piece until then.
        ended: Whether it has ended.
    """

    __slots__ = ("channel", "ended", "memory", "peer", "ucx")

    def __init__(self, memory: Any, peer: int, ucx: Any, channel: Channel | None = None) -> None:
        self.memory, self.peer, self.ucx, self.channel = memory, peer, ucx, channel
        self.ended = False


class UcxEngine(Engine):
    """The pieces of one communicator over UCX.

    Args:
        ucxx: The module; see ``load_ucxx``.
        worker: A worker that serves nothing else.
        rank: This rank.
        addresses: The address of every rank's worker.
    """

    name = "UCX"

    def __init__(self, ucxx: Any, worker: Any, rank: int, addresses: Sequence[bytes]) -> None:
        self._ucxx, self._worker, self._addresses = ucxx, worker, addresses
        self.error, self.rank, self.size = ucxx.UCXError, rank, len(addresses)
        self._progress = worker.progress_once
        self._endpoints: dict[int, Any] = {}
        self._channels: dict[tuple[int, int], Channel] = {}
        self._cut_off: dict[int, None] = {}
        self._tags: dict[tuple[int, int], Any] = {}
        self._any_rank, self._exactly = ucxx.UCXXTagMask(_ANY_RANK), ucxx.UCXXTagMaskFull
        self._lock = threading.Lock()
        self._at_exit = call_at_exit(self._settle)
        # As it ends a worker, ucxx waits for the senders of what nothing has received, and they may be lost.
        # So a worker ends only where there is no such piece, and never with the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))

    def memory(self, array: np.ndarray) -> Any:
        """The bytes of an array, as ucxx takes them."""
        return self._ucxx.Array(array.view(np.uint8))

    def send(self, memory: Any, peer: int, tag: int) -> Request:  # type: ignore[override]
        """Begins to send; see ``Engine.send``."""
        endpoint = self._endpoints.get(peer) or self._connect(peer)
        ucx_tag = self._tags.get((tag, self.rank)) or self._tag(tag, self.rank)
        return Request(memory, peer, endpoint.tag_send(memory, ucx_tag))

    def receive(self, memory: Any, peer: int, tag: int) -> Request:  # type: ignore[override]
        """Begins to receive; see ``Engine.receive``."""
        channel = self._channels.get((tag, peer))
        if channel is None:
            channel = self._channels[tag, peer] = Channel(self._tag(tag, peer))
        request = Request(memory, peer, None, channel)
        channel.waiting.append(request)
        return request

    def _tag(self, tag: int, rank: int) -> Any:
        found = self._tags.get((tag, rank))
        if found is None:
            found = self._tags[tag, rank] = self._ucxx.UCXXTag(tag << _RANK_BITS | rank)
        return found

    def _connect(self, peer: int) -> Any:
        """Connects this rank to another one, whose worker answers when it is next looked after."""
        with self._lock:
            found = self._endpoints.get(peer)
            if found is None:
                address = self._ucxx.UCXAddress.create_from_buffer(self._addresses[peer])
                try:
                    occupy_standard_streams()
                    found = self._ucxx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
                except self.error:
                    self._cut_off[peer] = None
                    raise
                self._endpoints[peer] = found
        return found

    # -- looking ----------------------------------------------------------------------------------

    def is_done(self, request: Request) -> bool:  # type: ignore[override]
        """Whether a request has ended; see ``Engine.is_done``."""
        if request.ended:
            return True
        self._progress()
        return self._look(request)

    def all_done(self, requests: Sequence[Request]) -> bool:  # type: ignore[override]
        """Whether all have ended; see ``Engine.all_done``."""
        self._progress()
        done = True
        for request in requests:
            if not (request.ended or self._look(request)):
                done = False
        return done

    def some_done(self, requests: Sequence[Request]) -> bool:  # type: ignore[override]
        """Whether some have ended since this was asked last; see ``Engine.some_done``."""
        self._progress()
        some = False
        for request in requests:
            if not request.ended and self._look(request):
                some = True
        return some

    def _look(self, request: Request) -> bool:
        """Whether a request that had not ended has ended now."""
        ucx = request.ucx
        if ucx is None:
            self._match(request.channel)
            ucx = request.ucx
        if ucx is None or not ucx.completed:
            return False
        request.ended = True
        try:
            ucx.check_error()
        except self.error:
            self._cut_off[request.peer] = None
            raise
        return True

    def _match(self, channel: Channel | None) -> None:
        """Begins to receive the pieces of a channel that have come, into the memory that waits for them."""
        assert channel is not None
        waiting, probe = channel.waiting, self._worker.tag_probe
        while waiting and (piece := probe(channel.tag, self._exactly, True)).matched:
            request = waiting.popleft()
            request.ucx = self._worker.tag_recv_with_handle(request.memory, piece)

    def first(self, tag: int) -> int | None:
        """A rank whose piece waits; see ``Engine.first``."""
        self._progress()
        piece = self._worker.tag_probe(self._tag(tag, 0), self._any_rank, False)
        return int(piece.sender_tag.value) & _RANKS if piece.matched else None

    def reached(self) -> Iterable[int]:
        """The other ranks that this one is connected to."""
        return [rank for rank in self._endpoints if rank != self.rank]

    def lost(self) -> list[int]:
        """The ranks whose connections have ended."""
        return list(self._cut_off)

    # -- the end ----------------------------------------------------------------------------------

    def cancel(self, request: Request) -> None:
        """Takes back a receive that has met no piece."""
        if request.ucx is None and request.channel is not None:
            request.channel.waiting.remove(request)
            request.ended = True

    def stop(self) -> None:
        """Lets UCX move nothing any more."""
        self._progress = lambda: False

    def _settle(self) -> None:
        """Lets what was sent leave, and its receivers know: until nothing has moved for a moment."""
        now = moved_at = time.monotonic()
        end = now + _CLOSE_S
        while now < min(moved_at + _QUIET_S, end):
            moved = self._progress()
            now = time.monotonic()
            if moved:
                moved_at = now

    def close(self, over: Callable[[], bool]) -> None:
        """Closes the connections and the worker; see ``Engine.close``."""
        atexit.unregister(self._at_exit)
        if self._worker is None:
            return
        if not over():
            self._settle()
        for endpoint in self._endpoints.values():
            endpoint.close_blocking()
        self._endpoints.clear()
        any_tag = self._ucxx.UCXXTagMask(0)
        if not self._worker.tag_probe(self._tag(0, 0), any_tag, False).matched:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._worker))
        self.stop()
        self._worker = None
