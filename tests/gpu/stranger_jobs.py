"""What the ranks do beside other users of the GPU: other streams, other threads, and captures of others."""

from __future__ import annotations

import threading
from typing import Any

import flagcx as fc


def scratch_under_another_stream() -> list[str]:
    """Memory that a larger compressed call replaces is given to no array of the stream it was made under."""
    import cupy

    comm = fc.init()
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    small, large = cupy.ones(100_000, cupy.float32), cupy.ones(3_000_000, cupy.float32)
    cupy.cuda.Device().synchronize()
    with first:
        comm.allreduce(small, compression="int8")
    scratch = [c.peers.scratch for c in comm._compressors.values()]
    before = [(a.data.ptr, a.data.ptr + a.nbytes) for s in scratch for a in s._arrays.values()]
    with second:
        comm.allreduce(large, compression="int8")
    with first:
        made = [cupy.empty(end - start, cupy.uint8) for start, end in before for _ in range(3)]
    faults = [] if before else ["there is no scratch"]
    for array in made:
        if any(start < array.data.ptr + array.nbytes and array.data.ptr < end for start, end in before):
            faults.append("an array lies where the other stream may still write")
    cupy.cuda.Device().synchronize()
    return faults


def default_streams_of_threads(times: int) -> list[str]:
    """Two threads take turns, each on its own default stream, whose handle is the same in both."""
    import cupy

    comm = fc.init()
    device = cupy.cuda.Device()
    x = cupy.zeros(200_000, cupy.float32)
    comm.allreduce(x)
    device.synchronize()
    turn = [threading.Semaphore(1), threading.Semaphore(0)]
    faults: list[str] = []

    def work(me: int) -> None:
        device.use()
        try:
            with cupy.cuda.Stream.ptds:
                for i in range(times):
                    turn[me].acquire()
                    if (me + i) % 2:
                        comm.allreduce(x, "max")
                    else:
                        comm.broadcast(x, root=i % comm.size)
                    comm.allreduce(x, "avg")
                    turn[1 - me].release()
        except BaseException as error:
            faults.append(f"{type(error).__name__}: {error}")
            turn[1 - me].release()

    with cupy.cuda.Stream.ptds:
        x.fill(7)
        cupy.cuda.Stream.ptds.synchronize()
    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm._device.transport.synchronize()  # by a third thread, whose default stream has the handle too
    return faults + ([] if bool((x == 7).all()) else [f"got {x[:3]}"])


def captured_by_another_thread() -> list[str]:
    """Calls, which make graphs of their own, while another thread captures and restricts all threads."""
    import cupy

    comm = fc.init()
    device = cupy.cuda.Device()
    arrays = [cupy.ones(n, cupy.float32) for n in (1000, 300_000)]
    other = cupy.zeros(1000, cupy.float32)
    other += 1
    for x in arrays:
        comm.allreduce(x, "max")
        comm.broadcast(x)
    device.synchronize()
    begun, ended = threading.Event(), threading.Event()
    found: list[Any] = []

    def capture() -> None:
        device.use()
        stream = cupy.cuda.Stream(non_blocking=True)
        try:
            with stream:
                stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
                other.__iadd__(1)
                begun.set()
                ended.wait(20)
                found.append(stream.end_capture())
        except BaseException as error:
            found.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(20)
    try:
        for _ in range(5):
            for x in arrays:
                comm.allreduce(x, "max")
                comm.broadcast(x)
    except BaseException as error:
        found.append(error)
    ended.set()
    thread.join()
    faults = [f"{type(one).__name__}: {one}" for one in found if isinstance(one, BaseException)]
    if not faults:
        stream = cupy.cuda.Stream(non_blocking=True)
        found[0].launch(stream)
        device.synchronize()
        faults += [] if bool((other == 2).all()) else [f"the other graph gave {other[:3]}"]
    return faults + ([] if all(bool((x == 1).all()) for x in arrays) else ["a call gave a wrong result"])


def graph_beside_calls(waits: bool) -> str:
    """A graph is replayed on one stream, and calls are made on another; ``waits``: each waits for the other.

    Returns the error, or what is wrong.
    """
    import cupy

    comm = fc.init(timeout_s=20.0)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x, y = cupy.zeros(1 << 19, cupy.float32), cupy.zeros(1 << 19, cupy.float32)
    cupy.cuda.Device().synchronize()
    try:
        with first:
            comm.allreduce(x)
            first.begin_capture()
            for _ in range(20):
                comm.allreduce(x, "avg")
            graph = first.end_capture()
            x.fill(3)
        for _ in range(50):
            graph.launch(first)
            if waits:
                second.wait_event(first.record())
            with second:
                comm.allreduce(y, "max")
            if waits:
                first.wait_event(second.record())
        cupy.cuda.Device().synchronize()
        comm._device.transport.synchronize()
        comm.allreduce(y)
        comm.close()
    except fc.FlagcxError as error:
        return str(error)
    return "" if bool((x == 3).all()) and not y.any() else "wrong, and nothing was raised"
