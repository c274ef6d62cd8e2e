"""Fusion: many small arrays packed into few messages, and the results put back into the arrays.

::

    arrays     [a] [b] [-- c --] [d] [--------- e ---------]
                 \\   \\      |     /        too large to gain from company
    message     [a|b|   c   |d]            |
                     |                     |
                all-reduce            all-reduce
                     |                     |
    arrays     [a] [b] [-- c --] [d]  [------- e ---------]

Small arrays share a message with those around them, also over larger ones between them: the arrays are apart,
so their order is free. The memory of a message comes from the transport's pool, where peers reach it without
a copy, and is kept.
What is fused is worked out once for arrays of the same shapes, whichever arrays they are.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.executor.host import Executor
from flagcx.fusion.cache import BindingCache, BoundPart, drop_oldest
from flagcx.fusion.known_lists import KnownLists, ListPart, copy_each, picker
from flagcx.fusion.limits import Limits
from flagcx.transport.base import Plan

if TYPE_CHECKING:
    from flagcx.kernels.pack import DevicePacking

Shapes = tuple[tuple[int, ...], ...]


class Packing(Protocol):
    """Arrays end to end in one message.

    Attributes:
        flat: The message, an array of one dimension.
    """

    flat: Any

    def pack(self, arrays: Sequence[Any]) -> None:
        """Copies the arrays into the message."""

    def unpack(self, arrays: Sequence[Any]) -> None:
        """Copies the message into the arrays."""

    def close(self) -> None:
        """Gives a message of its own back."""


class Packer(Protocol):
    """Packs arrays of one kind.

    Attributes:
        limits: What is worth packing.
        lasting: Whether an array of this kind keeps its place and size as long as it lives, as on a GPU.
    """

    limits: Limits
    lasting: bool

    def packing(self, shapes: Shapes, dtype: np.dtype, own: bool = False) -> Packing:
        """A packing of arrays of these shapes.

        Args:
            shapes: The arrays' shapes.
            dtype: Their dtype.
            own: Whether the message is its own; else it is the one that packings share, up to the limits.
        """

    def memory_of(self, arrays: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where each array begins, and its bytes."""

    def current_stream(self) -> Any:
        """The stream on which packings are enqueued now; None where they are done at once."""

    def close(self) -> None:
        """Gives the shared message back."""


class HostPacking:
    """NumPy arrays end to end in one message.

    Args:
        buffer: Memory for at least as many elements as the arrays have: an array of one dimension.
        shapes: The arrays' shapes.
    """

    __slots__ = ("flat", "views")

    def __init__(self, buffer: np.ndarray, shapes: Shapes) -> None:
        self.views: list[np.ndarray] = []
        at = 0
        for shape in shapes:
            count = _size(shape)
            self.views.append(buffer[at : at + count].reshape(shape))
            at += count
        self.flat = buffer[:at]

    def pack(self, arrays: Sequence[np.ndarray]) -> None:
        """Copies the arrays into the message."""
        np.concatenate(arrays, None, self.flat, casting="no")

    def unpack(self, arrays: Sequence[np.ndarray]) -> None:
        """Copies the message into the arrays."""
        copy_each(self.views, arrays)

    def close(self) -> None:
        """Gives a message of its own back."""
        self.views, self.flat = [], self.flat[:0].copy()


