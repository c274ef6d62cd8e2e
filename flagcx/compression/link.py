"""Measurements on which "auto" decides: the link of the ranks, and the speed of codecs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from time import perf_counter, process_time
from typing import Any, cast

import numpy as np

from flagcx.compression.auto import LinkProfile
from flagcx.compression.codec import Scratch, namespace
from flagcx.compression.peers import Peers
from flagcx.compression.powersgd import PowerSGD
from flagcx.compression.reduces import reduce_of
from flagcx.compression.slot import Slot
from flagcx.dtypes import OPS, ReduceOp
from flagcx.kernels.cuda import import_cupy
from flagcx.transport.base import Transport

_COUNT, _COLUMNS = 1 << 18, 1 << 9
_DEVICE_COUNTS = (_COUNT, 1 << 24)
"""On a GPU 1 MiB takes hardly longer than nothing, unless the link is slow."""
_LONG_NS = 1_000_000
_TRIALS, _LOCAL_TRIALS = 3, 4
_COPIES = 4  # times that each byte is read or written on its way through shared memory, at the least


def best_time(call: Callable[[], object], trials: int) -> tuple[float, float]:
    """The least time of a call in seconds, and the share of it in which a core was at work."""
    best = float("inf"), 0.0
    for _ in range(trials):
        start, work = perf_counter(), process_time()
        call()
        elapsed = perf_counter() - start
        best = min(best, (elapsed, (process_time() - work) / elapsed))
    return best


def measure_link(peers: Peers, transport: Transport) -> LinkProfile:
    """Times all-reduces, small ones and large ones; the slowest rank counts. All ranks must call it."""

    def timed(array: Any, trials: int) -> tuple[float, float]:
        def call() -> None:
            if array is not None:
                peers.allreduce(array, array)
            peers.numbers([0])

        return best_time(call, trials)

    x: Any = np.ones(2, np.float32)
    if peers.on_device:
        x = import_cupy().asarray(x)
    small, end = timed(x, 2 * _TRIALS)[0], timed(None, 2 * _TRIALS)[0]
    sent = larger = busy_ppm = 0
    for count in _DEVICE_COUNTS if peers.on_device else (_COUNT,):
        x = namespace(x).ones(count, np.float32)
        large, busy = timed(x, _TRIALS)
        small_ns, end_ns, large_ns, busy_ppm = peers.numbers(
            [int(1e9 * small), int(1e9 * end), int(1e9 * large), int(1e6 * busy)]
        ).max(axis=0)
        sent, larger = 2 * (peers.size - 1) * x.nbytes // peers.size, max(large_ns - small_ns, 1)
        if larger > _LONG_NS:
            break
    measured = max(sent, 1) / larger
    # The host's look at a number on the GPU takes longer than a step of an all-reduce.
    latency_ns = max(small_ns - end_ns, small_ns / 10) if peers.on_device else small_ns
    crowd = 1.0 if peers.on_device else max(1.0, peers.size / len(os.sched_getaffinity(0)))
    if transport.link is not None:
        measured = transport.link.bandwidth_gb_per_s
    elif transport.takes_cores:
        # The cores themselves move the data. Trials look slow while other processes keep the cores busy, but
        # coding, which is measured without them, would be as much slower.
        (copied,) = peers.numbers([int(1e6 * _copy_speed())]).min(axis=0)
        measured, busy_ppm = max(measured, copied / 1e6 / _COPIES / crowd), 1_000_000
    # The kernels of a stream code and send one after the other.
    busy = 1.0 if peers.on_device else min(busy_ppm / 1e6, 1.0)
    known = transport.link is not None
    return LinkProfile(peers.size, float(measured), float(latency_ns) / 2e3, float(busy), crowd, known)


def _copy_speed() -> float:
    """The speed at which this core copies 1 MiB, in GB/s."""
    x = np.ones(_COUNT, np.float32)
    copy = np.empty_like(x)
    return x.nbytes / best_time(lambda: np.copyto(copy, x), _LOCAL_TRIALS)[0] / 1e9


def measure_speed(
    codec: Any, device: bool = False, ranks: int = 2, feedback: bool = False, count: int = _COUNT
) -> float:
    """The speed at which a core, or the current GPU, does its part of an all-reduce but for the sending.

    Args:
        codec: The codec.
        device: Whether arrays are on the current GPU.
        ranks: Number of ranks.
        feedback: Whether lost parts are fed back.
        count: Elements. On a host 1 MiB stands for any; on a GPU the speed is that of up to 64 MiB, since
            short arrays take as long as the launches.

    Returns:
        Bytes of float32 in GB/s.
    """
    size = min(max(count, 1), _DEVICE_COUNTS[-1]).bit_length() - 1
    count = max(1 << size, _COUNT) if device else _COUNT
    if isinstance(codec, PowerSGD):
        codec = replace(codec, shapes=((count // _COLUMNS, _COLUMNS),))
    return _measured(codec, device, max(ranks, 2), feedback, count)


@lru_cache(maxsize=32)
def _measured(codec: Any, device: bool, ranks: int, feedback: bool, count: int) -> float:
    x: Any = np.random.default_rng(0).standard_normal(count, np.float32)
    if codec.lossless:
        x[np.arange(count) % 100 > 0] = 0  # as sparse as the arrays that it is for
    finish = None
    if device:
        cupy = import_cupy()
        x, finish = cupy.asarray(x), cupy.cuda.get_current_stream().synchronize
    slot, out = Slot(codec, residual=feedback), namespace(x).empty_like(x)
    reduce = reduce_of(cast(Peers, Unsent(ranks, device)), codec, count, OPS["sum"], slot)

    def call() -> None:
        slot.begin(x)
        reduce.run(x, out)
        slot.end(out, reduce.waits, reduce.spoilt)
        if finish is not None:
            finish()

    return x.nbytes / best_time(call, 1 + _LOCAL_TRIALS)[0] / 1e9


class Unsent:
    """Rank 0 of some ranks between which nothing is sent; see ``Peers``. What takes time is its own work."""

    def __init__(self, size: int, on_device: bool) -> None:
        self.rank, self.size, self.on_device, self.beside, self.over_hosts = 0, size, on_device, False, False
        self.scratch = Scratch()
        self._filled: set[tuple[str, int]] = set()

    def alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        # The stripe of rank 1 in place of each: the last may be shorter, and this rank's own is not coded.
        self._fill("alltoall", recvbuf.reshape(self.size, -1), sendbuf.reshape(self.size, -1)[1])

    def allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self._fill("allgather", recvbuf.reshape(self.size, -1), sendbuf)

    def _fill(self, name: str, recvbuf: Any, sendbuf: Any) -> None:
        """Writes valid codes, once: later calls find them there."""
        if (name, recvbuf.size) not in self._filled:
            self._filled.add((name, recvbuf.size))
            recvbuf[...] = sendbuf

    def allreduce(self, sendbuf: Any, recvbuf: Any, op: ReduceOp = OPS["sum"]) -> None:
        if recvbuf is not sendbuf:
            recvbuf[...] = sendbuf

    def exchange(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        for array, _ in receives:
            array[...] = 0

    def numbers(self, mine: Sequence[int]) -> np.ndarray:
        return np.tile(np.array(mine, np.int64), (self.size, 1))
