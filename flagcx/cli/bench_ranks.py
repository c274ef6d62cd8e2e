"""The ranks of ``flagcx bench``: verify and time one collective over a range of sizes.

Each time is the median over several rounds; a round is a batch of calls after a barrier, and its time is
that of its slowest rank. Each size begins with a call on fresh data, whose result is compared with NumPy's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.cli.bench_oracle import BenchMessage, Buffers, has_place, storage_count
from flagcx.cli.bench_subjects import BenchSubject, subjects
from flagcx.cli.bench_table import BenchRow, BenchTiming, sizes
from flagcx.cli.bench_task import BenchTask

if TYPE_CHECKING:
    from flagcx.communicator import Communicator

BATCH_S = 0.02
"""How long a batch should take, in seconds."""
_MOST_CALLS = 1024
_WARM_UP = 20
_LEAST_WARM_UP = 4
"""Calls with the same arrays after which a plan on a GPU certainly replays a graph."""


class ArraySource:
    """Makes the arrays of a task, and waits until calls on them are over.

    Attributes:
        module: NumPy or CuPy.
    """

    def __init__(self, comm: Communicator, task: BenchTask) -> None:
        self._comm, self._symmetric, self._gpu = comm, task.symmetric, task.gpu
        self.module: Any = np
        if task.gpu:
            from flagcx.kernels.cuda import load_cupy

            self.module = load_cupy()

    def storage(self, count: int, dtype: np.dtype) -> Any:
        """An array of so many elements."""
        if self._symmetric:
            return self._comm.empty(count, dtype, "gpu" if self._gpu else "cpu")
        # As bytes: CuPy does not make arrays of all of NumPy's dtypes.
        return self.module.zeros(count * dtype.itemsize, np.uint8).view(dtype)

    def settle(self) -> None:
        """Waits until all enqueued work is done."""
        if self._gpu:
            self.module.cuda.get_current_stream().synchronize()

    def describe(self) -> str:
        """The kind of arrays, in words."""
        kind = "CuPy" if self._gpu else "NumPy"
        return f"{kind} arrays of comm.empty" if self._symmetric else f"{kind} arrays"


def time_calls(comm: Any, arrays: ArraySource, call: Callable, rounds: int) -> float:
    """The time of a call in us: the median over the rounds, where the slowest rank's time counts."""

    def batch(calls: int) -> float:
        for _ in range(max(min(calls, _WARM_UP), _LEAST_WARM_UP if arrays.module is not np else 1)):
            call()
        arrays.settle()
        comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        arrays.settle()
        seconds = (time.perf_counter() - start) / calls
        return float(comm.allreduce(np.array([seconds]), op="max")[0])

    calls = 1
    while (seconds := batch(calls)) * calls < BATCH_S / 5 and calls < _MOST_CALLS:
        calls *= 4
    calls = max(1, math.ceil(BATCH_S / seconds))
    return 1e6 * statistics.median(batch(calls) for _ in range(rounds))


def measure(
    comm: Any,
    arrays: ArraySource,
    message: BenchMessage,
    storage: Any,
    in_place: bool,
    subject: BenchSubject,
    rounds: int,
) -> BenchTiming | None:
    """Verifies one call on fresh data, then times calls on zeros, which never overflow.

    Returns:
        The timing; None where the subject has no such form.
    """
    buffers = Buffers(message, comm.rank, storage, in_place, arrays.module)
    call = subject.bind(message, buffers, in_place)
    if call is None:
        return None
    buffers.fill()
    comm.barrier()
    call()
    arrays.settle()
    wrong = comm.allreduce(np.array([buffers.count_wrong()]))
    storage.view(np.uint8)[:] = 0
    return BenchTiming(time_calls(comm, arrays, call, rounds), int(wrong[0]))


def rows(
    comm: Communicator,
    task: BenchTask,
    arrays: ArraySource,
    compared: Sequence[BenchSubject] | None = None,
) -> Iterator[BenchRow]:
    """Measures every size, smallest first, all subjects in turn. All ranks must call it."""
    for nbytes in sizes(task.begin, task.end, task.factor):
        message = task.message(comm, nbytes)
        storage = arrays.storage(storage_count(message, comm.rank), message.dtype.numpy)
        for subject in subjects(comm, task) if compared is None else compared:
            out_of_place, in_place = (
                measure(comm, arrays, message, storage, place, subject, task.rounds) if has else None
                for place, has in zip((False, True), has_place(message), strict=True)
            )
            yield BenchRow(message, out_of_place, in_place, subject.name)
