"""Collectives over hosts whose ranks share memory: ranks are threads, which an engine of few lines joins."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.dtypes import OPS, dtype_of
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call
from flagcx.transport.network import pieces
from flagcx.transport.network.crossing import CROSSED
from flagcx.transport.network.engine import Engine
from flagcx.transport.network.hierarchy import HierarchicalCollective, Hosts
from flagcx.transport.network.host_memory import SEGMENT_NBYTES, HostMemory
from flagcx.transport.network.wire import Wire
from flagcx.transport.scratch import Scratch

GROUPS = [
    ((0,), (1, 2, 3)),
    ((2, 0), (1, 3), (5, 4)),
    pytest.param(((0, 1), (2, 3)), marks=pytest.mark.slow),
    pytest.param(((0, 1, 2), (3,), (4, 5)), marks=pytest.mark.slow),
]
INTS = dtype_of("int32")


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


@pytest.fixture(params=GROUPS, ids=str)
def hosts(request):
    """What each rank has of the hosts."""
    groups = request.param
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


def arrays(collective, size, counts, rank, root):
    """The INPUT of a rank, and the OUTPUT that it must get."""
    kind = COLLECTIVES[collective]
    each = counts if isinstance(counts, tuple) else (counts,) * (size if kind.blocks else 1)
    ends = np.cumsum([0, *each])
    whole = [np.arange(ends[-1], dtype=np.int32) * (q + 3) + 1000 * q for q in range(size)]
    own = slice(ends[rank], ends[rank + 1]) if kind.blocks else slice(None)
    message = sum(whole) if kind.reduces else whole[root or 0]
    if kind.before == "each":
        message = np.concatenate([whole[q][ends[q] : ends[q + 1]] for q in range(size)])
    given = whole[rank][own] if kind.before == "each" else whole[rank]
    wanted = message[own] if kind.after == "each" else message
    return given if kind.has_input(rank, root) else None, wanted if kind.has_output(rank, root) else None


def calls(size):
    """Collectives with their roots and counts, in place and not: of one piece and of many, in one order."""
    for number, count in enumerate((3, 0, 600)):
        for at, collective in enumerate(CROSSED):
            kind = COLLECTIVES[collective]
            root = (number + at) % size if kind.rooted else None
            for in_place in (False, True):
                yield collective, root, count, in_place
                if kind.blocks:
                    yield (
                        collective,
                        root,
                        tuple((q * 5 + at) % 7 * count // 4 for q in range(size)),
                        in_place,
                    )


def make_calls(hosts, rank):
    """All calls of one rank, twice."""
    groups, size = hosts.groups, sum(map(len, hosts.groups))
    done = 0
    for collective, root, counts, in_place in calls(size):
        kind = COLLECTIVES[collective]
        schedule = build(collective, "hierarchical", size, root, 1, groups)
        op = OPS["sum"] if kind.reduces else None
        call = Call(schedule, rank, counts, INTS, op, in_place)
        assert hosts.serves(call)
        plan = HierarchicalCollective(hosts, call, call.describe())
        for _ in range(2):
            given, wanted = arrays(collective, size, counts, rank, root)
            sendbuf, recvbuf = placed(call, given, wanted, in_place)
            plan.run(sendbuf, recvbuf)
            if wanted is not None:
                assert np.array_equal(recvbuf, wanted), (call.describe(), rank, in_place)
            if given is not None and not (in_place and wanted is not None):
                assert np.array_equal(sendbuf, given), (call.describe(), rank)
            done += 1
    return done


def placed(call, given, wanted, in_place):
    """INPUT and OUTPUT, over each other where the call is in place."""
    sendbuf = None if given is None else given.copy()
    recvbuf = None if wanted is None else np.full_like(wanted, -1)
    if in_place and given is not None and wanted is not None:
        schedule = call.schedule
        shift = COLLECTIVES[schedule.collective].in_place_shift(call.rank, schedule.size, schedule.size, None)
        if given.size >= wanted.size:
            start = int(np.cumsum([0, *_blocks(call)])[shift[0]]) if wanted.size < given.size else 0
            recvbuf = sendbuf[start : start + wanted.size]
        else:
            start = int(np.cumsum([0, *_blocks(call)])[shift[1]])
            recvbuf[start : start + given.size] = given
            sendbuf = recvbuf[start : start + given.size]
    return sendbuf, recvbuf


def _blocks(call):
    return call.counts if isinstance(call.counts, tuple) else (call.counts,) * call.schedule.size


def test_every_collective_in_pieces_that_follow_each_other(hosts, monkeypatch):
    """Pieces are so small that slots are written again many times within a call."""
    monkeypatch.setattr(pieces, "SHORT_NBYTES", 256)
    monkeypatch.setattr(pieces, "_LEAST_NBYTES", 128)
    monkeypatch.setattr(pieces, "_MOST_NBYTES", 128)
    with ThreadPoolExecutor(len(hosts)) as pool:
        done = list(pool.map(make_calls, hosts, range(len(hosts))))
    assert set(done) == {2 * len(list(calls(len(hosts))))}
