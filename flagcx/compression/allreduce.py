"""``compression=``: from the caller's word to the plan of a compressed all-reduce."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import perf_counter, process_time
from typing import Any

import numpy as np

from flagcx.compression.auto import Auto, AutoReduce, Decision, LinkProfile, measure_speed
from flagcx.compression.catalogue import codec_of
from flagcx.compression.codec import FixedRate, Scratch
from flagcx.compression.feedback import Feedback, Slot
from flagcx.compression.peers import Messages
from flagcx.compression.powersgd import PowerReduce, PowerSGD
from flagcx.compression.sparse_reduce import RandomKReduce, SparseReduce, TopKReduce
from flagcx.compression.topk import RandomK, Sparse, TopK
from flagcx.compression.two_step import TwoStep
from flagcx.dtypes import DType, Op, ReduceOp, dtype_of, resolve_op
from flagcx.errors import ArrayError, OperationError
from flagcx.executor.host import Executor
from flagcx.kernels.cuda import import_cupy
from flagcx.profiler import OperationInfo, RecordedPlan
from flagcx.transport.nccl.plans import check_alignment

_MOST_PLANS = 256
_TRIAL_COUNT = 1 << 18
_TRIALS = 3
_COPIES = 4  # how often a byte is read or written on its way through shared memory, at the least


class Compressor:
    """Plans of compressed calls over one executor.

    Args:
        executor: What runs them.
        device: Whether its arrays are on a GPU.
    """

    def __init__(self, executor: Executor, device: bool) -> None:
        self._executor, self._device = executor, device
        self.peers = ExecutorPeers(executor, device)
        self._plans: dict[tuple, CompressedPlan] = {}
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._link: LinkProfile | None = None

    def find(self, compression: Any, x: Any, op: Op) -> CompressedPlan:
        """Looks up or makes the plan of a call."""
        dtype = dtype_of(x.dtype)
        resolved = _check(dtype, resolve_op(op, dtype), self._device)
        if isinstance(compression, Feedback):
            compression = compression.slot()
        slot = compression if isinstance(compression, Slot) else None
        key: tuple = x.size, dtype.code, resolved
        if slot is None:
            plans, codec = self._plans, codec_of(compression)
            key = (*key, codec)
        else:
            plans, codec = slot.plans, slot.codec
            key = (*key, self)
            self._slots.add(slot)
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plan = plans[key] = self._make(codec, slot, x.size, dtype, resolved)
        return plan

    def _make(self, codec: Any, slot: Slot | None, count: int, dtype: DType, op: ReduceOp) -> CompressedPlan:
        slot = Slot(codec, residual=False, lasting=False) if slot is None else slot
        factor = 1 / self._executor.size if op.average else 1.0 if op.scale is None else op.scale
        reduce = self._reduce(codec, slot, count, factor)
        scale = "" if op.scale is None else f" x {op.scale!r}"
        what = f"allreduce of {count} {dtype.name} by {op.name}{scale}, compressed: {codec!r}"
        agree = None if self._device else partial(self._executor.agree, what)
        return CompressedPlan(self._executor, self.peers, codec, slot, reduce, count, dtype, agree)

    def _reduce(self, codec: Any, slot: Slot, count: int, factor: float) -> Any:
        peers = self.peers
        if isinstance(codec, FixedRate):
            return TwoStep(peers, codec, count, factor, slot, self._device)
        if isinstance(codec, TopK):
            return TopKReduce(peers, codec, factor, slot)
        if isinstance(codec, RandomK):
            return RandomKReduce(peers, codec, factor, slot)
        if isinstance(codec, Sparse):
            return SparseReduce(peers, codec, factor, slot)
        if isinstance(codec, PowerSGD):
            return PowerReduce(peers, codec, count, factor, slot)
        assert isinstance(codec, Auto)
        allowed = [codec_of(one) for one in codec.allowed]
        make = partial(self._reduce, slot=slot, count=count, factor=factor)
        by_name, speed = {c.name: c for c in allowed}, partial(measure_speed, device=self._device)
        return AutoReduce(peers, by_name, self.link, speed, make, slot, factor, count)

    def link(self) -> LinkProfile:
        """The link that the ranks have; measured once, by all of them together."""
        if self._link is None:
            self._link = _look(self._executor, self.peers, self._device)
        return self._link

    def close(self) -> None:
        """Ends the thread, and lets go of what slots remember of this communicator. Idempotent."""
        self.peers.close()
        self._plans.clear()
        for slot in self._slots:
            for key in [key for key in slot.plans if key[-1] is self]:
                del slot.plans[key]


class CompressedPlan:
    """One compressed all-reduce; see ``transport.base.Plan``.

    Args:
        executor: What runs it.
        peers: The ranks.
        codec: The codec.
        slot: Memory between calls.
        reduce: What reduces float32 arrays of one dimension.
        count: Elements.
        dtype: The element type of the caller's arrays.
        agree: Called by the first run, by all ranks, since codecs may write as many bytes and mean something
            else by them; nothing if None.
    """

    def __init__(
        self,
        executor: Executor,
        peers: ExecutorPeers,
        codec: Any,
        slot: Slot,
        reduce: Any,
        count: int,
        dtype: DType,
        agree: Callable[[], None] | None,
    ) -> None:
        self._peers, self._slot, self._codec, self._reduce = peers, slot, codec, reduce
        self._agree = agree
        single = dtype.numpy == np.float32 or (dtype.numpy == np.float64 and isinstance(codec, Sparse))
        self._wide = not single
        self._call: Callable[[Any, Any], object] = self._run
        progress = executor.transport.progress
        if executor.ring is not None and progress is not None:
            nbytes, transport = count * dtype.numpy.itemsize, executor.transport.name
            what = OperationInfo("allreduce", nbytes, dtype.name, "compressed", 1, codec.name, transport)
            self._call = RecordedPlan(
                FunctionPlan(self._run), what, executor.ring, progress, shared=False
            ).run

    def run(self, given: Any, result: Any) -> None:
        """See ``transport.base.Plan``."""
        self._call(given, result)

    def _run(self, given: Any, result: Any) -> None:
        self._peers.enter(given, result)
        if self._agree is not None:
            agree, self._agree = self._agree, None
            agree()
        x, y = given.reshape(-1), result.reshape(-1)
        if self._wide:
            wide = self._peers.scratch.get("wide", x.size, np.float32, x)
            wide[...] = x
            self._slot.begin(wide)
            self._reduce.run(wide, wide)
            y[...] = wide
        else:
            self._slot.begin(x)
            self._reduce.run(x, y)

    def explain(self) -> Decision:
        """See ``explain``."""
        if isinstance(self._reduce, AutoReduce):
            return self._reduce.settle()
        return Decision(self._codec.name, f"{self._codec.name}: named by the caller")


class FunctionPlan:
    """A function as a plan."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[Any, Any], object]) -> None:
        self._call = call

    def run(self, given: Any, result: Any) -> None:
        """See ``transport.base.Plan``."""
        self._call(given, result)


