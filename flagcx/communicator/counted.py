"""An alltoall whose counts lie on the GPU: nothing of the host waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.communicator.caller import Caller, refuse_async
from flagcx.dtypes import dtype_of
from flagcx.errors import ArgumentError, ArrayError
from flagcx.fusion.group import Pending
from flagcx.transport.base import Plan

if TYPE_CHECKING:
    from flagcx.executor.device import DeviceExecutor

_COUNT = np.dtype(np.int64)


def counted_alltoall(
    comm: Caller, x: Any, sent: Any, taken: Any, out: Any, algorithm: str | None, async_op: bool
) -> Any:
    """Implements ``alltoallv`` for counts on the GPU; see there.

    Raises:
        ArgumentError: ``out`` is missing, or the counts are no ``size`` integers on the GPU.
        ArrayError: An array is not contiguous, or of another dtype.
    """
    device = comm.device_executor()
    key = "counted", getattr(x, "dtype", None), algorithm
    plan = None if async_op else device.quick.get(key)
    if plan is not None and _are_plain(device, comm.size, x, out, sent, taken):
        device.run(plan, (x, sent), (out, taken))
        return out
    if out is None:
        raise ArgumentError("alltoallv with counts on the GPU needs out=: the host does not know its size")
    x, out = device.take(x, "x", False), device.take(out, "out", True)
    for name, array in (("x", x), ("out", out)):
        if not device.is_plain(array):
            raise ArrayError(f"{name} of an alltoallv with counts on the GPU must be contiguous; pass a copy")
    if out.dtype != x.dtype:
        raise ArrayError(f"out has dtype {out.dtype}, expected {x.dtype}")
    sent = _counts(comm, sent, "send_counts")
    if taken is None:
        if comm._group is not None:
            raise ArgumentError(
                "alltoallv inside comm.group() needs receive_counts=: calls of a group run at its end"
            )
        taken = comm.call("alltoall", sent)
    taken = _counts(comm, taken, "receive_counts")
    if np.may_share_memory(x, out):
        x = x.copy()
    plan = _plan(comm, x, algorithm)
    if comm._group is not None:
        refuse_async(async_op)
        return comm.put_off(Pending(lambda: device.run(plan, (x, sent), (out, taken))), False, out)
    device.remember(key, plan)
    return comm.run(device, plan, (x, sent), (out, taken), out, async_op, "alltoallv")


def _are_plain(device: DeviceExecutor, size: int, x: Any, out: Any, sent: Any, taken: Any) -> bool:
    """Whether arrays need no closer look: on the GPU, in order, apart, and of the dtypes that they need."""
    kind, contiguous = device.array_class, device.is_contiguous
    return (
        x.__class__ is kind
        and sent.__class__ is kind
        and taken.__class__ is kind
        and sent.dtype == _COUNT
        and taken.dtype == _COUNT
        and sent.size == taken.size == size
        and contiguous(x)
        and contiguous(sent)
        and contiguous(taken)
        and device.is_apart(out, x)
        and bool(out.dtype == x.dtype)
    )


def _counts(comm: Caller, counts: Any, name: str) -> Any:
    array = comm.device_executor().take(counts, name, False)
    if array.dtype.kind not in "iu" or array.size != comm.size:
        raise ArgumentError(
            f"{name} is an array of {array.size} {array.dtype}; expected {comm.size} integers there, one "
            f"for each rank"
        )
    return array.reshape(-1).astype(_COUNT, copy=False)


def _plan(comm: Caller, x: Any, algorithm: str | None) -> Plan:
    device = comm.device_executor()
    dtype = dtype_of(x.dtype)
    if device.transport.peers is None:
        return _CountsRead(comm, dtype, algorithm)
    return device.find("alltoall", (), dtype, algorithm=algorithm or "direct")


class _CountsRead:
    """The call where NCCL carries it: the host waits for the counts."""

    def __init__(self, comm: Caller, dtype: Any, algorithm: str | None) -> None:
        self._comm, self._dtype, self._algorithm = comm, dtype, algorithm

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Reads the counts, and runs the call with them."""
        (x, sent), (out, taken) = sendbuf, recvbuf
        device = self._comm.device_executor()
        counts = tuple(sent.get().tolist()), tuple(taken.get().tolist())
        for name, array, few in (("send_counts", x, counts[0]), ("receive_counts", out, counts[1])):
            if min(few) < 0 or sum(few) > array.size:
                raise ArgumentError(f"{name} is {list(few)}, and the array has {array.size} elements")
        device.find("alltoall", counts, self._dtype, algorithm=self._algorithm).run(
            x.reshape(-1)[: sum(counts[0])], out.reshape(-1)[: sum(counts[1])]
        )
