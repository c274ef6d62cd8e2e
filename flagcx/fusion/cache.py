"""Arrays that came before: what was worked out about them is used again.

A training step brings the same arrays as the step before, or new ones in the same memory. So the plan for a
list of arrays is kept under two keys. Under the arrays' identities, which costs one look-up: the ``id`` of an
array is its own as long as the array lives, and no longer. And under their memory, which costs a look at
each array.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flagcx.transport.base import Plan

if TYPE_CHECKING:
    from flagcx.kernels.pack import DevicePacking, PackTable

_MOST_LISTS = 32
_MOST_ARRAYS = 1 << 16
"""Arrays of all lists together for which something is kept: some hundred bytes each."""
_MOST_LOSSES = 2
_ID_NBYTES = np.dtype(np.uintp).itemsize


class BoundPart(NamedTuple):
    """A message, or a single array without a packing.

    Attributes:
        plan: Its all-reduce.
        number: Which of the arrays it is, if it is a single one.
        packing: The message.
        places: Where the arrays lie that are packed.
    """

    plan: Plan
    number: int
    packing: DevicePacking | None = None
    places: PackTable | None = None


class Bound:
    """All-reduces in place, as few, of arrays in certain memory.

    Args:
        parts: What is done, in order.
        plans: What the parts are taken from, which keeps their messages.
    """

    __slots__ = ("_parts", "_plans")

    def __init__(self, parts: Iterable[BoundPart], plans: Sequence[object] = ()) -> None:
        self._parts, self._plans = tuple(parts), tuple(plans)

    @property
    def holds(self) -> bool:
        """Whether all that it is made of is still there."""
        return all([part.places is None or part.places.kept for part in self._parts])

    def run(self, sendbufs: Sequence[Any], recvbufs: Sequence[Any]) -> None:
        """Reduces the arrays that lie there; both lists are these."""
        for plan, number, packing, places in self._parts:
            if packing is None or places is None:
                plan.run(sendbufs[number], sendbufs[number])
                continue
            packing.pack_at(places)
            plan.run(packing.flat, packing.flat)
            packing.unpack_at(places)


class _Known:
    """What is bound to memory, the arrays that were there last, and how often they were lost."""

    __slots__ = ("bound", "losses", "names")

    def __init__(self, bound: Bound, names: tuple) -> None:
        self.bound, self.names, self.losses = bound, names, 0

    def lose(self) -> None:
        """Counts that an array which was there is gone."""
        self.losses += 1


def identities(arrays: Sequence[Any]) -> bytes:
    """The ``id`` of each array, end to end: an array of objects is one of addresses.

    To look up a tuple of them takes five times as long.

    Example:
        >>> x, y = np.zeros(3), np.zeros(4)
        >>> identities([x, y]) == identities((x, y)), identities([x, y]) == identities([y, x])
        (True, False)
    """
    return np.fromiter(arrays, object, len(arrays)).tobytes()


def drop_oldest(kept: OrderedDict[tuple, Any]) -> bool:
    """Drops what came first until there are few enough lists, of few enough arrays; the last one stays.

    Args:
        kept: What is kept for lists, by keys of which the last part has an item for each array, or is that of
            ``identities``.

    Returns:
        Whether anything was dropped.
    """
    before, arrays = len(kept), sum(map(_count, list(kept)))  # weak references may pop
    while len(kept) > _MOST_LISTS or (arrays > _MOST_ARRAYS and len(kept) > 1):
        arrays -= _count(kept.popitem(last=False)[0])
    return len(kept) < before


def _count(key: tuple) -> int:
    """The arrays that a key stands for."""
    last = key[-1]
    return len(last) // _ID_NBYTES if isinstance(last, bytes) else len(last)


class IdentityCache:
    """What was worked out for lists of arrays, as long as all of the arrays live."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple, tuple[Any, list[weakref.ref]]] = OrderedDict()

    def find(self, names: tuple) -> Any:
        """What is kept for the arrays with these names; None where there is nothing.

        Args:
            names: All that matters besides, and the ``identities`` of the arrays.
        """
        try:
            found = self._kept.get(names)
        except TypeError:  # something that cannot be a key was named
            return None
        return None if found is None else found[0]

    def keep(
        self, names: tuple, value: Any, arrays: Sequence[Any], lost: Callable[[], object] | None = None
    ) -> None:
        """Keeps something for some arrays; ``lost()`` is called when the first of them is gone."""
        kept = self._kept

        def forget(_: weakref.ref) -> None:
            if kept.pop(names, None) is not None and lost is not None:
                lost()

        kept[names] = value, [weakref.ref(array, forget) for array in arrays]
        drop_oldest(kept)

    def drop(self, names: tuple) -> None:
        """Forgets a list."""
        self._kept.pop(names, None)

    def clear(self) -> None:
        """Forgets all lists."""
        self._kept.clear()


class BindingCache:
    """What is bound to lists of arrays that came before.

    Arrays that come a second time are remembered by their identity, unless they were lost before: arrays that
    do not last until the next step are not worth being watched.
    """

    def __init__(self) -> None:
        self._by_memory: OrderedDict[tuple, _Known] = OrderedDict()
        self._by_arrays = IdentityCache()

    def of_arrays(self, names: tuple) -> Bound | None:
        """What is bound to these very arrays, if it still holds; see ``IdentityCache.find``."""
        found: Bound | None = self._by_arrays.find(names)
        return found if found is not None and found.holds else None

    def in_memory(self, memory: tuple, names: tuple, arrays: Sequence[Any]) -> Bound | None:
        """What is bound to the memory of these arrays, if it still holds.

        Args:
            memory: Where each array begins and ends, and all else that matters.
            names: See ``of_arrays``.
            arrays: The arrays.
        """
        known = self._by_memory.get(memory)
        if known is None or not known.bound.holds:
            return None
        self._by_memory.move_to_end(memory)
        if known.names != names:
            known.names = names
        elif known.losses < _MOST_LOSSES:
            self._by_arrays.keep(names, known.bound, arrays, known.lose)
        return known.bound

    def put(self, memory: tuple, names: tuple, bound: Bound) -> None:
        """Keeps what is bound to the memory of the arrays with these names."""
        self._by_memory[memory] = _Known(bound, names)
        drop_oldest(self._by_memory)

    def clear(self) -> None:
        """Forgets all."""
        self._by_memory.clear()
        self._by_arrays.clear()
