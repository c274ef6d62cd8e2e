"""What every rank of a measurement does, the same for each library measured.

A rank connects to the measurement's controller (``compare_host.py``) over a Unix socket and waits in
``recv`` for orders, one JSON object a line. While it waits it uses no processor, so ranks of several
libraries can be alive at once and take turns within milliseconds: a drift of the machine then hits
them all alike.

The data differs in every (rank, index) and adds up exactly in float32, so a chunk that is swapped,
lost or added twice shows.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PERIOD = 65521
"""Elements after which the data repeats: a prime, so that no two chunks of one message are alike."""

LARGEST = 1 << 18
"""Data lies below this, so that sums over up to 64 ranks are exact in float32 (24 bits)."""


@dataclass(frozen=True)
class Subject:
    """One rank of the library that is measured.

    Attributes:
        rank: This rank.
        size: How many ranks there are.
        allreduce: Adds up, in place, over all ranks what ``allocate`` returned first.
        barrier: The library's own barrier.
        allocate: (count) -> what ``allreduce`` takes, and the same float32 elements as a NumPy array.
        versions: What is measured, for the record.
        calls: Other collectives, by name: (sendbuf, recvbuf) -> anything, with root 0 where there is one;
            a broadcast gets one array twice.
    """

    rank: int
    size: int
    allreduce: Callable[[Any], Any]
    barrier: Callable[[], Any]
    allocate: Callable[[int], tuple[Any, np.ndarray]]
    versions: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, Callable[[np.ndarray, np.ndarray], Any]] = field(default_factory=dict)


def pattern(rank: int) -> np.ndarray:
    """The data of a rank: ``PERIOD`` whole numbers in float32, different for each rank."""
    return np.random.default_rng(rank).integers(1, LARGEST, PERIOD).astype(np.float32)


def expected_pattern(size: int) -> np.ndarray:
    """The sum of the data of ``size`` ranks, exact."""
    patterns = np.stack([pattern(rank) for rank in range(size)])
    return patterns.sum(axis=0, dtype=np.float64).astype(np.float32)


def fill(array: np.ndarray, values: np.ndarray) -> None:
    """Writes ``values`` into ``array`` over and over, up to its end."""
    whole = array.size // values.size * values.size
    array[:whole].reshape(-1, values.size)[...] = values
    array[whole:] = values[: array.size - whole]


def count_wrong(array: np.ndarray, values: np.ndarray) -> int:
    """How many elements of ``array`` differ from ``values`` written over and over."""
    whole = array.size // values.size * values.size
    rows = array[:whole].reshape(-1, values.size)
    wrong = sum(int(np.count_nonzero(row != values)) for row in rows)
    return wrong + int(np.count_nonzero(array[whole:] != values[: array.size - whole]))


def time_batch(call: Callable[[], Any], barrier: Callable[[], Any], calls: int, warmup: int) -> float:
    """Times ``calls`` calls, one after the other, that follow upon a barrier.

    Args:
        call: What is timed.
        barrier: Lets no rank begin before all have come.
        calls: How many calls there are in the batch.
        warmup: How many go before it.

    Returns:
        Seconds a call, on this rank.
    """
    for _ in range(warmup):
        call()
    barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


class Exchange:
    """One collective other than all-reduce, with its arrays and what must come out.

    Args:
        subject: This rank of the library that is measured.
        collective: Its name in ``subject.calls``.
        count: Elements of a message, or of each block.
    """

    def __init__(self, subject: Subject, collective: str, count: int) -> None:
        size, mine = subject.size, slice(subject.rank * count, (subject.rank + 1) * count)
        blocks = size if collective in ("alltoall", "reduce_scatter") else 1
        all_sent = np.empty((size, blocks * count), np.float32)
        for rank in range(size):
            fill(all_sent[rank], pattern(rank))
        self._data = all_sent[subject.rank]
        self._expected = {
            "broadcast": lambda: all_sent[0],
            "allgather": lambda: all_sent.reshape(-1),
            "alltoall": lambda: all_sent[:, mine].reshape(-1),
            "reduce_scatter": lambda: all_sent[:, mine].sum(axis=0),
        }[collective]().copy()
        self._sendbuf = np.empty_like(self._data)
        self._recvbuf = self._sendbuf if collective == "broadcast" else np.empty_like(self._expected)
        self._call = subject.calls[collective]

    def __call__(self) -> None:
        """Makes the call."""
        self._call(self._sendbuf, self._recvbuf)

    def count_wrong(self) -> int:
        """Runs one call on fresh data and counts the wrong elements."""
        self._recvbuf[...] = 0
        self._sendbuf[...] = self._data
        self()
        return int(np.count_nonzero(self._recvbuf != self._expected))


class Measurement:
    """The orders that a rank carries out; each is a method that returns what goes to the controller."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._mine = pattern(subject.rank)
        self._sum = expected_pattern(subject.size)
        self._handle: Any = None
        self._exchange: Exchange | None = None
        self._array = np.empty(0, np.float32)

    def prepare(self, count: int, collective: str = "allreduce") -> dict[str, Any]:
        """Allocates a message of ``count`` float32 elements and runs a verified call on it.

        Args:
            count: Elements of a message; of each block, where a rank has one for each.
            collective: What is measured from now on.
        """
        self._exchange = None
        if collective == "allreduce":
            self._handle, self._array = self._subject.allocate(count)
        else:
            self._exchange = Exchange(self._subject, collective, count)
        return self.verify()

    def verify(self) -> dict[str, Any]:
        """Runs one call on fresh data and counts the wrong elements; leaves zeros behind.

        Zeros stay zeros however often they are added up, so timed calls never overflow.
        """
        if self._exchange is not None:
            return {"wrong": self._exchange.count_wrong()}
        fill(self._array, self._mine)
        self._subject.allreduce(self._handle)
        wrong = count_wrong(self._array, self._sum)
        self._array[:] = 0
        return {"wrong": wrong}

    def sample(self, calls: int, warmup: int) -> dict[str, Any]:
        """Times a batch: a barrier, then ``calls`` calls one after the other.

        Returns:
            ``seconds`` a call on this rank.
        """
        call = self._exchange or partial(self._subject.allreduce, self._handle)
        return {"seconds": time_batch(call, self._subject.barrier, calls, warmup)}

    def release(self) -> dict[str, Any]:
        """Lets go of the message."""
        self._handle, self._array, self._exchange = None, np.empty(0, np.float32), None
        return {}


