"""What the scripts for GPUs have in common: what they need, what they ran on, and the time of a call."""

from __future__ import annotations

import contextlib
import platform
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from flagcx.config import environment

_WARM_UP = 3


def need_gpu() -> None:
    """Ends the script with a line that says what to install, where arrays on GPUs cannot be made."""
    from flagcx.errors import MissingDependencyError
    from flagcx.kernels.cuda import load_cupy

    try:
        load_cupy()
    except MissingDependencyError as error:
        sys.exit(str(error))


def versions() -> dict[str, Any]:
    """What is measured, and on what."""
    import cupy
    from cupy.cuda import nccl

    runtime = cupy.cuda.runtime
    found: dict[str, Any] = {"python": platform.python_version(), "numpy": np.__version__}
    found |= {"cupy": cupy.__version__, "nccl": nccl.get_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    found |= {"gpu": runtime.getDeviceProperties(0)["name"].decode(), "gpus": runtime.getDeviceCount()}
    found["driver"] = runtime.driverGetVersion()
    found["nccl_environment"] = {k: v for k, v in environment().items() if k.startswith("NCCL_")}
    return found


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
