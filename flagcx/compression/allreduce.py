"""The plans of compressed all-reduces, by the caller's ``compression=``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from flagcx.compression.auto import AutoReduce, Decision, LinkProfile, named
from flagcx.compression.catalogue import Auto, codec_of
from flagcx.compression.feedback import Feedback
from flagcx.compression.link import measure_link, measure_speed
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.reduces import reduce_of
from flagcx.compression.slot import Slot
from flagcx.compression.topk import Sparse
from flagcx.dtypes import DType, Op, ReduceOp, dtype_of, resolve_op
from flagcx.errors import ArrayError, OperationError
from flagcx.executor.host import Executor
from flagcx.profiler import OperationInfo, RecordedPlan
from flagcx.profiler.records import Uncounted

_MOST_PLANS = 256


class Compressor:
    """The plans of compressed calls over one executor.

    Args:
        executor: Runs the plans.
        device: Whether its arrays are on a GPU.
    """

    def __init__(self, executor: Executor, device: bool) -> None:
        self._executor = executor
        self.peers = Peers(executor, device)
        self._plans: dict[tuple, CompressedPlan] = {}
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._link: LinkProfile | None = None

    def find(self, compression: Any, x: Any, op: Op) -> CompressedPlan:
        """Looks up or makes the plan of a call.

        Raises:
            ArgumentError: ``compression`` is not known.
            ArrayError: The dtype of ``x`` can't be compressed.
            OperationError: The operation is not a sum or average.
        """
        dtype = dtype_of(x.dtype)
        resolved = resolve_op(op, dtype)
        _check(dtype, resolved, self.peers.on_device)
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
        return CompressedPlan(self._executor, self.peers, codec, slot, reduce, count, dtype, what)

    def _reduce(self, codec: Any, slot: Slot, count: int, factor: float) -> CodecReduce:
        if not isinstance(codec, Auto):
            return reduce_of(self.peers, codec, count, factor, slot)
        by_name = {one.name: one for one in map(codec_of, codec.allowed)}
        make = partial(self._reduce, slot=slot, count=count, factor=factor)
        alike = self.peers.on_device, self.peers.size, slot.keeps, count
        common = self.peers, codec, count, factor, slot
        return AutoReduce(*common, by_name, self._measured_link, lambda one: measure_speed(one, *alike), make)

    def _measured_link(self) -> LinkProfile:
        """The link between the ranks; measured once, by all of them together."""
        if self._link is None:
            self._link = measure_link(self.peers, self._executor.transport)
        return self._link

    def close(self) -> None:
        """Ends the thread, and removes the plans that slots keep for this communicator."""
        self.peers.close()
        self._plans.clear()
        for slot in self._slots:
            for key in [key for key in slot.plans if key[-1] is self]:
                del slot.plans[key]


class CompressedPlan:
    """The plan of one compressed all-reduce.

    Args:
        executor: Runs it.
        peers: The ranks.
        codec: The codec.
        slot: Memory between calls.
        reduce: The all-reduce of the codec.
        count: Elements.
        dtype: The element type of the caller's arrays.
        what: The all-reduce in words. The ranks' messages are compared by it, since two codecs may encode
            an array in as many bytes.

    Attributes:
        sent_nbytes: Bytes that this rank sent in the last run.
    """

    def __init__(
        self,
        executor: Executor,
        peers: Peers,
        codec: Any,
        slot: Slot,
        reduce: CodecReduce,
        count: int,
        dtype: DType,
        what: str,
    ) -> None:
        self._peers, self._slot, self._codec, self._reduce = peers, slot, codec, reduce
        self._what, self._count, self._itemsize = what, count, dtype.numpy.itemsize
        self.sent_nbytes = 0
        single = dtype.numpy == np.float32 or (dtype.numpy == np.float64 and isinstance(codec, Sparse))
        self._wide = not single
        self._call: Callable[[Any, Any], object] = self._run
        self._ring = executor.ring
        if executor.ring is not None:
            nbytes, transport = count * self._itemsize, executor.transport.name
            info = OperationInfo("allreduce", nbytes, dtype.name, "compressed", 1, codec.name, transport)
            progress = executor.transport.progress or Uncounted()
            self._call = RecordedPlan(
                FunctionPlan(self._run), info, executor.ring, progress, shared=False
            ).run

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Runs the all-reduce once."""
        self._call(sendbuf, recvbuf)
        if self._ring is not None:
            self._ring.mark_sent(self.sent_nbytes)

    def _run(self, sendbuf: Any, recvbuf: Any) -> None:
        before = self._peers.sent_nbytes
        self._peers.enter(self._what, sendbuf, recvbuf)
        x, y = sendbuf.reshape(-1), recvbuf.reshape(-1)
        if self._wide:
            wide = self._peers.scratch.get("wide", x.size, np.float32, x)
            wide[...] = x
            self._slot.begin(wide)
            self._reduce.run(wide, wide)
            y[...] = wide
        else:
            self._slot.begin(x)
            self._reduce.run(x, y)
        self.sent_nbytes = self._peers.sent_nbytes - before

    def explain(self) -> Decision:
        """The codec of the plan, and the reason; all ranks must call it."""
        if isinstance(self._reduce, AutoReduce):
            return self._reduce.settle()
        return named(self._codec, self._count, self._peers.size, self._itemsize, self.sent_nbytes)


class FunctionPlan:
    """A function of two arrays as a plan."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[[Any, Any], object]) -> None:
        self.run: Any = run


def _check(dtype: DType, op: ReduceOp, device: bool) -> None:
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
