"""The ranks of ``flagcx bench``: verify and time one collective over a range of sizes.

Each time is the median over several rounds; a round is a batch of calls after a barrier, and its time is
that of its slowest rank. Each size begins with a call on fresh data, whose result is compared with NumPy's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.algorithms import Algorithm
from flagcx.algorithms.candidate import Candidate
from flagcx.cli.bench_oracle import BenchMessage, Buffers, has_place, storage_count
from flagcx.cli.bench_subjects import BenchSubject, check_compare, subjects
from flagcx.cli.bench_table import BenchRow, BenchTiming, sizes
from flagcx.dtypes import OPS, dtype_of, resolve_op
from flagcx.errors import ArgumentError, RankError
from flagcx.schedule.collectives import COLLECTIVES

if TYPE_CHECKING:
    from flagcx.communicator import Communicator

NAMES = tuple(name for name in COLLECTIVES if name != "barrier")
BATCH_S = 0.02
"""How long a batch should take, in seconds."""
_MOST_CALLS = 1024
_WARM_UP = 20
_LEAST_WARM_UP = 4
"""Calls with the same arrays after which a plan on a GPU certainly replays a graph."""


@dataclass(frozen=True, slots=True)
class BenchTask:
    """A measurement, in the words of the options of ``flagcx bench``; sizes are in bytes."""

    collective: str = "allreduce"
    begin: int = 8
    end: int = 64 << 20
    factor: int = 4
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str | None = None
    symmetric: bool = False
    gpu: bool = False
    rounds: int = 7
    compare: tuple[str, ...] = ()

    @property
    def algorithms(self) -> Sequence[str | None]:
        """The algorithms that are named, or None alone for flagcx's choice."""
        return self.algorithm.split(",") if self.algorithm else [None]

    def check(self) -> None:
        """Raises ArgumentError for unknown names and for sizes that are none or don't end."""
        if self.collective not in NAMES:
            raise ArgumentError(
                f"collective={self.collective!r} is not known; expected one of {', '.join(NAMES)}"
            )
        if self.op not in OPS:
            raise ArgumentError(f"op={self.op!r} is not known; expected one of {', '.join(OPS)}")
        resolve_op(self.op, dtype_of(self.dtype))
        sizes(self.begin, self.end, self.factor)
        check_compare(self)

    def check_ranks(self, size: int) -> None:
        """Checks the task for ``size`` ranks, before any is started or sends anything.

        Raises:
            ArgumentError: There is no such algorithm, or it does not serve so many ranks.
            RankError: The root is no rank.
        """
        root = self._root(size)
        for name in self.algorithms:
            if name is not None and not (self.gpu and name == Algorithm.NATIVE):
                Candidate.parse(name).build(self.collective, size, root)

    def _root(self, size: int) -> int | None:
        if not COLLECTIVES[self.collective].rooted:
            return None
        if not 0 <= self.root < size:
            raise RankError(f"root {self.root} is no rank; expected 0 to {size - 1}")
        return self.root

    def message(self, comm: Communicator, nbytes: int) -> BenchMessage:
        """The collective and its message at one size."""
        kind, dtype = COLLECTIVES[self.collective], dtype_of(self.dtype)
        count = nbytes // dtype.numpy.itemsize // (comm.size if kind.blocks else 1)
        op = resolve_op(self.op, dtype) if kind.reduces else None
        return BenchMessage(self.collective, comm.size, self._root(comm.size), count, dtype, op)


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
