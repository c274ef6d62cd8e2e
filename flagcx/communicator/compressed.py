"""``compression=``: from the caller's word to the plan of a compressed all-reduce."""

from __future__ import annotations

from typing import Any

from flagcx.arguments import untangle
from flagcx.communicator.buffers import buffers_of
from flagcx.communicator.caller import Caller
from flagcx.compression.allreduce import Compressor
from flagcx.compression.auto import Decision
from flagcx.dtypes import Op
from flagcx.errors import ArgumentError
from flagcx.executor.host import Executor
from flagcx.executor.staging import FunctionPlan, stage
from flagcx.executor.work import Work
from flagcx.fusion.group import Pending
from flagcx.transport.base import Plan


def allreduce(
    comm: Caller, x: Any, op: Op, out: Any, algorithm: str | None, compression: Any, async_op: bool
) -> Any:
    """The all-reduce of ``comm`` with ``compression`` not None; see ``Communicator.allreduce``.

    Raises:
        ArgumentError: No codec has that name, or an algorithm is given too.
        ArrayError: The array is not of floating-point numbers.
        OperationError: The operation is not a sum or average.
    """
    if algorithm is not None:
        raise ArgumentError(
            f"algorithm={str(algorithm)!r} and compression={compression!r} exclude each other: a compressed "
            f"all-reduce has an algorithm of its own"
        )
    if isinstance(x, (list, tuple)):
        raise ArgumentError(
            "a list of arrays cannot be compressed in one call; call allreduce for each, with a slot of its "
            "own, or put the arrays end to end"
        )
    executor = comm.executor_of(x)
    sendbuf, recvbuf, _, value = buffers_of(executor, "allreduce", None, x, out)
    plan: Plan
    plan = compressed = compressor_of(comm, executor).find(compression, sendbuf, op)
    staging = stage(executor, sendbuf, recvbuf)
    if staging is not None:
        sendbuf, recvbuf, plan = staging.sendbuf, staging.recvbuf, staging.around(plan)
    sendbuf, in_place = untangle("allreduce", comm.rank, sendbuf, recvbuf)
    if in_place:
        sendbuf = recvbuf
    if comm._group is not None:
        return comm.put_off(Pending(lambda: executor.run(plan, sendbuf, recvbuf)), async_op, value)
    result = comm.run(executor, plan, sendbuf, recvbuf, value, async_op, "allreduce")
    if async_op and isinstance(result, Work):
        compressed.note(result)
    return result


def explain(comm: Caller, x: Any, compression: Any) -> Decision:
    """What ``compression`` does with an all-reduce of ``x``, and why. All ranks must call it."""
    executor = comm.executor_of(x)
    plan = compressor_of(comm, executor).find(compression, executor.take(x, "x", False), "sum")
    found: list[Decision] = []
    executor.run(FunctionPlan(lambda *_: found.append(plan.explain())), None, None)
    return found[0]


def compressor_of(comm: Caller, executor: Executor) -> Compressor:
    """The plans of compressed calls of a communicator, for one kind of array."""
    found = comm._compressors.get(id(executor))
    if found is None:
        found = comm._compressors[id(executor)] = Compressor(executor, executor is comm._device)
        comm.at_close(found.close)  # type: ignore[attr-defined]
    return found
