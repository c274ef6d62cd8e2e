"""Several calls put together: all-reduces travel in few messages, transfers all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import ArgumentError
from flagcx.executor.host import Executor
from flagcx.executor.work import Work
from flagcx.fusion.cache import Bound
from flagcx.fusion.fuse import Fused, Fusion
from flagcx.transport.base import Plan


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that waits for the end of its group.

    Attributes:
        run: Makes the call alone.
        key: Calls in a row with the same key (not None) may be made together.
        together: Makes calls with the same key together, given what each has as ``item``.
        item: What ``together`` needs of this call.
    """

    run: Callable[[], object]
    key: tuple | None = None
    together: Callable[[list[Any]], object] | None = None
    item: Any = None


class _Like:
    """What the last array was, if others like it may be added without a closer look.

    Attributes:
        kind: Its class; None if no array may be added so.
        dtype: Its dtype.
        op: The operation, as its caller named it.
        fits: Tells whether another array of its class and dtype can be taken as it is.
        append: Adds one.
    """

    __slots__ = ("append", "dtype", "fits", "kind", "op")

    def __init__(self) -> None:
        self.kind: Any = None

    def set(self, x: Any, op: Any, fits: Callable[[Any], bool], append: Callable[[Any], object]) -> None:
        self.kind, self.dtype, self.op = x.__class__, x.dtype, op
        self.fits, self.append = fits, append


class Group:
    """The calls of a ``with comm.group():`` block, in order.

    Args:
        fusion_of: Gives the ``Fusion`` of an executor.

    Attributes:
        add_quickly: Adds an all-reduce in place like one that was added before: ``add_quickly(x, op)``
            returns whether it could.
    """

    def __init__(self, fusion_of: Callable[[Executor], Fusion]) -> None:
        self._fusion_of = fusion_of
        self._entries: list[Pending | Reductions] = []
        self._open: Reductions | None = None
        self._like = _Like()
        self.add_quickly: Callable[[Any, Any], bool] = _adds_nothing

    def append(self, call: Pending | Reductions) -> None:
        """Adds any call. It runs behind all that were added before."""
        self.close()
        self._entries.append(call)

    def close(self) -> None:
        """Adds no further all-reduce to the last ones. Idempotent."""
        self._open, self.add_quickly, self._like.kind = None, _adds_nothing, None

    def reductions(self) -> Reductions:
        """The all-reduces at the end of what was added so far, for one more."""
        if self._open is None:
            self._open = Reductions(self._fusion_of, self._like)
            self._entries.append(self._open)
            self.add_quickly = self._open.add_quickly
        return self._open

    def run(self) -> None:
        """Makes the calls in order; neighbours that belong together become one."""
        batch: list[Pending] = []
        for entry in self._entries:
            if isinstance(entry, Reductions):
                _run_batch(batch)
                batch = []
                entry.run()
                continue
            if batch and (entry.key is None or entry.key != batch[0].key):
                _run_batch(batch)
                batch = []
            batch.append(entry)
        _run_batch(batch)


def _run_batch(batch: list[Pending]) -> None:
    if len(batch) > 1 and batch[0].together is not None:
        batch[0].together([call.item for call in batch])
        return
    for call in batch:
        call.run()


class _Kind:
    """All-reduces that one message can carry: of one executor, dtype, operation and algorithm."""

    __slots__ = ("algorithm", "dtype", "executor", "fits", "fusion", "in_place", "op", "results")

    def __init__(
        self,
        executor: Executor,
        fusion: Fusion,
        dtype: DType,
        op: ReduceOp,
        algorithm: str | None,
        in_place: bool,
    ):
        self.executor, self.fusion, self.dtype, self.op, self.algorithm = (
            executor,
            fusion,
            dtype,
            op,
            algorithm,
        )
        self.in_place = in_place
        self.results: list[Any] = []  # only where they are not in place
        self.fits: Callable[[Any], bool] = _fits_not

    def plan(self, given: Sequence[Any]) -> Fused:
        shapes = tuple([array.shape for array in given])
        return self.fusion.plan(self.dtype, self.op, self.algorithm, shapes, self.in_place)


_Members = tuple[_Kind, list[Any], Sequence[int]]
"""Arrays of a kind, and their numbers."""