class ExecutorPeers:
    """The ranks of an executor, as compressed all-reduces see them; see ``flagcx.compression.peers.Peers``.

    Args:
        executor: Whose plans carry the parts.
        device: Whether its arrays are on a GPU, whose stream does what a thread does elsewhere.

    """

    def __init__(self, executor: Executor, device: bool) -> None:
        self.rank, self.size = executor.rank, executor.size
        self.scratch = Scratch()
        self._executor, self._device = executor, device
        self._thread: ThreadPoolExecutor | None = None
        self._bytes = dtype_of(np.uint8)

    def enter(self, *arrays: Any) -> None:
        """Puts the current stream of a GPU behind what other streams still do with the scratch arrays.

        Raises:
            ArrayError: A caller's array lies so that kernels cannot take it.
        """
        if self._device:
            check_alignment(arrays[0].dtype.alignment, *(array.data.ptr for array in arrays))
            self._executor.transport.transfer([], [])

    def alltoall(self, given: Any, result: Any) -> None:
        """See ``Peers``."""
        self._executor.find("alltoall", given.size // self.size, self._bytes).run(given, result)

    def allgather(self, given: Any, result: Any) -> None:
        """See ``Peers``."""
        self._executor.find("allgather", given.size, self._bytes).run(given, result)

    def allreduce(self, given: Any, result: Any) -> None:
        """See ``Peers``."""
        dtype = dtype_of(given.dtype)
        op, in_place = resolve_op("sum", dtype), given is result
        plan = self._executor.find("allreduce", given.size, dtype, op, None, None, in_place)
        plan.run(given, result)

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """See ``Peers``."""
        if sends or receives:
            self._executor.transport.transfer(sends, receives)

    def numbers(self, mine: Sequence[int]) -> np.ndarray:
        """See ``Peers``."""
        own = np.array(mine, np.int64)
        everybodys = np.empty((self.size, own.size), np.int64)
        plan = self._executor.find("allgather", own.size, dtype_of(np.int64))
        if not self._device:
            plan.run(own, everybodys.reshape(-1))
            return everybodys
        cupy = import_cupy()
        there = cupy.empty(everybodys.size, np.int64)
        plan.run(cupy.asarray(own), there)
        return there.get().reshape(everybodys.shape)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See ``Peers``."""
        progress = self._executor.transport.progress
        if progress is None:
            yield
            return
        before, progress.background = progress.background, True
        try:
            yield
        finally:
            progress.background = before

    def behind(self, call: Callable[[], object]) -> Any:
        """See ``Peers``."""
        if self._device:
            call()
            return _done()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="flagcx-compressed")
        return self._thread.submit(call)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _done() -> Future:
    future: Future = Future()
    future.set_result(None)
    return future


def _check(dtype: DType, op: ReduceOp, device: bool) -> ReduceOp:
    if dtype.kind != "float":
        raise ArrayError(
            f"compression works on floating-point numbers, and x has dtype {dtype.name}; leave it out"
        )
    if device and dtype.name not in ("float16", "float32", "float64"):
        raise ArrayError(
            f"arrays of dtype {dtype.name} on a GPU cannot be compressed further; leave compression out"
        )
    if op.name not in ("sum", "avg", "scaled_sum"):
        raise OperationError(
            f"compression needs op='sum', op='avg' or fc.scaled_sum(factor), got op={op.name!r}: codecs lose "
            f"what other operations depend on; leave compression out"
        )
    return op


def _look(executor: Executor, peers: ExecutorPeers, device: bool) -> LinkProfile:
    """Measures all-reduces, small and of 1 MiB; what the slowest rank needs counts."""
    cores = len(os.sched_getaffinity(0))
    crowd = max(1.0, executor.size / cores) if not device else 1.0
    link = executor.transport.link
    x = np.ones(_TRIAL_COUNT, np.float32)
    if device:
        x = import_cupy().asarray(x)
    small = min(_timed(peers, x[:2])[0] for _ in range(2 * _TRIALS))
    large, busy = min(_timed(peers, x) for _ in range(_TRIALS))
    small, large, busy_ppm = peers.numbers([int(1e9 * small), int(1e9 * large), int(1e6 * busy)]).max(axis=0)
    sent = 2 * (executor.size - 1) / executor.size * x.nbytes
    measured = max(sent, 1) / max(large - small, 1)
    if link is not None:
        measured = link.bandwidth_gb_per_s
    elif executor.transport.takes_cores:
        # The cores move the data themselves. Where others keep them busy, trials look slow, but coding, which
        # is measured alone, would be slowed as much.
        (copied,) = peers.numbers([int(1e6 * _copy_speed())]).min(axis=0)
        measured, busy_ppm = max(measured, copied / 1e6 / _COPIES / crowd), 1_000_000
    busy = 1.0 if device else min(busy_ppm / 1e6, 1.0)  # a stream codes and sends one after the other
    return LinkProfile(
        executor.size, float(measured), float(small) / 2e3, float(busy), crowd, link is not None
    )


def _copy_speed() -> float:
    """How fast this core copies 1 MiB, in GB/s."""
    given = np.ones(_TRIAL_COUNT, np.float32)
    result, best = np.empty_like(given), float("inf")
    for _ in range(4):
        start = perf_counter()
        np.copyto(result, given)
        best = min(best, perf_counter() - start)
    return given.nbytes / best / 1e9


def _timed(peers: ExecutorPeers, x: Any) -> tuple[float, float]:
    """Seconds of an all-reduce, and the share of them in which a core was at work."""
    start, work = perf_counter(), process_time()
    peers.allreduce(x, x)
    peers.numbers([0])
    elapsed = perf_counter() - start
    return elapsed, (process_time() - work) / elapsed
