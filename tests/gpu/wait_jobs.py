"""What the ranks of ``test_waits.py`` do: calls that differ, and a rank that is late."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import numpy as np

import flagcx as fc
from flagcx.errors import CommunicationError, FlagcxError

WAIT_S = 1.0


def _outcome(comm, call: Callable[[], object]) -> tuple[str, str, float]:
    """The error of a call, or else of the close after it, and the seconds that this took."""
    begin = time.monotonic()
    try:
        call()
        comm.close()
    except CommunicationError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "nothing was raised", 0.0


def counts_differ(second: bool, peer_memory: bool) -> tuple[str, str, float]:
    import cupy

    comm = fc.init(timeout_s=60.0, explain_wait_s=WAIT_S, peer_memory=peer_memory)
    comm.allreduce(cupy.ones(7, cupy.float32))
    cupy.cuda.Device().synchronize()

    def call() -> None:
        comm.allreduce(cupy.ones(100 + (comm.rank == 0), cupy.float32))
        if second:
            comm.allreduce(cupy.ones(4, cupy.float32))
            cupy.cuda.Device().synchronize()

    return _outcome(comm, call)


def codecs_differ(second: bool, peer_memory: bool) -> tuple[str, str, float]:
    """Two codecs whose payloads have as many bytes."""
    import cupy

    comm = fc.init(timeout_s=60.0, explain_wait_s=WAIT_S, peer_memory=peer_memory)
    comm.allreduce(cupy.ones(7, cupy.float32))
    cupy.cuda.Device().synchronize()

    def call() -> None:
        comm.allreduce(cupy.ones(4096, cupy.float32), compression=("fp8", "int8")[comm.rank])
        if second:
            comm.allreduce(cupy.ones(4, cupy.float32))
            cupy.cuda.Device().synchronize()

    return _outcome(comm, call)


def numpy_and_gpu(joined: bool) -> tuple[str, str, float]:
    import cupy

    comm = fc.init(timeout_s=60.0, explain_wait_s=WAIT_S)
    if joined:
        comm.allreduce(cupy.ones(7, cupy.float32))
        cupy.cuda.Device().synchronize()

    def call() -> None:
        comm.allreduce((cupy if comm.rank else np).ones(4, np.float32))
        cupy.cuda.Device().synchronize()

    return _outcome(comm, call)


def late() -> tuple[list[str], str]:
    import cupy

    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    comm = fc.init(timeout_s=60.0, explain_wait_s=WAIT_S)
    x = cupy.ones(100, cupy.float32)
    try:
        comm.allreduce(x)
        cupy.cuda.Device().synchronize()
        comm.barrier()
        logging.getLogger("flagcx").addHandler(handler)  # kernels may have taken a rank longer to compile
        if comm.rank == 1:
            time.sleep(2.5 * WAIT_S)
        comm.allreduce(x)
        cupy.cuda.Device().synchronize()
        comm.close()
    except FlagcxError as error:
        return warned, str(error)
    return warned, ""


def seen_from_outside(peer_memory: bool) -> list[str]:
    """Rank 1 does not come to a call until ``flagcx status`` would say so; returns what it says."""
    import cupy

    from flagcx.diagnosis.explain import explain
    from flagcx.diagnosis.jobs import find_jobs

    comm = fc.init(timeout_s=60.0, peer_memory=peer_memory)
    x, said = cupy.ones(100, cupy.float32), []
    for _ in range(2):
        comm.allreduce(x)
    cupy.cuda.Device().synchronize()
    comm.barrier()
    end = time.monotonic() + 20.0
    # What this rank's page shows of its last call may be a moment old: that it still waits in it.
    while comm.rank == 1 and time.monotonic() < end and not any("rank 1 (process" in one for one in said):
        (job,) = [job for job in find_jobs() if job.is_called(str(os.getpid()))]
        said = explain(job.size, job.states()).sentences
    comm.allreduce(x)
    cupy.cuda.Device().synchronize()
    return said


def recorded(directory: str, peer_memory: bool) -> str:
    """Rank 1 does not come to a call at all; returns the error."""
    import cupy

    comm = fc.init(timeout_s=3.0, record=directory, peer_memory=peer_memory)
    x, error = cupy.ones(100, cupy.float32), ""
    comm.allreduce(x)
    cupy.cuda.Device().synchronize()
    comm.barrier()
    try:
        if comm.rank == 0:
            comm.allreduce(x)
            cupy.cuda.Device().synchronize()
        else:
            time.sleep(8.0)
        comm.allreduce(x)
        comm.close()
    except FlagcxError as caught:
        error = str(caught)
    return error


def captured_on_one_rank() -> str:
    """Rank 0 replays a graph of one call, rank 1 makes the calls; then both make another one."""
    import cupy

    comm = fc.init(timeout_s=60.0, explain_wait_s=WAIT_S / 2)
    x, stream = cupy.ones(100, cupy.float32), cupy.cuda.Stream(non_blocking=True)
    try:
        with stream:
            comm.allreduce(x)
            if comm.rank == 0:
                stream.begin_capture()
                comm.allreduce(x)
                graph = stream.end_capture()
            for _ in range(3):
                if comm.rank == 0:
                    graph.launch(stream)
                else:
                    comm.allreduce(x)
            comm.allreduce(cupy.ones(5, cupy.float32))
            stream.synchronize()
        comm.close()
    except FlagcxError as error:
        return str(error)
    return ""


def cost_of_noting() -> float:
    """Seconds a call by which ``StreamOrder.enter`` is slower with the note of the call than without."""
    import cupy

    comm = fc.init()
    comm.allreduce(cupy.ones(7, cupy.float32))
    cupy.cuda.Device().synchronize()
    enter, what = comm._device.transport._order.enter, "a call for a measurement"

    def seconds(signature: int) -> float:
        begin = time.perf_counter()
        for _ in range(20_000):
            enter(what, signature)
        return (time.perf_counter() - begin) / 20_000

    least = {signature: min(seconds(signature) for _ in range(5)) for signature in (0, 1 << 60)}
    order = comm._device.transport._order
    order._recent.clear()
    order.marks.clear()
    order.mark = 0, 0
    return least[1 << 60] - least[0]