class Reductions:
    """All-reduces that are made together: a message for each dtype and operation, or few.

    Arrays that overlap are reduced one after the other, in the order in which they were added.

    To add an array costs little more than its place in a list: only where another kind begins is that noted.
    The rest is done once, at the end, and not at all for arrays of GPUs that came together before.

    Args:
        fusion_of: Gives the ``Fusion`` of an executor.
        like: Where it is said what the last array was.
    """

    def __init__(self, fusion_of: Callable[[Executor], Fusion], like: _Like | None = None) -> None:
        self._fusion_of = fusion_of
        self._like = _Like() if like is None else like
        self._kinds: dict[tuple, _Kind] = {}
        self._quick: dict[tuple, _Kind] = {}
        self._given: list[Any] = []
        self._runs: list[tuple[_Kind, int]] = []  # where another kind begins
        self._names: list[tuple[Any, str | None, int]] = []  # where another operation or algorithm is named

    def add(
        self,
        executor: Executor,
        given: Any,
        result: Any,
        dtype: DType,
        op: ReduceOp,
        named: Any,
        algorithm: Any,
    ) -> None:
        """Adds an all-reduce of ``given`` into ``result``, which is the same object for one in place.

        Args:
            executor: Makes it.
            given: An array.
            result: An array, or ``given``.
            dtype: Of both.
            op: How the ranks' arrays are combined.
            named: The operation as its caller named it.
            algorithm: As its caller named it; None if he did not.
        """
        in_place = given is result
        key = id(executor), dtype.code, op, algorithm, in_place
        kind = self._kinds.get(key)
        if kind is None:
            fusion = self._fusion_of(executor)
            kind = self._kinds[key] = _Kind(executor, fusion, dtype, op, algorithm, in_place)
        if not in_place:
            kind.results.append(result)
        self._note(kind, named)
        self._like.kind = None
        self._given.append(given)

    def _note(self, kind: _Kind, named: Any) -> None:
        """Notes what the next array is, where that changes."""
        at = len(self._given)
        if not at or self._runs[-1][0] is not kind:
            self._runs.append((kind, at))
        if not at or self._names[-1][0] is not named or self._names[-1][1] != kind.algorithm:
            self._names.append((named, kind.algorithm, at))

    def remember(self, x: Any, op: Any, fits: Callable[[Any], bool]) -> None:
        """Lets ``add_quickly`` take arrays like the one that was added last, in place.

        Args:
            x: That array.
            op: As the caller named the operation.
            fits: Tells whether another array of its class and dtype can be taken as it is.
        """
        kind = self._quick[x.__class__, x.dtype, op] = self._runs[-1][0]
        kind.fits = fits
        self._like.set(x, op, fits, self._given.append)

    def add_quickly(self, x: Any, op: Any) -> bool:
        """Adds an all-reduce in place like one that was added before; returns whether it could."""
        like = self._like
        if x.__class__ is like.kind and x.dtype is like.dtype and op is like.op and like.fits(x):
            like.append(x)
            return True
        try:
            kind = self._quick.get((x.__class__, x.dtype, op))
        except (AttributeError, TypeError):
            return False
        if kind is None or not kind.fits(x):
            return False
        self._note(kind, op)
        self._like.set(x, op, kind.fits, self._given.append)
        self._given.append(x)
        return True

    def add_many(self, xs: Sequence[Any], first: int, op: Any) -> int:
        """Adds all-reduces in place of ``xs[first:]``, as long as they are like one that was added before.

        Returns:
            The number of the first array that is not.
        """
        like = self._like
        for i in range(first, len(xs)):
            x = xs[i]
            if x.__class__ is like.kind and x.dtype is like.dtype and op is like.op and like.fits(x):
                like.append(x)
            elif not self.add_quickly(x, op):
                return i
        return len(xs)

    def calls(self) -> list[tuple[Executor, Plan, Sequence[Any], Sequence[Any]]]:
        """What is to be run, in order: executor, plan, its INPUT and its OUTPUT arrays."""
        fusion = self._lasting()
        if fusion is None:
            return self._fresh_calls()
        bound = self._bound(fusion)
        return (
            list(self._one_by_one())
            if bound is None
            else [(fusion.executor, bound, self._given, self._given)]
        )

    def _bound(self, fusion: Fusion) -> Bound | None:
        """What is to be done for arrays that may have come before; None if some of them overlap."""
        bindings, given = fusion.bindings, self._given
        assert bindings is not None
        names = tuple(self._names), tuple(map(id, given))
        bound = bindings.of_arrays(names)
        if bound is not None:
            return bound
        starts, nbytes = fusion.packer.memory_of(given)
        kinds = tuple([(kind.dtype.code, first) for kind, first in self._runs])
        memory = names[0], kinds, starts, nbytes
        bound = bindings.in_memory(memory, names, given)
        if bound is None and _are_apart(starts, nbytes):
            plans = [(kind.plan(arrays), numbers) for kind, arrays, numbers in self._members()]
            parts = [part for plan, numbers in plans for part in plan.bind(given, numbers)]
            bound = Bound(parts, [plan for plan, _ in plans])
            bindings.put(memory, names, bound)
        return bound

    def _lasting(self) -> Fusion | None:
        """What fuses them all, if they are in place, in arrays that can be recognised when they come back."""
        fusions = {id(kind.fusion): kind.fusion for kind in self._kinds.values()}
        if len(fusions) != 1 or not all([kind.in_place for kind in self._kinds.values()]):
            return None
        (fusion,) = fusions.values()
        return None if fusion.bindings is None else fusion

    def _fresh_calls(self) -> list[tuple[Executor, Plan, Sequence[Any], Sequence[Any]]]:
        members = self._members()
        if not _apart(members):
            return list(self._one_by_one())
        return [
            (k.executor, k.plan(given), given, given if k.in_place else k.results) for k, given, _ in members
        ]

    def _stretches(self) -> Iterator[tuple[_Kind, int, int]]:
        """Arrays of one kind in a row: the kind, the number of the first, and of the one behind the last."""
        ends = [*[first for _, first in self._runs[1:]], len(self._given)]
        for (kind, first), end in zip(self._runs, ends, strict=bool(self._runs)):
            yield kind, first, end

    def _members(self) -> list[_Members]:
        """The arrays of each kind."""
        if len(self._runs) == 1:
            return [(self._runs[0][0], self._given, range(len(self._given)))]
        members: dict[int, tuple[_Kind, list[Any], list[int]]] = {}
        for kind, first, end in self._stretches():
            _, given, numbers = members.setdefault(id(kind), (kind, [], []))
            given += self._given[first:end]
            numbers += range(first, end)
        return list(members.values())

    def _one_by_one(self) -> Iterator[tuple[Executor, Plan, Sequence[Any], Sequence[Any]]]:
        results = {id(kind): iter(kind.results) for kind in self._kinds.values()}
        for kind, first, end in self._stretches():
            for array in self._given[first:end]:
                given = [array]
                result = given if kind.in_place else [next(results[id(kind)])]
                yield kind.executor, kind.plan(given), given, result

    def run(self) -> None:
        """Makes them, now."""
        for executor, plan, given, results in self.calls():
            executor.run(plan, given, results)

    def start(self, value: Any) -> Work:
        """Starts them; the work's ``wait`` returns ``value``.

        Raises:
            ArgumentError: There are arrays of GPUs and of the host.
        """
        calls = self.calls()
        executors = {id(executor): executor for executor, *_ in calls}
        if len(executors) != 1:
            raise ArgumentError(
                f"async_op=True takes a list of arrays of one kind, on the host or on a GPU; got "
                f"{'both' if executors else 'an empty list'}"
            )
        every = [array for _, _, given, results in calls for array in (*given, *results)]
        what = f"allreduce of {len(self._given)} arrays"
        return calls[0][0].start(_Several(calls), every, every, value, what)