class HostPacker:
    """Packs NumPy arrays.

    Args:
        empty: Makes the memory of messages: ``empty(shape, dtype)``.
        limits: What is worth packing.
    """

    lasting = False  # NumPy's arrays can be given another shape or dtype

    def __init__(self, empty: Callable[[int, np.dtype], np.ndarray], limits: Limits) -> None:
        self._empty, self.limits = empty, limits
        self._buffer: np.ndarray | None = None

    def packing(self, shapes: Shapes, dtype: np.dtype, own: bool = False) -> HostPacking:
        """A packing of arrays of these shapes; see ``Packer``."""
        if own:
            return HostPacking(self._empty(sum(map(_size, shapes)), dtype), shapes)
        if self._buffer is None:
            self._buffer = self._empty(self.limits.message_nbytes, np.dtype(np.uint8))
        return HostPacking(self._buffer.view(dtype), shapes)

    def memory_of(self, arrays: Sequence[np.ndarray]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where each array begins, and its bytes."""
        starts = tuple([array.__array_interface__["data"][0] for array in arrays])
        return starts, tuple([array.nbytes for array in arrays])

    def current_stream(self) -> None:
        """None: arrays of the host are packed at once."""

    def close(self) -> None:
        """Gives the shared message back."""
        self._buffer = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the arrays in one message; a single array without a packing.

    Attributes:
        numbers: Which arrays, in order.
        take: Takes them from a list of all.
        packing: The message.
        plan: Its all-reduce.
    """

    numbers: Sequence[int]
    take: Callable[[Sequence[Any]], Sequence[Any]]
    packing: Packing | None
    plan: Plan


class Fused:
    """All-reduces of many arrays as few, for arrays of certain shapes.

    Its packings give their memory back when nothing refers to it any more: neither the fusion that made it,
    nor calls that are yet to run.

    Args:
        parts: What is done, in order.
    """

    __slots__ = ("__weakref__", "_parts", "close")

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = tuple(parts)
        self.close = weakref.finalize(self, _close, [part.packing for part in self._parts])
        self.close.atexit = False

    @property
    def messages(self) -> int:
        """How many all-reduces it makes."""
        return len(self._parts)

    def run(self, sendbufs: Sequence[Any], recvbufs: Sequence[Any]) -> None:
        """Reduces each array of ``sendbufs`` into the array at its place in ``recvbufs``.

        Args:
            sendbufs: Arrays of the plan's shapes and dtype.
            recvbufs: Likewise, of any shapes with as many elements; the same list where it is in place.
        """
        for part in self._parts:
            mine = part.take(sendbufs)
            results = mine
            if recvbufs is not sendbufs:
                both = zip(part.take(recvbufs), mine, strict=True)
                results = [y if y.shape == x.shape else y.reshape(x.shape) for y, x in both]
            if part.packing is None:
                part.plan.run(mine[0], results[0])
                continue
            part.packing.pack(mine)
            part.plan.run(part.packing.flat, part.packing.flat)
            part.packing.unpack(results)

    def bind(self, arrays: Sequence[Any], numbers: Sequence[int]) -> Iterator[BoundPart]:
        """What is left to do for certain arrays that keep their place, in place.

        Args:
            arrays: Arrays, among others those of this plan.
            numbers: Which of them are this plan's, in order.
        """
        for part in self._parts:
            mine = part.take(numbers)
            if part.packing is None:
                yield BoundPart(part.plan, mine[0])
                continue
            packing = cast("DevicePacking", part.packing)
            yield BoundPart(part.plan, -1, packing, packing.places([arrays[i] for i in mine]))

    def known(self, arrays: Sequence[Any], numbers: Sequence[int]) -> Iterator[ListPart]:
        """What is to be done when a list of NumPy arrays comes again; see ``bind``."""
        for part in self._parts:
            mine = part.take(numbers)
            some = part.plan, mine, arrays[mine[0]].dtype
            if part.packing is None:
                yield ListPart(*some)
                continue
            packing = cast(HostPacking, part.packing)
            yield ListPart(*some, packing.flat, packing.views)


class Fusion:
    """The fused all-reduces of one executor, kept as long as they come back.

    Args:
        executor: Makes the plans.
        packer: Packs its arrays.

    Attributes:
        executor: Makes the plans.
        packer: Packs its arrays.
        bindings: What is bound to arrays that came before; None where arrays may change under way.
        lists: Lists that came before, of such arrays.
    """

    def __init__(self, executor: Executor, packer: Packer) -> None:
        self.executor, self.packer = executor, packer
        self.bindings = BindingCache() if packer.lasting else None
        self.lists = KnownLists()
        self._plans: OrderedDict[tuple, Fused] = OrderedDict()

    def plan(
        self, dtype: DType, op: ReduceOp, algorithm: str | None, shapes: Shapes, in_place: bool
    ) -> Fused:
        """The plan that reduces arrays of these shapes.

        Args:
            dtype: Of all arrays.
            op: How they are combined.
            algorithm: As the caller names it.
            shapes: The arrays' shapes, in order.
            in_place: Whether results replace what is reduced.
        """
        key = dtype.code, op, algorithm, in_place, shapes
        found = self._plans.get(key)
        if found is None:
            self.executor.check()
            found = self._plans[key] = Fused(list(self._parts(dtype, op, algorithm, shapes, in_place)))
            if drop_oldest(self._plans) and self.bindings is not None:
                self.bindings.clear()
        else:
            self._plans.move_to_end(key)
        return found

    def _parts(
        self, dtype: DType, op: ReduceOp, algorithm: str | None, shapes: Shapes, in_place: bool
    ) -> Iterator[_Part]:
        for numbers in cut_into_messages(shapes, dtype.numpy.itemsize, self.packer.limits):
            take, counts = picker(numbers), [_size(shapes[i]) for i in numbers]
            if len(numbers) == 1:
                plan = self.executor.find("allreduce", counts[0], dtype, op, None, algorithm, in_place)
                yield _Part(numbers, take, None, plan)
                continue
            packing = self.packer.packing(tuple([shapes[i] for i in numbers]), dtype.numpy)
            # Messages of as many elements may be made of other arrays.
            whole = f"allreduce of {len(numbers)} arrays of {', '.join(map(str, counts))} elements"
            count = packing.flat.size
            plan = self.executor.find("allreduce", count, dtype, op, None, algorithm, True, whole)
            yield _Part(numbers, take, packing, plan)

    def close(self) -> None:
        """Gives the memory back."""
        if self.bindings is not None:
            self.bindings.clear()
        self.lists.clear()
        while self._plans:
            self._plans.popitem()[1].close()
        self.packer.close()


def _close(packings: Sequence[Packing | None]) -> None:
    for packing in packings:
        if packing is not None:
            packing.close()


def cut_into_messages(shapes: Shapes, itemsize: int, limits: Limits) -> list[list[int]]:
    """Cuts a list of arrays into messages: small ones go together, in order, as far as the limits allow.

    Args:
        shapes: The arrays' shapes.
        itemsize: Bytes of an element.
        limits: What is worth fusing.

    Returns:
        The numbers of the arrays of each message, by its first.

    Example:
        >>> cut_into_messages(((2,), (3,), (100,), (4,)), 4, Limits(64, 64))
        [[0, 1, 3], [2]]
    """
    messages: list[list[int]] = []
    small: list[int] = []
    filled = limits.message_nbytes + 1
    for i, shape in enumerate(shapes):
        nbytes = _size(shape) * itemsize
        if nbytes > limits.array_nbytes:
            messages.append([i])
            continue
        if filled + nbytes > limits.message_nbytes:
            small, filled = [], 0
            messages.append(small)
        small.append(i)
        filled += nbytes
    return messages


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
