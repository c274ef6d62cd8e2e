"""Finds the plan of an all-reduce of rows with an epilogue: one kernel, or all-reduce and epilogue."""

from __future__ import annotations

from functools import partial
from typing import Any

from flagcx.dtypes import OPS
from flagcx.executor.host import Executor
from flagcx.profiler import RecordedPlan
from flagcx.selection.candidates import Request
from flagcx.transport.base import DEVICE, Call, Plan
from flagcx.transport.rows import HostRows, Rows

_SUM = OPS["sum"]


def find_rows(executor: Executor, rows: Rows, in_place: bool, algorithm: str | None) -> Plan:
    """Looks up or compiles the plan of an all-reduce of rows.

    Args:
        executor: Runs it.
        rows: The operation.
        in_place: Whether the result takes the place of the rows.
        algorithm: As the caller names it; chosen if None.

    Returns:
        A plan that takes ``flagcx.transport.rows.RowArrays`` and the array for the result.

    Raises:
        ArgumentError: The algorithm does not serve all-reduces.
        CommunicatorError: The communicator is closed or broken.
    """
    cache, key = executor._cache, (rows, in_place, algorithm)
    plan = cache.plans.get(key)
    if plan is None:
        executor.check()
        cache.make_room()
        plan = cache.plans[key] = _compile(executor, rows, in_place, algorithm)
    return plan


def _compile(executor: Executor, rows: Rows, in_place: bool, algorithm: str | None) -> Plan:
    count, dtype, part_of = rows.count, rows.dtype, rows.describe()
    request = Request("allreduce", count * dtype.numpy.itemsize, executor.size, False, dtype, _SUM)
    selector = executor.selector
    choice = selector.choose(request) if algorithm is None else selector.choose_named(algorithm, request)
    add = partial(executor._make, "allreduce", count, dtype, _SUM, None, in_place, choice, part_of)
    transport: Any = executor.transport
    plan: Plan
    if transport.kind == DEVICE:
        call = None
        if choice.protocol:
            schedule = choice.build("allreduce", executor.size, None)
            call = Call(schedule, executor.rank, count, dtype, _SUM, in_place, choice.protocol, part_of)
        plan = transport.compile_rows(rows, call, add)
    else:
        plan = HostRows(rows, add())
    if executor.ring is None:
        return plan
    operation = executor._describe("allreduce", count, dtype, choice)
    return RecordedPlan(plan, operation, executor.ring, executor._progress)