class _Several:
    """Plans with their arrays, as one plan that is run once."""

    def __init__(self, calls: Sequence[tuple[Executor, Plan, Sequence[Any], Sequence[Any]]]) -> None:
        self._calls = calls

    def run(self, given: object, result: object) -> None:
        """See ``transport.base.Plan``."""
        for _, plan, arrays, results in self._calls:
            plan.run(arrays, results)


def _fits_not(x: Any) -> bool:
    return False


def _adds_nothing(x: Any, op: Any) -> bool:
    return False


def _apart(members: Sequence[_Members]) -> bool:
    """Whether no array overlaps another. NumPy arrays that own their memory need no closer look."""
    arrays = [array for kind, given, _ in members for array in (*given, *kind.results)]
    if all([array.__class__ is np.ndarray and array.base is None for array in arrays]):
        return len(set(map(id, arrays))) == len(arrays)
    starts: list[int] = []
    nbytes: list[int] = []
    for kind, given, _ in members:
        some, sizes = kind.fusion.packer.memory_of([*given, *kind.results])
        starts += some
        nbytes += sizes
    return _are_apart(starts, nbytes)


def _are_apart(starts: Sequence[int], nbytes: Sequence[int]) -> bool:
    """Whether no range of bytes overlaps another."""
    begin, length = np.array(starts, np.int64), np.array(nbytes, np.int64)
    filled = length > 0
    order = np.argsort(begin[filled], kind="stable")
    begin, length = begin[filled][order], length[filled][order]
    return bool((begin[1:] >= begin[:-1] + length[:-1]).all())
