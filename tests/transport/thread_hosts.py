"""Hosts whose ranks are threads: those of one host share memory, and an engine of few lines joins all."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.transport.network.engine import Engine
from flagcx.transport.network.hierarchy import Hosts
from flagcx.transport.network.host_memory import SEGMENT_NBYTES, HostMemory
from flagcx.transport.network.wire import Wire
from flagcx.transport.scratch import Scratch

GROUPS = [
    ((0,), (1, 2, 3)),
    ((2, 0), (1, 3), (5, 4)),
    pytest.param(((0, 1), (2, 3)), marks=pytest.mark.slow),
    pytest.param(((0, 1, 2), (3,), (4, 5)), marks=pytest.mark.slow),
]


class Channel:
    """What one rank sends another one with one tag."""

    def __init__(self) -> None:
        self.sent: deque[np.ndarray] = deque()
        self.waiting: deque[SimpleNamespace] = deque()


class ThreadEngine(Engine):
    """Carries pieces between threads."""

    name, error = "threads", RuntimeError

    def __init__(self, rank: int, size: int, channels: dict, lock: threading.Lock) -> None:
        self.rank, self.size, self._channels, self._lock = rank, size, channels, lock
        self.all_done = self.some_done = lambda requests: all(map(self.is_done, requests))

    def memory(self, array):
        return array.view(np.uint8)

    def send(self, memory, peer, tag):
        return self._add(self.rank, peer, tag, "sent", memory.copy(), True)

    def receive(self, memory, peer, tag):
        return self._add(peer, self.rank, tag, "waiting", SimpleNamespace(done=False, memory=memory), None)

    def _add(self, source, target, tag, end, what, request):
        with self._lock:
            channel = self._channels.setdefault((source, target, tag), Channel())
            getattr(channel, end).append(what)
            while channel.sent and channel.waiting:
                piece, receive = channel.sent.popleft(), channel.waiting.popleft()
                receive.memory[: piece.size] = piece
                receive.done = True
        return what if request is None else SimpleNamespace(done=True)

    def is_done(self, request):
        return request.done

    def first(self, tag):
        return None

    def cancel(self, request):
        pass

    def close(self, over):
        pass


class Patience:
    """In place of a ``Watch``: knows of no other rank."""

    calls = 0

    def look(self, what, peer, waited_s, shared, noticed=False) -> None:
        assert waited_s < 20, f"{what} waits for rank {peer}"

    def end(self) -> None:
        pass


class Uneasy(HostMemory):
    """Memory of a rank that stops now and then, so that the others run ahead."""

    def signal(self, counter: int, value: int) -> None:
        super().signal(counter, value)
        for _ in range(random.Random(value * 31 + counter + self.own_rank).choice((0, 0, 0, 40))):
            os.sched_yield()


def thread_hosts(groups) -> list[Hosts]:
    """What each rank has of hosts with these ranks."""
    size, channels, lock = sum(map(len, groups)), {}, threading.Lock()
    found = [None] * size
    for group in groups:
        segments = {q: SimpleNamespace(memory=bytearray(SEGMENT_NBYTES), close=lambda: None) for q in group}
        for rank in group:
            memory, watch = Uneasy(rank, segments), Patience()
            memory.own_rank = rank
            wire = Wire(ThreadEngine(rank, size, channels, lock), watch)
            found[rank] = Hosts(groups, wire, watch, Scratch(), memory)
    return found
