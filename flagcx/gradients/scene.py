"""What the synchronizer finds out of where it runs: how long all-reduces take, so how large buckets are."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.dtypes import dtype_of, resolve_op
from flagcx.engine import Engine
from flagcx.selection.explanation import format_nbytes
from flagcx.selection.overlap import DEVICE_CALL_US, HOST_CALL_US, best_bucket_nbytes, step_us
from flagcx.selection.table import Table

if TYPE_CHECKING:
    from flagcx.communicator import Communicator

_SMALL_COUNT, _LARGE_COUNT = 1 << 10, 1 << 18
_TRIALS = 3
_LONG_S = 0.05


def choose_bucket_nbytes(
    comm: Communicator, engine: Engine, total_nbytes: int, compute_us: float | None
) -> tuple[int, str]:
    """Chooses the size of buckets. All ranks must call it; rank 0's word counts.

    Args:
        comm: The communicator.
        engine: What reduces most of the gradients.
        total_nbytes: Bytes of all gradients.
        compute_us: Time in which they become ready, in us; None if it is not known.

    Returns:
        The size in bytes, and why.
    """
    if comm.size == 1:
        return total_nbytes, "one rank: nothing is sent"
    time_us, source = _known(comm, engine)
    if time_us is None:
        small, large = (_measure_us(comm, engine, count) for count in (_SMALL_COUNT, _LARGE_COUNT))
        time_us, source = _line(small, large), "measured now"
    time_us = _behind(time_us, HOST_CALL_US if engine is comm._engine else DEVICE_CALL_US)
    chosen = best_bucket_nbytes(total_nbytes, time_us, compute_us)
    computed = time_us(total_nbytes) if compute_us is None else compute_us
    predicted = step_us(total_nbytes, chosen, time_us, computed)
    return chosen, (
        f"{source}: {format_nbytes(chosen)} take {time_us(chosen) / 1e3:.3g} ms and all gradients "
        f"{time_us(total_nbytes) / 1e3:.3g} ms; with {computed / 1e3:.3g} ms of computation a step takes "
        f"{predicted / 1e3:.3g} ms"
    )


def _behind(time_us: Callable[[float], float], call_us: float) -> Callable[[float], float]:
    return lambda nbytes: time_us(nbytes) + call_us


def _known(comm: Communicator, engine: Engine) -> tuple[Callable[[float], float] | None, str]:
    """Times that need no measuring, and where they come from."""
    link = getattr(engine.transport, "link", None)
    if link is not None:
        share = 2 * (comm.size - 1) / comm.size
        return (
            lambda nbytes: link.time_ns(share * nbytes, 2) / 1e3,
            f"on a link of {link.bandwidth_gb_per_s:g} GB/s",
        )
    table = comm._selector.table if engine is comm._engine else engine.selector.measured  # type: ignore[attr-defined]
    return _from_table(table), "by measured times"


def _from_table(table: Table | None) -> Callable[[float], float] | None:
    """Times from a table that was measured on this machine, where there is one that reaches far enough."""
    points = [] if table is None else table.measured.get("allreduce", ())
    known = [(point.nbytes, min(point.times_us.values())) for point in points if point.times_us]
    if len(known) < 2:
        return None
    sizes, times = np.array(known).T

    def time_us(nbytes: float) -> float:
        if nbytes > sizes[-1]:
            return float(times[-1] * nbytes / sizes[-1])
        return float(np.interp(nbytes, sizes, times))

    return time_us


def _line(small_us: float, large_us: float) -> Callable[[float], float]:
    """Time by size on a line through two measured times."""
    small, large = 4 * _SMALL_COUNT, 4 * _LARGE_COUNT
    slope = max(large_us - small_us, 1e-3) / (large - small)
    return lambda nbytes: max(small_us + (nbytes - small) * slope, small_us / 2)


def _measure_us(comm: Communicator, engine: Engine, count: int) -> float:
    """The time of an all-reduce of float32, as the slowest rank has it: the least of some."""
    x: Any = engine.transport.empty(count, np.dtype(np.float32))
    x[...] = 0
    single = dtype_of(np.float32)
    plan = engine.find("allreduce", count, single, resolve_op("sum", single), None, None, True)
    finish = getattr(engine.transport, "synchronize", None)
    best = float("inf")
    for _ in range(_TRIALS):
        comm.barrier()
        start = perf_counter()
        engine.run(plan, x, x)
        if finish is not None:
            finish()
        mine = perf_counter() - start
        best = min(best, max(comm.allgather_object(mine)))
        if best > _LONG_S:
            break
    return best * 1e6