def serve(address: str, subject: Subject) -> None:
    """Carries out the controller's orders until it says stop or goes away.

    Args:
        address: The controller's Unix socket.
        subject: This rank of the library that is measured.
    """
    measurement = Measurement(subject)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw", encoding="utf-8")
        _first_call(subject)
        hello = {"rank": subject.rank, "versions": dict(subject.versions), "files": shared_files()}
        print(json.dumps(hello), file=stream, flush=True)
        for line in stream:
            order = json.loads(line)
            name = order.pop("do")
            if name == "stop":
                return
            try:
                answer = getattr(measurement, name)(**order)
            except Exception:
                answer = {"error": traceback.format_exc(limit=-3)}
            print(json.dumps(answer), file=stream, flush=True)


def _first_call(subject: Subject) -> None:
    """One small all-reduce, so that "hello" means that the library is up."""
    handle, array = subject.allocate(256)
    array[:] = 1
    subject.allreduce(handle)


def shared_files() -> list[str]:
    """Files in /dev/shm that this process has mapped: what it might leave behind if it's killed."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return sorted(path for path in paths if not path.endswith("(deleted)"))


def version_of(package: str) -> str:
    """The version of a package; "checkout" where it's used without being installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "checkout"


def versions(**further: str) -> dict[str, str]:
    """The versions of Python and NumPy, and ``further`` ones."""
    return {"python": sys.version.split()[0], "numpy": np.__version__, **further}
