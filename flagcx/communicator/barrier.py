"""The collective without arrays: ranks, or streams of GPUs, wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.communicator.caller import Caller
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import ArgumentError
from flagcx.fusion.group import Pending


def barrier(comm: Caller, *, stream: Any = None) -> None:
    """Waits until every rank has come.

    Args:
        stream: A stream of a GPU, which then waits instead of the host: what is enqueued on it later begins
            when the streams of all ranks have come to their barrier.
    """
    if stream is not None:
        _barrier_on(comm, stream)
        return
    executor = comm._host
    unsigned = dtype_of(np.uint8)
    plan = executor.find("barrier", 0, unsigned, resolve_op("max", unsigned))
    if comm._group is not None:
        comm.put_off(Pending(lambda: executor.run(plan, None, None)), False, None)
    else:
        executor.run(plan, None, None)


def _barrier_on(comm: Caller, stream: Any) -> None:
    if comm._group is not None:
        raise ArgumentError("barrier(stream=) has no meaning inside comm.group(), whose calls run at its end")
    executor, unsigned = comm.device_executor(), dtype_of(np.uint8)
    with stream:
        plan = executor.find("barrier", 0, unsigned, resolve_op("max", unsigned))
        executor.run(plan, None, None)
