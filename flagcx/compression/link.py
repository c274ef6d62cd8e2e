"""Measurements on which "auto" decides: the link of the ranks, and the speed of codecs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter, process_time
from typing import Any

import numpy as np

from flagcx.compression.auto import LinkProfile
from flagcx.compression.codec import Scratch, namespace
from flagcx.compression.peers import Peers
from flagcx.kernels.cuda import import_cupy
from flagcx.transport.base import Transport

_COUNT = 1 << 18
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
    """Times all-reduces, small ones and of 1 MiB; the slowest rank counts. All ranks must call it."""
    x: Any = np.ones(_COUNT, np.float32)
    if peers.on_device:
        x = import_cupy().asarray(x)

    def timed(array: Any, trials: int) -> tuple[float, float]:
        def call() -> None:
            peers.allreduce(array, array)
            peers.numbers([0])

        return best_time(call, trials)

    small, (large, busy) = timed(x[:2], 2 * _TRIALS)[0], timed(x, _TRIALS)
    small, large, busy_ppm = peers.numbers([int(1e9 * small), int(1e9 * large), int(1e6 * busy)]).max(axis=0)
    crowd = 1.0 if peers.on_device else max(1.0, peers.size / len(os.sched_getaffinity(0)))
    sent = 2 * (peers.size - 1) / peers.size * x.nbytes
    measured = max(sent, 1) / max(large - small, 1)
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
    return LinkProfile(peers.size, float(measured), float(small) / 2e3, float(busy), crowd, known)


def _copy_speed() -> float:
    """The speed at which this core copies 1 MiB, in GB/s."""
    x = np.ones(_COUNT, np.float32)
    copy = np.empty_like(x)
    return x.nbytes / best_time(lambda: np.copyto(copy, x), _LOCAL_TRIALS)[0] / 1e9


@lru_cache(maxsize=32)
def measure_speed(codec: Any, device: bool = False) -> float:
    """The speed at which a core, or the current GPU, codes and decodes: bytes of float32 in GB/s."""
    x: Any = np.random.default_rng(0).standard_normal(_COUNT, np.float32)
    if codec.lossless:
        x[np.arange(_COUNT) % 100 > 0] = 0  # as sparse as the arrays that it is for
    finish = None
    if device:
        cupy = import_cupy()
        x, finish = cupy.asarray(x), cupy.cuda.get_current_stream().synchronize
    if hasattr(codec, "encode_into"):
        xp = namespace(x)
        scratch, out = Scratch(), xp.empty_like(x)
        wire = xp.zeros(codec.wire_nbytes(x.size), np.uint8)

    def call() -> None:
        if hasattr(codec, "encode_into"):
            codec.encode_into(x, wire, scratch)
            codec.decode_into(wire, out, scratch, add=True)
            codec.decode_into(wire, out, scratch)
        else:
            codec.decode(codec.encode(x))
        if finish is not None:
            finish()

    return x.nbytes / best_time(call, _LOCAL_TRIALS)[0] / 1e9
