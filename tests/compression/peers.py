"""Ranks as threads of one process, for plans of compressed all-reduces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np

from flagcx.compression.codec import Scratch
from flagcx.dtypes import OPS, ReduceOp


class Meeting:
    """Where the ranks leave what the others take."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.left: list[Any] = [None] * size

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """Everybody's, in rank order."""
        self.left[rank] = mine
        self.barrier.wait(30)
        everybodys = list(self.left)
        self.barrier.wait(30)
        return everybodys


class ThreadPeers:
    """One rank; see ``flagcx.compression.peers.Peers``. Counts the bytes that it sends."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.scratch, self.on_device = Scratch(), False
        self.sent_nbytes = 0
        self.dense_calls = 0

    def alltoall(self, given: np.ndarray, result: np.ndarray) -> None:
        blocks = self._meeting.exchange(self.rank, given.copy())
        n = given.size // self.size
        for q, block in enumerate(blocks):
            result[q * n : (q + 1) * n] = block[self.rank * n : (self.rank + 1) * n]
        self.sent_nbytes += n * (self.size - 1)

    def allgather(self, given: np.ndarray, result: np.ndarray) -> None:
        result[...] = np.concatenate(self._meeting.exchange(self.rank, given.copy()))
        self.sent_nbytes += given.nbytes * (self.size - 1)

    def allreduce(self, given: np.ndarray, result: np.ndarray, op: ReduceOp = OPS["sum"]) -> None:
        mine = given.copy() if op.scale is None else given * given.dtype.type(op.scale)
        everybodys = self._meeting.exchange(self.rank, mine)
        result[...] = everybodys[0]
        for other in everybodys[1:]:
            result += other
        if op.average:
            result /= self.size
        self.dense_calls += 1
        self.sent_nbytes += 2 * given.nbytes * (self.size - 1) // self.size

    def exchange(self, sends: Sequence, receives: Sequence) -> None:
        everybodys = self._meeting.exchange(self.rank, [(a.copy(), to) for a, to in sends])
        boxes = {q: [a for a, to in theirs if to == self.rank] for q, theirs in enumerate(everybodys)}
        for array, source in receives:
            array[...] = boxes[source].pop(0)
        assert not any(boxes.values()), "a message was sent that nobody received"
        self.sent_nbytes += sum(a.nbytes for a, _ in sends)

    def numbers(self, mine: Sequence[int]) -> np.ndarray:
        return np.array(self._meeting.exchange(self.rank, list(mine)), np.int64)

    def overlap(self):
        return nullcontext()

    def submit(self, call: Callable[[], object]) -> Future:
        future: Future = Future()
        future.set_result(call())
        return future


def on_ranks(size: int, function: Callable[[ThreadPeers], Any]) -> list[Any]:
    """What ``function(peers)`` returns on each rank."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return [f.result(60) for f in [pool.submit(function, ThreadPeers(meeting, r)) for r in range(size)]]
