"""The size of buckets on this machine, by the time of its all-reduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.arguments import format_nbytes
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.executor.host import Executor
from flagcx.gradients.buckets import Gradient, plan_beside
from flagcx.gradients.overlap import DEVICE_CALL_US, HOST_CALL_US, best_bucket_nbytes, step_us
from flagcx.kernels.cuda import import_cupy
from flagcx.selection.table import Table
from flagcx.transport.base import Plan

if TYPE_CHECKING:
    from flagcx.communicator import Communicator

_COUNTS = (1 << 10, 1 << 18)
_DEVICE_COUNTS = (1 << 14, 1 << 18, 1 << 22)
"""On a GPU the second takes hardly longer than the first: only the third shows the speed of the link."""
_PUT_OFF_NBYTES = 4 << 20
_TRIALS = 3
_DEVICE_CALLS = 5
_LONG_S = 0.05


def overlap_pays(executor: Executor, cores_of_ranks: Sequence[AbstractSet[int]]) -> bool:
    """Whether reducing beside a computation gains time, or only takes cores from it.

    Where the transport takes cores, all ranks are on one host.
    """
    spare = len(set().union(*cores_of_ranks)) >= 2 * len(cores_of_ranks)
    return spare or not executor.transport.takes_cores


def choose_bucket_nbytes(
    comm: Communicator, executor: Executor, total_nbytes: int, compute_us: float | None, overlap: bool = True
) -> tuple[int, str]:
    """Chooses the size of buckets. All ranks must call it; the choice of rank 0 holds.

    Args:
        comm: The communicator.
        executor: Reduces most of the gradients.
        total_nbytes: Bytes of all gradients.
        compute_us: Time in which they become ready, in us; None if it is not known.
        overlap: Whether they are reduced meanwhile, or after all are ready.

    Returns:
        The size in bytes, and the reason.
    """
    if comm.size == 1:
        return total_nbytes, "one rank: nothing is sent"
    if not overlap:
        nbytes = comm.fusion_of(executor).packer.limits.message_nbytes
        return max(nbytes, _PUT_OFF_NBYTES), "few: nothing is reduced beside the computation"
    on_device = executor is not comm._host
    time_us, source = _known(comm, executor)
    if time_us is None:
        counts, measure = (_DEVICE_COUNTS, _measure_on_device) if on_device else (_COUNTS, _measure)
        points = [(4 * count, measure(comm, executor, count)) for count in counts]
        time_us, source = through(points), "measured now"
    call_us = DEVICE_CALL_US if on_device else HOST_CALL_US

    def called_us(nbytes: float) -> float:
        return time_us(nbytes) + call_us

    chosen = best_bucket_nbytes(total_nbytes, called_us, compute_us)
    computed = called_us(total_nbytes) if compute_us is None else compute_us
    predicted = step_us(total_nbytes, chosen, called_us, computed)
    return chosen, (
        f"{source}: {format_nbytes(chosen)} take {called_us(chosen) / 1e3:.3g} ms and all gradients "
        f"{called_us(total_nbytes) / 1e3:.3g} ms; with {computed / 1e3:.3g} ms of computation a step takes "
        f"{predicted / 1e3:.3g} ms"
    )


def _known(comm: Communicator, executor: Executor) -> tuple[Callable[[float], float] | None, str]:
    """Times that are known without a measurement, and their source."""
    link = executor.transport.link
    if link is not None:
        share = 2 * (comm.size - 1) / comm.size
        return (
            lambda nbytes: link.time_ns(share * nbytes, 2) / 1e3,
            f"on a link of {link.bandwidth_gb_per_s:g} GB/s",
        )
    table = executor.selector.table
    return _from_table(table), "by measured times"


def _from_table(table: Table | None) -> Callable[[float], float] | None:
    """Times from a tuning table of this machine, if it has at least two sizes."""
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


def through(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Time by size on lines through measured times.

    Args:
        points: Sizes in bytes and times in us, by size.

    Returns:
        A function that extends the outer lines beyond the points.

    Example:
        >>> time_us = through([(0, 5), (100, 6), (200, 16)])
        >>> time_us(50), time_us(300)
        (5.5, 26.0)
    """
    sizes, times = np.array(points, float).T
    slopes = np.maximum(np.diff(times), 1e-3) / np.diff(sizes)

    def time_us(nbytes: float) -> float:
        line = min(max(int(np.searchsorted(sizes, nbytes)) - 1, 0), len(slopes) - 1)
        return max(float(times[line] + (nbytes - sizes[line]) * slopes[line]), float(times[0]) / 2)

    return time_us


def _measure(comm: Communicator, executor: Executor, count: int) -> float:
    """The time of an all-reduce of float32 in us."""
    x: Any = executor.transport.empty(count, np.dtype(np.float32))
    x[...] = 0
    plan = _plan(executor, count)

    def seconds() -> float:
        start = perf_counter()
        executor.run(plan, x, x)
        return perf_counter() - start

    return _agreed_us(comm, seconds)


def _measure_on_device(comm: Communicator, executor: Executor, count: int) -> float:
    """The same by the clock of a GPU: a call returns long before its all-reduce has ended."""
    cupy = import_cupy()
    x = cupy.zeros(count, cupy.float32)
    plan = _plan(executor, count)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def seconds() -> float:
        start.record()
        for _ in range(_DEVICE_CALLS):
            executor.run(plan, x, x)
        end.record()
        executor.transport.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) / _DEVICE_CALLS / 1e3

    return _agreed_us(comm, seconds)


def _plan(executor: Executor, count: int) -> Plan:
    single = dtype_of(np.float32)
    return plan_beside(executor, count, single, resolve_op("sum", single))


def _agreed_us(comm: Communicator, seconds: Callable[[], float]) -> float:
    """The least of some trials, each as the slowest rank has it; one trial if it is long."""
    best = float("inf")
    for _ in range(_TRIALS):
        comm.barrier()
        best = min(best, max(comm.allgather_object(seconds())))
        if best > _LONG_S:
            break
    return best * 1e6


def agree_on_size(
    comm: Communicator,
    gradients: Sequence[Gradient],
    executors: Sequence[Executor],
    overlaps: Sequence[bool],
    backward_us: float,
) -> tuple[int, str]:
    """The size of a bucket that rank 0 chooses, in bytes, and the reason. All ranks must call it.

    Args:
        comm: The communicator.
        gradients: The gradients.
        executors: What runs the calls of each.
        overlaps: Whether each is reduced beside the computation.
        backward_us: The time in which they became ready, in us.
    """
    total = sum(gradient.nbytes for gradient in gradients)
    largest = max(range(len(gradients)), key=lambda number: gradients[number].nbytes)
    compute_us = backward_us if executors[largest] is comm._host else None
    choice = choose_bucket_nbytes(comm, executors[largest], total, compute_us, overlaps[largest])
    return comm.broadcast_object(choice)
