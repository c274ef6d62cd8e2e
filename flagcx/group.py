"""Several calls put together: all-reduces travel in few messages, transfers all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.engine import Engine
from flagcx.errors import ArgumentError
from flagcx.fusion import Fusion
from flagcx.transport.base import Plan
from flagcx.work import Work


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


class Group:
    """The calls of a ``with comm.group():`` block, in order.

    Args:
        fusion_of: Gives the ``Fusion`` of an engine.
    """

    def __init__(self, fusion_of: Callable[[Engine], Fusion]) -> None:
        self._fusion_of = fusion_of
        self._entries: list[Pending | Reductions] = []
        self._open: Reductions | None = None

    def append(self, call: Pending | Reductions) -> None:
        """Adds any call. It runs behind all that were added before."""
        self._entries.append(call)
        self._open = None

    def reductions(self) -> Reductions:
        """The all-reduces at the end of what was added so far, for one more."""
        if self._open is None:
            self._open = Reductions(self._fusion_of)
            self._entries.append(self._open)
        return self._open

    def add_quickly(self, x: Any, op: Any) -> bool:
        """Adds an all-reduce in place like one that was added before; returns whether it could."""
        return self._open is not None and self._open.add_quickly(x, op)

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
    """All-reduces that one message can carry: of one engine, dtype, operation and algorithm."""

    __slots__ = ("algorithm", "dtype", "engine", "fits", "fusion", "given", "op", "results")

    def __init__(self, engine: Engine, fusion: Fusion, dtype: DType, op: ReduceOp, algorithm: str | None):
        self.engine, self.fusion, self.dtype, self.op, self.algorithm = engine, fusion, dtype, op, algorithm
        self.given: list[Any] = []
        self.results: list[Any] = self.given  # another list, where they are not in place
        self.fits: Callable[[Any], bool] = _fits_not

    def plan(self) -> Plan:
        shapes = tuple([array.shape for array in self.given])
        return self.fusion.plan(self.dtype, self.op, self.algorithm, shapes, self.given is self.results)


class Reductions:
    """All-reduces that are made together: a message for each dtype and operation, or few.

    Arrays that overlap are reduced one after the other, in the order in which they were added.

    Args:
        fusion_of: Gives the ``Fusion`` of an engine.
    """

    def __init__(self, fusion_of: Callable[[Engine], Fusion]) -> None:
        self._fusion_of = fusion_of
        self._kinds: dict[tuple, _Kind] = {}
        self._quick: dict[tuple, _Kind] = {}
        self._order: list[_Kind] = []

    def add(
        self, engine: Engine, given: Any, result: Any, dtype: DType, op: ReduceOp, algorithm: str | None
    ) -> None:
        """Adds an all-reduce of ``given`` into ``result``, which is the same object for one in place."""
        in_place = given is result
        key = id(engine), dtype.code, op, algorithm, in_place
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(engine, self._fusion_of(engine), dtype, op, algorithm)
            kind.results = kind.given if in_place else []
        kind.given.append(given)
        if not in_place:
            kind.results.append(result)
        self._order.append(kind)

    def remember(self, x: Any, op: Any, fits: Callable[[Any], bool]) -> None:
        """Lets ``add_quickly`` take arrays like the one that was added last, in place.

        Args:
            x: That array.
            op: As the caller named the operation.
            fits: Tells whether another array of its class and dtype can be taken as it is.
        """
        self._quick[x.__class__, x.dtype, op] = self._order[-1]
        self._order[-1].fits = fits

    def add_quickly(self, x: Any, op: Any) -> bool:
        """Adds an all-reduce in place like one that was added before; returns whether it could."""
        try:
            kind = self._quick.get((x.__class__, x.dtype, op))
        except (AttributeError, TypeError):
            return False
        if kind is None or not kind.fits(x):
            return False
        kind.given.append(x)
        self._order.append(kind)
        return True

    def calls(self) -> list[tuple[Engine, Plan, Sequence[Any], Sequence[Any]]]:
        """What is to be run, in order: engine, plan, its INPUT and its OUTPUT arrays."""
        kinds = list(self._kinds.values())
        if len(kinds) == 1 and kinds[0].given is kinds[0].results and kinds[0].fusion.familiar is not None:
            return self._familiar_calls(kinds[0])
        if _apart([array for kind in kinds for array in kind.given], [a for k in kinds for a in _others(k)]):
            return [(kind.engine, kind.plan(), kind.given, kind.results) for kind in kinds]
        return list(self._one_by_one())

    def _familiar_calls(self, kind: _Kind) -> list[tuple[Engine, Plan, Sequence[Any], Sequence[Any]]]:
        """The calls for arrays that may have come before: what was found out about them then still holds."""
        familiar, given = kind.fusion.familiar, kind.given
        assert familiar is not None
        key = kind.dtype.code, kind.op, kind.algorithm, tuple(map(id, given))
        plan = familiar.get(key)
        if plan is None:
            if not _apart(given, []):
                return list(self._one_by_one())
            plan = kind.plan()
            familiar.put(key, plan, given)
        return [(kind.engine, plan, given, given)]

    def _one_by_one(self) -> Iterator[tuple[Engine, Plan, Sequence[Any], Sequence[Any]]]:
        at = dict.fromkeys(map(id, self._kinds.values()), 0)
        for kind in self._order:
            i = at[id(kind)]
            at[id(kind)] += 1
            given, results = kind.given[i : i + 1], kind.results[i : i + 1]
            in_place = kind.given is kind.results
            plan = kind.fusion.plan(kind.dtype, kind.op, kind.algorithm, (given[0].shape,), in_place)
            yield kind.engine, plan, given, given if in_place else results

    def run(self) -> None:
        """Makes them, now."""
        for engine, plan, given, results in self.calls():
            engine.run(plan, given, results)

    def start(self, value: Any) -> Work:
        """Starts them; the work's ``wait`` returns ``value``.

        Raises:
            ArgumentError: There are arrays of GPUs and of the host.
        """
        calls = self.calls()
        engines = {id(engine): engine for engine, *_ in calls}
        if len(engines) != 1:
            raise ArgumentError(
                f"async_op=True takes a list of arrays of one kind, on the host or on a GPU; got "
                f"{'both' if engines else 'an empty list'}"
            )
        every = [array for _, _, given, results in calls for array in (*given, *results)]
        what = f"allreduce of {len(self._order)} arrays"
        return calls[0][0].start(_Several(calls), every, every, value, what)


class _Several:
    """Plans with their arrays, as one plan that is run once."""

    def __init__(self, calls: Sequence[tuple[Engine, Plan, Sequence[Any], Sequence[Any]]]) -> None:
        self._calls = calls

    def run(self, given: object, result: object) -> None:
        """See ``transport.base.Plan``."""
        for _, plan, arrays, results in self._calls:
            plan.run(arrays, results)


def _fits_not(x: Any) -> bool:
    return False


def _others(kind: _Kind) -> list[Any]:
    return [] if kind.results is kind.given else kind.results


def _apart(given: list[Any], results: list[Any]) -> bool:
    """Whether no array overlaps another. Arrays that own their memory need no closer look."""
    arrays = given + results
    if not arrays:
        return True
    if all([a.base is None for a in arrays]) and isinstance(arrays[0], np.ndarray):
        return len(set(map(id, arrays))) == len(arrays)
    ranges = sorted([(start, start + a.nbytes) for a in arrays if a.nbytes for start in (address(a),)])
    return all(after[0] >= before[1] for before, after in pairwise(ranges))


def address(array: Any) -> int:
    """Where a NumPy or CuPy array begins."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.data.ptr
