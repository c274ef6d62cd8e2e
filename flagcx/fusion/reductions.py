"""All-reduces that are made together, of arrays that are added one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flagcx.arguments import are_apart
from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import ArgumentError
from flagcx.executor.host import Executor
from flagcx.executor.staging import FunctionPlan, StagedArrays, Staging
from flagcx.executor.work import Work
from flagcx.fusion.cache import Bound, identities
from flagcx.fusion.fuse import Fused, Fusion
from flagcx.fusion.known_lists import KnownList
from flagcx.transport.base import Plan


class Like:
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
        self.executor, self.fusion, self.dtype, self.op = executor, fusion, dtype, op
        self.algorithm, self.in_place = algorithm, in_place
        self.results: list[Any] = []  # only where they are not in place
        self.fits: Callable[[Any], bool] = never

    def plan(self, arrays: Sequence[Any]) -> Fused:
        shapes = tuple([array.shape for array in arrays])
        return self.fusion.plan(self.dtype, self.op, self.algorithm, shapes, self.in_place)


_Members = tuple[_Kind, list[Any], Sequence[int]]
"""Arrays of a kind, and their numbers."""


class FusedCall(NamedTuple):
    """All-reduces that one plan makes.

    Attributes:
        executor: Runs the plan.
        plan: Takes lists of arrays.
        sendbufs: The arrays to reduce.
        recvbufs: The arrays for the results; the same list where they are in place.
    """

    executor: Executor
    plan: Plan
    sendbufs: Sequence[Any]
    recvbufs: Sequence[Any]


class Reductions:
    """All-reduces that are made together: a message for each dtype and operation, or few.

    Arrays that overlap are reduced one after the other, in the order in which they were added.

    Adding an array costs little more than its place in a list: a note is made only where another kind begins.
    The rest is done once, at the end, and not at all for arrays of GPUs that came together before.

    Args:
        fusion_of: Gives the ``Fusion`` of an executor.
        like: Describes the last array.
    """

    def __init__(self, fusion_of: Callable[[Executor], Fusion], like: Like | None = None) -> None:
        self._fusion_of = fusion_of
        self._like = Like() if like is None else like
        self._kinds: dict[tuple, _Kind] = {}
        self._quick: dict[tuple, _Kind] = {}
        self._arrays: list[Any] = []
        self._runs: list[tuple[_Kind, int]] = []  # where another kind begins
        self._names: list[tuple[Any, str | None, int]] = []  # where another operation or algorithm is named
        self.staged: list[Staging] = []  # the copies around those of arrays that are not plain

    def add(
        self,
        executor: Executor,
        sendbuf: Any,
        recvbuf: Any,
        dtype: DType,
        op: ReduceOp,
        named: Any,
        algorithm: Any,
    ) -> None:
        """Adds an all-reduce of ``sendbuf`` into ``recvbuf``, which is the same object for one in place.

        Args:
            executor: Makes it.
            sendbuf: An array.
            recvbuf: An array, or ``sendbuf``.
            dtype: Of both.
            op: How the ranks' arrays are combined.
            named: The operation as its caller named it.
            algorithm: As its caller named it; None where it did not.
        """
        in_place = sendbuf is recvbuf
        key = id(executor), dtype.code, op, algorithm, in_place
        kind = self._kinds.get(key)
        if kind is None:
            fusion = self._fusion_of(executor)
            kind = self._kinds[key] = _Kind(executor, fusion, dtype, op, algorithm, in_place)
        if not in_place:
            kind.results.append(recvbuf)
        self._note(kind, named)
        self._like.kind = None
        self._arrays.append(sendbuf)

    def _note(self, kind: _Kind, named: Any) -> None:
        """Notes the kind and name of the next array, where they change."""
        at = len(self._arrays)
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
        self._like.set(x, op, fits, self._arrays.append)

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
        self._like.set(x, op, kind.fits, self._arrays.append)
        self._arrays.append(x)
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

    def calls(self) -> list[FusedCall]:
        """The calls to make, in order."""
        if not self.staged:
            return self._plain_calls()
        staged = StagedArrays(self.staged)
        results = [array for kind in self._kinds.values() for array in kind.results]
        calls = list(self._one_by_one()) if staged.overlap(self._arrays, results) else self._plain_calls()
        return [call._replace(plan=staged.around(*call[1:])) for call in calls]

    def _plain_calls(self) -> list[FusedCall]:
        fusion = self._in_one()
        if fusion is None:
            return self._fresh_calls()
        if fusion.bindings is None:
            return self._calls_of_list(fusion)
        bound = self._bound(fusion)
        if bound is None:
            return list(self._one_by_one())
        return [FusedCall(fusion.executor, bound, self._arrays, self._arrays)]

    def _bound(self, fusion: Fusion) -> Bound | None:
        """The plan of these very arrays, which may have come before; None if some of them overlap."""
        bindings, arrays = fusion.bindings, self._arrays
        assert bindings is not None
        names = tuple(self._names), identities(arrays)
        bound = bindings.of_arrays(names)
        if bound is not None:
            return bound
        starts, nbytes = fusion.packer.memory_of(arrays)
        kinds = tuple([(kind.dtype.code, first) for kind, first in self._runs])
        memory = names[0], kinds, starts, nbytes
        bound = bindings.in_memory(memory, names, arrays)
        if bound is None and are_apart(starts, nbytes):
            plans = [(kind.plan(some), numbers) for kind, some, numbers in self._members()]
            parts = [part for plan, numbers in plans for part in plan.bind(arrays, numbers)]
            bound = Bound(parts, [plan for plan, _ in plans])
            bindings.put(memory, names, bound)
        return bound

    def _calls_of_list(self, fusion: Fusion) -> list[FusedCall]:
        """The calls for NumPy arrays in place, which may have come together before."""
        arrays, names = self._arrays, (tuple(self._names), identities(self._arrays))
        kinds = tuple([(kind.dtype.code, first) for kind, first in self._runs])
        known = fusion.lists.find(names)
        if known is not None and known.kinds == kinds:
            return [FusedCall(fusion.executor, known, arrays, arrays)]
        members = self._members()
        if not _apart(members):
            return list(self._one_by_one())
        plans = [(kind.plan(some), numbers) for kind, some, numbers in members]
        if all([array.__class__ is np.ndarray for array in arrays]):

            def known_list() -> KnownList:
                parts = [part for plan, numbers in plans for part in plan.known(arrays, numbers)]
                return KnownList(parts, [plan for plan, _ in plans], kinds)

            fusion.lists.note(names, arrays, known_list)
        return [
            FusedCall(kind.executor, plan, some, some)
            for (kind, some, _), (plan, _) in zip(members, plans, strict=True)
        ]

    def _in_one(self) -> Fusion | None:
        """The fusion of all arrays, if it is one and they are in place; else None."""
        fusions = {id(kind.fusion): kind.fusion for kind in self._kinds.values()}
        if len(fusions) != 1 or not all([kind.in_place for kind in self._kinds.values()]):
            return None
        return next(iter(fusions.values()))

    def _fresh_calls(self) -> list[FusedCall]:
        members = self._members()
        if not _apart(members):
            return list(self._one_by_one())
        return [
            FusedCall(kind.executor, kind.plan(arrays), arrays, arrays if kind.in_place else kind.results)
            for kind, arrays, _ in members
        ]

    def _stretches(self) -> Iterator[tuple[_Kind, int, int]]:
        """Arrays of one kind in a row: the kind, the number of the first, and of the one after the last."""
        ends = [*[first for _, first in self._runs[1:]], len(self._arrays)]
        for (kind, first), end in zip(self._runs, ends, strict=bool(self._runs)):
            yield kind, first, end

    def _members(self) -> list[_Members]:
        """The arrays of each kind."""
        if len(self._runs) == 1:
            return [(self._runs[0][0], self._arrays, range(len(self._arrays)))]
        members: dict[int, tuple[_Kind, list[Any], list[int]]] = {}
        for kind, first, end in self._stretches():
            _, arrays, numbers = members.setdefault(id(kind), (kind, [], []))
            arrays += self._arrays[first:end]
            numbers += range(first, end)
        return list(members.values())

    def _one_by_one(self) -> Iterator[FusedCall]:
        results = {id(kind): iter(kind.results) for kind in self._kinds.values()}
        for kind, first, end in self._stretches():
            for array in self._arrays[first:end]:
                sendbufs = [array]
                recvbufs = sendbufs if kind.in_place else [next(results[id(kind)])]
                yield FusedCall(kind.executor, kind.plan(sendbufs), sendbufs, recvbufs)

    def run(self) -> None:
        """Makes them, now."""
        for call in self.calls():
            call.executor.run(call.plan, call.sendbufs, call.recvbufs)

    def start(self, value: Any) -> Work:
        """Starts them; the work's ``wait`` returns ``value``.

        Raises:
            ArgumentError: There are arrays of GPUs and of the host.
        """
        calls = self.calls()
        executors = {id(call.executor) for call in calls}
        if len(executors) != 1:
            raise ArgumentError(
                f"async_op=True takes a list of arrays of one kind, on the host or on a GPU; got "
                f"{'both' if executors else 'an empty list'}"
            )
        what = f"allreduce of {len(self._arrays)} arrays"

        def run(*_: Any) -> None:
            for call in calls:
                call.plan.run(call.sendbufs, call.recvbufs)

        return calls[0].executor.start(FunctionPlan(run), calls, calls, value, what)


def never(*_: Any) -> bool:
    """Adds nothing: no array may be added without a closer look."""
    return False


def _apart(members: Sequence[_Members]) -> bool:
    """Whether no array overlaps another. NumPy arrays that own their memory need no closer look."""
    arrays = [array for kind, some, _ in members for array in (*some, *kind.results)]
    if all([array.__class__ is np.ndarray and array.base is None for array in arrays]):
        return len(set(map(id, arrays))) == len(arrays)
    starts: list[int] = []
    nbytes: list[int] = []
    for kind, some, _ in members:
        at, sizes = kind.fusion.packer.memory_of([*some, *kind.results])
        starts += at
        nbytes += sizes
    return are_apart(starts, nbytes)
