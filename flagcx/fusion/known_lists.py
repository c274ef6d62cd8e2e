"""Lists of NumPy arrays that came before, recognised by the identity of their arrays.

The ``id`` of an array is its own as long as the array lives, so one look-up tells that all arrays of a list
were checked before. An array of NumPy may get another dtype or shape meanwhile, though no other size, since
NumPy resizes none that is referred to weakly. So a message is filled by one call that refuses other dtypes,
before anything is sent; and where an array no longer has the shape that it had, it is filled by its size.
Arrays without a message are looked at before the first message is sent.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import itemgetter, setitem
from typing import Any, NamedTuple

import numpy as np

from flagcx.errors import ArgumentError, ArrayError
from flagcx.fusion.cache import IdentityCache, drop_oldest
from flagcx.transport.base import Plan


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the items with these numbers from a list.

    Example:
        >>> picker([1, 2])("abcd"), picker([0, 2])("abcd")
        ('bc', ('a', 'c'))
    """
    first, count = numbers[0], len(numbers)
    if [*numbers] == [*range(first, first + count)]:
        return itemgetter(slice(first, first + count))
    return itemgetter(*numbers)


def copy_each(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copies each array into the one at its place, in a loop that runs no bytecode."""
    deque(map(setitem, targets, repeat(...), sources), maxlen=0)


class ArraysChanged(ArgumentError):
    """An array of a known list has another dtype than before.

    Attributes:
        left: The numbers of the arrays that were not reduced.
    """

    def __init__(self, left: Sequence[int]) -> None:
        super().__init__("arrays of a list have another dtype than when the list came before")
        self.left = left


class ListPart(NamedTuple):
    """A message, or a single array without one.

    Attributes:
        plan: Its all-reduce.
        numbers: Which arrays of the list it has, in order.
        dtype: The arrays' dtype.
        flat: The message.
        views: The place of each array in it, of the array's shape.
    """

    plan: Plan
    numbers: Sequence[int]
    dtype: Any
    flat: Any = None
    views: Sequence[Any] = ()


class KnownList:
    """All-reduces in place, as few, of the arrays of a list.

    Args:
        parts: What is done, in order.
        plans: What the parts are taken from, which keeps their messages.
        kinds: Describes the arrays' dtypes.
    """

    __slots__ = ("_alone", "_parts", "_plans", "kinds")

    def __init__(self, parts: Iterable[ListPart], plans: Sequence[object], kinds: tuple = ()) -> None:
        self._parts = [(picker(part.numbers), part) for part in parts]
        self._alone = [(part.numbers[0], part.dtype) for _, part in self._parts if part.flat is None]
        self._plans, self.kinds = plans, kinds

    def run(self, sendbufs: Sequence[Any], recvbufs: Sequence[Any]) -> None:
        """Reduces the arrays of ``sendbufs``, which are those of the list; ``recvbufs`` is the same list.

        Raises:
            ArraysChanged: Some have another dtype, or arrays without a message other flags; those before them
                were reduced.
            ArrayError: An array has become read-only; all others were reduced, as the peers expect it.
        """
        for number, dtype in self._alone:
            array = sendbufs[number]
            if array.dtype != dtype or not array.flags.carray:
                raise ArraysChanged(self._numbers_from(0))
        refused = None
        for at, (pick, (plan, _, _, flat, views)) in enumerate(self._parts):
            arrays = pick(sendbufs)
            if flat is None:
                plan.run(arrays[0], arrays[0])
                continue
            try:
                np.concatenate(arrays, None, flat, casting="no")
            except (TypeError, ValueError):
                raise ArraysChanged(self._numbers_from(at)) from None
            plan.run(flat, flat)
            try:
                copy_each(views, arrays)
            except ValueError:
                refused = _cut(flat, arrays) or refused
        if refused is not None:
            raise refused

    def _numbers_from(self, at: int) -> list[int]:
        return sorted(number for _, part in self._parts[at:] for number in part.numbers)


class KnownLists(IdentityCache):
    """What is to be done with the lists that came at least twice."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: OrderedDict[tuple, None] = OrderedDict()

    def note(self, names: tuple, arrays: Sequence[Any], make: Callable[[], KnownList]) -> None:
        """Remembers a list of arrays that comes a second time; ``make()`` says what is to be done with it."""
        if names in self._seen:
            self.keep(names, make(), arrays)
        else:
            self._seen[names] = None
            drop_oldest(self._seen)

    def drop(self, names: tuple) -> None:
        """Forgets a list."""
        super().drop(names)
        self._seen.pop(names, None)

    def clear(self) -> None:
        """Forgets all lists."""
        super().clear()
        self._seen.clear()


def _cut(flat: Any, arrays: Sequence[Any]) -> ArrayError | None:
    """Copies a message into arrays of which some have another shape than before.

    Returns:
        The error about an array that has become read-only, if one has.
    """
    at, refused = 0, None
    for array in arrays:
        part = flat[at : at + array.size]
        at += array.size
        if array.flags.writeable:
            array[...] = part.reshape(array.shape)
        else:
            refused = ArrayError(f"an array of shape {array.shape} is read-only, and gets no result")
    return refused
