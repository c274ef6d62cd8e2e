"""What the ranks of ``test_recovery.py`` do: lose one of them, abort, and go on.

``python -m tests.gpu.recovery_jobs PEER_MEMORY KILL`` is a rank of a job that loses rank 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import flagcx as fc


def _sums_are_right(comm) -> bool:
    import cupy

    total = comm.size * (comm.size + 1) // 2
    right = []
    for count in (5, 100_000, 3_000_000):
        x = cupy.full(count, comm.rank + 1, cupy.float32)
        right.append(bool((comm.allreduce(x) == total).all()))
    for algorithm in ("native", "ring"):
        x = cupy.full(1000, comm.rank + 1, cupy.float32)
        right.append(bool((comm.allreduce(x, algorithm=algorithm) == total).all()))
    shared = comm.empty(10_000, device="gpu")
    shared[...] = comm.rank + 1
    right.append(bool((comm.allreduce(shared) == total).all()))
    return all(right)


def lose_one(peer_memory: bool, kill: bool) -> None:
    """Rank 1 is lost among calls; the others shrink, and print what came of it."""
    import cupy

    comm = fc.init(timeout_s=60.0, peer_memory=peer_memory)
    me = comm.rank
    assert _sums_are_right(comm)
    kept = comm.empty(1000, device="gpu")
    kept[...] = me
    x, start = cupy.ones(300_000, cupy.float32), time.monotonic()
    try:
        for i in range(10**6):
            if me == 1 and i == 20:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("no such file")
            start = time.monotonic()
            work = comm.allreduce(x, async_op=True) if i % 3 == 0 else None
            if work is None:
                comm.allreduce(x)
            else:
                work.wait()
            cupy.cuda.Device().synchronize()
    except (fc.PeerDiedError, fc.AbortedError):
        noticed_s = time.monotonic() - start
    start = time.monotonic()
    comm = comm.shrink()
    took_s = time.monotonic() - start
    right = _sums_are_right(comm) and bool((kept == me).all())
    print(f"rank {comm.rank} of {comm.size}, lost {comm.lost}, right {right}: {noticed_s:.2f} {took_s:.2f}")


def abort_from_a_thread(peer_memory: bool) -> tuple[str, float, bool]:
    """Rank 0 waits in a call that rank 1 never makes, and a thread of its own aborts; then both go on."""
    import cupy

    comm = fc.init(timeout_s=60.0, peer_memory=peer_memory)
    assert _sums_are_right(comm)
    error, start = "", time.monotonic()
    if comm.rank == 0:
        threading.Timer(0.5, comm.abort, ["enough"]).start()
        try:
            work = comm.allreduce(cupy.ones(100_000, cupy.float32), async_op=True)
            work.synchronize()
        except fc.FlagcxError as caught:
            error = f"{type(caught).__name__}: {caught}"
    else:
        while not error:
            with contextlib.suppress(fc.AbortedError, fc.CommunicatorError):
                comm._device.transport.synchronize()
                time.sleep(0.05)
                continue
            error = "told"
    took_s = time.monotonic() - start
    comm = comm.shrink()
    return error, took_s, _sums_are_right(comm)


if __name__ == "__main__":
    lose_one(*(word == "True" for word in sys.argv[1:]))
