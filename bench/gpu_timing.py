"""The time of a call on GPU arrays, by replays of a graph on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WARM_UP = 3


def replayed(
    comm: Any, cupy: Any, stream: Any, call: Callable[[], Any], calls: int, replays: int
) -> list[float]:
    """Microseconds a call for each replay of a graph of several calls, of the rank that took longest.

    Args:
        comm: The communicator.
        cupy: The CuPy module.
        stream: The stream, which is the current one.
        call: Makes the call; it has been made before.
        calls: Calls in the graph.
        replays: How often the graph is replayed, after three times that do not count.
    """
    stream.begin_capture()
    for _ in range(calls):
        call()
    graph = stream.end_capture()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for i in range(replays + _WARM_UP):
        stream.synchronize()
        comm.barrier()
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        if i >= _WARM_UP:
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / calls)
    return [max(each) for each in zip(*comm.allgather_object(times), strict=True)]
