"""The plans of compressed all-reduces, by the caller's ``compression=``."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns as now
from typing import Any

import numpy as np

from flagcx.compression.auto import AutoReduce, Decision, LinkProfile, named
from flagcx.compression.catalogue import Auto, codec_of
from flagcx.compression.feedback import Feedback
from flagcx.compression.link import measure_link, measure_speed
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.powersgd import PowerSGD
from flagcx.compression.reduces import reduce_of, with_shapes
from flagcx.compression.slot import Slot
from flagcx.dtypes import DType, Op, ReduceOp, dtype_of, resolve_op
from flagcx.errors import ArgumentError, ArrayError, OperationError
from flagcx.executor.host import Executor
from flagcx.profiler import OperationInfo
from flagcx.profiler.records import NO_CALL, Uncounted

_MOST_PLANS = 256
_MOST_TEXT = 80


class Compressor:
    """The plans of compressed calls over one executor.

    Args:
        executor: Runs the plans.
        device: Whether its arrays are on a GPU.
    """

    def __init__(self, executor: Executor, device: bool) -> None:
        self._executor = executor
        self.peers = Peers(executor, device)
        self._beside = Peers(executor, device, self.peers.scratch, beside=True) if device else self.peers
        self._plans: dict[tuple, CompressedPlan] = {}
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._link: LinkProfile | None = None

    def find(self, compression: Any, x: Any, op: Op, beside: bool = False) -> CompressedPlan:
        """Looks up or makes the plan of a call.

        Args:
            compression: As the caller names it.
            x: An array like those of the call.
            op: The operation.
            beside: Whether it runs beside a computation, to which it leaves most of the GPU.

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
        peers = self._beside if beside else self.peers
        key: tuple = x.size, dtype.code, resolved, peers.beside
        if slot is None:
            plans, codec = self._plans, codec_of(compression)
            key = (*key, codec)
        else:
            plans, codec = slot.plans, slot.codec
            key = (*key, self)
            self._slots.add(slot)
        shape = tuple(x.shape) if _uses_shape(codec) else None
        key = (shape, *key)
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plan = plans[key] = self._make(peers, codec, slot, x.size, shape, dtype, resolved)
        return plan

    def _make(
        self,
        peers: Peers,
        codec: Any,
        slot: Slot | None,
        count: int,
        shape: Any,
        dtype: DType,
        op: ReduceOp,
    ) -> CompressedPlan:
        slot = Slot(codec, residual=False, lasting=False) if slot is None else slot
        shapes = slot.shapes or (shape or (count,),)
        codec = with_shapes(codec, shapes)
        reduce = self._reduce(peers, codec, slot, count, shapes, op)
        scale = "" if op.scale is None else f" x {op.scale!r}"
        what = f"allreduce of {count} {dtype.name} by {op.name}{scale}, compressed: {codec!r}{slot.settings}"
        if shape is not None:
            what += f", of {_in_words(getattr(codec, 'shapes', shapes))}"
        return CompressedPlan(self._executor, peers, codec, slot, reduce, count, shape, dtype, what)

    def _reduce(
        self, peers: Peers, codec: Any, slot: Slot, count: int, shapes: Any, op: ReduceOp
    ) -> CodecReduce:
        common = peers, codec, count, op, slot
        if not isinstance(codec, Auto):
            return reduce_of(*common)
        by_name = {one.name: with_shapes(one, shapes) for one in map(codec_of, codec.allowed)}
        make = partial(self._reduce, peers, slot=slot, count=count, shapes=shapes, op=op)
        alike = peers.on_device, peers.size, slot.keeps, count
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
        shape: The shape of the caller's arrays, if it matters to the codec.
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
        shape: tuple[int, ...] | None,
        dtype: DType,
        what: str,
    ) -> None:
        self._peers, self._slot, self._codec, self._reduce = peers, slot, codec, reduce
        self._shape, self._what, self._count, self._itemsize = shape, what, count, dtype.numpy.itemsize
        self.sent_nbytes, self._place = 0, (peers.rank, peers.size)
        single = dtype.numpy == np.float32 or (dtype.numpy == np.float64 and codec.lossless)
        self._wide, self._narrow = not single, dtype.numpy.itemsize < 4  # where rounding may end at infinity
        self._ring, self._progress = executor.ring, executor.transport.progress or Uncounted()
        nbytes, transport = count * self._itemsize, executor.transport.name
        self._info = OperationInfo("allreduce", nbytes, dtype.name, "compressed", 1, codec.name, transport)

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Runs the all-reduce once, and records it with the bytes that it sent."""
        waited, start = self._progress.waited_ns, now()
        self._run(sendbuf, recvbuf)
        if self._ring is not None:
            waited = self._progress.waited_ns - waited
            self._ring.append((self._info, NO_CALL, start, now(), waited, 0, self.sent_nbytes))

    def _run(self, sendbuf: Any, recvbuf: Any) -> None:
        before, slot = self._peers.sent_nbytes, self._slot
        self._peers.enter(self._what, sendbuf, recvbuf)
        if slot.resumes:
            _agree_on_load(self._peers, slot)
        if slot.ranks() is not self._peers:
            slot.meet(self._peers)
        slot.place = self._place
        x = sendbuf.reshape(-1)
        y = x if recvbuf is sendbuf else recvbuf.reshape(-1)
        given, result = x, y
        if self._wide:
            given = result = self._peers.scratch.get("wide", x.size, np.float32, x)
            given[...] = x
        slot.begin(given, self._shape)
        try:
            self._reduce.run(given, result)
            if self._wide:
                y[...] = result
                slot.look(y)
        except BaseException:
            slot.undo()
            raise
        slot.end(y, self._reduce.waits, None if self._narrow else self._reduce.spoilt)
        self.sent_nbytes = self._peers.sent_nbytes - before

    def note(self, work: Any) -> None:
        """Takes note of a started call: until it ends, the slot's memory is neither saved nor set.

        A caller may drop the work at once. What runs it on the host keeps its future until it has ended.
        """
        self._slot.work = weakref.ref(getattr(work, "_future", work))

    def explain(self) -> Decision:
        """The codec of the plan, and the reason; all ranks must call it."""
        if isinstance(self._reduce, AutoReduce):
            return self._reduce.settle()
        return named(self._codec, self._count, self._peers.size, self._itemsize, self.sent_nbytes)


def _agree_on_load(peers: Peers, slot: Slot) -> None:
    """Compares what the ranks have loaded, at the first call after it.

    Raises:
        ArgumentError: The ranks have loaded states of different steps.
    """
    loaded = peers.numbers([slot.step, *slot.place]).tolist()
    steps = [step for step, *_ in loaded]
    if len(set(steps)) > 1:
        raise ArgumentError(
            f"ranks have loaded the slot {slot.key!r} of different steps: {steps}, by rank; load states that "
            f"were saved after the same step"
        )
    if all(place == [rank, peers.size] for rank, (_, *place) in enumerate(loaded)):
        return
    slot.drop_common()
    if slot.place != (peers.rank, peers.size):
        slot.drop_own()
        warnings.warn(
            f"rank {peers.rank} of {peers.size} has loaded the memory of slot {slot.key!r} of rank "
            f"{slot.place[0]} of {slot.place[1]}: its residual and its momentum are dropped, and begin anew "
            f"at zero; the number of steps and the factors of PowerSGD stay",
            RuntimeWarning,
            stacklevel=2,
        )


def _uses_shape(codec: Any) -> bool:
    """Whether arrays of one length and different shapes are compressed differently."""
    if isinstance(codec, Auto):
        return any(isinstance(codec_of(one), PowerSGD) for one in codec.allowed)
    return isinstance(codec, PowerSGD)


def _in_words(shapes: Sequence[tuple[int, ...]]) -> str:
    """Shapes, the same text for the same ones on every rank; of many the first, and a sum over all."""
    text = ", ".join(map(str, shapes))
    if len(text) <= _MOST_TEXT:
        return f"shape {text}"
    return f"{len(shapes)} shapes: {text[:_MOST_TEXT]}... ({zlib.crc32(text.encode()):08x})"


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
