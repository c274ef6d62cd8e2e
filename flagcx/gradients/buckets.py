"""Buckets: gradients that are packed, reduced and unpacked together."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flagcx.dtypes import DType, ReduceOp, dtype_of, resolve_op
from flagcx.executor.host import Executor
from flagcx.executor.staging import PlainArrays
from flagcx.executor.work import Work
from flagcx.fusion.fuse import Packing
from flagcx.kernels.pack import ALIGNMENT
from flagcx.transport.base import Plan

if TYPE_CHECKING:
    from flagcx.communicator import Communicator

ALONE_NBYTES = MappingProxyType({"host": 512 << 10, "device": 16 << 20})
"""By place: a larger gradient is not packed; that would take longer than the call that it saves."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The properties of a gradient that every step shares.

    Attributes:
        name: Its name, or its number in a list.
        shape: Its shape.
        dtype: Its dtype's name.
        nbytes: Its size in bytes.
        place: "host" or "device": buckets hold gradients of one dtype and place.
    """

    name: Hashable
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    place: str = "host"

    @property
    def goes_alone(self) -> bool:
        """Whether it is too large to be packed with others."""
        return self.nbytes > ALONE_NBYTES[self.place]

    def __str__(self) -> str:
        return f"{self.name!r} of shape {self.shape} and dtype {self.dtype}"


def form_buckets(
    order: Sequence[int], gradients: Sequence[Gradient], bucket_nbytes: int
) -> list[tuple[int, ...]]:
    """Puts the numbers of gradients, in the order in which they become ready, into buckets.

    A bucket has one dtype and place, and is closed before it grows beyond ``bucket_nbytes``. A larger
    gradient, and one that is not worth packing, has its own bucket. Buckets are in the order of their last
    gradients, in which they become full.

    Example:
        >>> sizes = (40, 30, 80, 10)
        >>> form_buckets([3, 2, 1, 0], [Gradient(i, (n,), "uint8", n) for i, n in enumerate(sizes)], 100)
        [(3, 2), (1, 0)]
    """
    open_buckets: dict[tuple, list[int]] = {}
    filled: dict[tuple, int] = {}
    done: list[list[int]] = []
    for number in order:
        gradient = gradients[number]
        if gradient.goes_alone:
            done.append([number])
            continue
        kind = gradient.dtype, gradient.place
        bucket = open_buckets.get(kind)
        if bucket is None or filled[kind] + gradient.nbytes > bucket_nbytes:
            bucket = open_buckets[kind] = []
            done.append(bucket)
            filled[kind] = 0
        bucket.append(number)
        filled[kind] += gradient.nbytes
    place = {number: at for at, number in enumerate(order)}
    done.sort(key=lambda members: place[members[-1]])
    return [tuple(members) for members in done]


def plan_beside(executor: Executor, count: int, dtype: DType, op: ReduceOp) -> Plan:
    """The plan of an all-reduce in place that leaves room for a computation at the same time."""
    return executor.beside(executor.find("allreduce", count, dtype, op, None, None, True))


class Bucket:
    """Some gradients that are reduced together.

    Args:
        members: Their numbers.
        executor: Runs the all-reduce.
        packing: Puts them end to end; None for a single gradient, which is reduced in place.
        plan: The all-reduce of the packed message, or of the single gradient.
        overlap: Whether it is reduced beside the computation, or only in ``wait``.
        note: Is told of the work of each all-reduce that is started.

    Attributes:
        left: Number of gradients that are not ready yet in this step.
        work: The all-reduce, once it has been started in this step.
    """

    __slots__ = ("_note", "_put_off", "executor", "left", "members", "overlap", "packing", "plan", "work")

    def __init__(
        self,
        members: tuple[int, ...],
        executor: Executor,
        packing: Packing | None,
        plan: Plan,
        overlap: bool = True,
        note: Callable[[Work], object] | None = None,
    ) -> None:
        self._note = note
        self.members, self.executor, self.packing, self.plan = members, executor, packing, plan
        self.overlap = overlap
        self.left = len(members)
        self.work: Work | None = None
        self._put_off: Sequence[Any] = ()

    def start(self, gradients: Sequence[Any]) -> None:
        """Starts the all-reduce of its gradients, after those started before."""
        if not self.overlap:
            self._put_off = gradients
            return
        what = f"allreduce of {len(gradients)} gradients"
        plan, arrays = self._staged(gradients)
        self.work = self.executor.start(plan, arrays, arrays, None, what)
        if self._note is not None:
            self._note(self.work)

    def _staged(self, gradients: Sequence[Any]) -> tuple[Plan, Sequence[Any]]:
        """This bucket as the plan for some gradients, with copies of those that are not contiguous."""
        plain = PlainArrays(self.executor)
        arrays = [plain.take(gradient, writes=True) for gradient in gradients]
        return plain.around(self), arrays

    def run(self, sendbuf: Sequence[Any], recvbuf: Sequence[Any]) -> None:
        """Packs, reduces and unpacks the gradients, in place."""
        if self.packing is None:
            self.plan.run(sendbuf[0], sendbuf[0])
            return
        self.packing.pack(sendbuf)
        self.plan.run(self.packing.flat, self.packing.flat)
        self.packing.unpack(sendbuf)

    def wait(self) -> None:
        """Waits for the all-reduce; on a GPU the current stream does."""
        if self._put_off:
            gradients, self._put_off = self._put_off, ()
            plan, arrays = self._staged(gradients)
            self.executor.run(plan, arrays, arrays)
        elif self.work is not None:
            self.work.wait()

    def drop(self) -> None:
        """Drops an all-reduce that was put off."""
        self._put_off = ()

    def finish(self) -> None:
        """Waits on the host until it is idle, also on a GPU. Drops an all-reduce that was put off."""
        self.drop()
        self.wait()
        self.executor.transport.synchronize()

    def begin_again(self) -> None:
        """Prepares the next step."""
        self.left, self.work, self._put_off = len(self.members), None, ()


def with_gaps(shapes: Sequence[tuple[int, ...]], itemsize: int) -> list[tuple[int, ...]]:
    """The shapes of arrays in a message of a GPU, and those of the gaps after them.

    Example:
        >>> with_gaps([(3, 5), (8,)], 4)
        [(3, 5), (1,), (8,)]
    """
    found: list[tuple[int, ...]] = []
    for shape in shapes:
        gap = -math.prod(shape) * itemsize % ALIGNMENT // itemsize
        found += [shape, (gap,)] if gap else [shape]
    return found


def make_bucket(
    comm: Communicator,
    executor: Executor,
    members: tuple[int, ...],
    arrays: Sequence[Any],
    op: str,
    feedback: Any,
    overlap: bool,
) -> Bucket:
    """Makes a bucket, with its packing and its plan.

    Args:
        comm: The communicator.
        executor: Runs the all-reduce.
        members: Numbers of the gradients.
        arrays: Arrays like those that each step will give.
        op: "avg" or "sum".
        feedback: The error feedback, or None.
        overlap: As ``Bucket`` takes it.
    """
    shapes, dtype = tuple(tuple(array.shape) for array in arrays), arrays[0].dtype
    if len(arrays) == 1:
        packing, message = None, arrays[0]
    else:
        packing = comm.fusion_of(executor).packer.packing(shapes, dtype, own=True)
        message = packing.flat
    note = None
    if feedback is None:
        kind = dtype_of(dtype)
        plan: Any = plan_beside(executor, message.size, kind, resolve_op(op, kind))
    else:
        from flagcx.communicator.compressed import compressor_of

        gaps = message.size > sum(map(math.prod, shapes))
        slot = feedback.slot(members, with_gaps(shapes, dtype.itemsize) if gaps else shapes)
        plan = compressor_of(comm, executor).find(slot, message, op, beside=overlap)
        note = plan.note
    return Bucket(members, executor, packing, plan, overlap, note)
