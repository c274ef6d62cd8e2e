"""Calls on arrays that nothing may write to, as JAX's: ``y = comm.allreduce(x)`` returns a new array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flagcx.communicator.buffers import ONE_ARRAY
from flagcx.errors import ArgumentError
from flagcx.executor.work import Work
from flagcx.foreign_arrays import in_immutable_kind, is_immutable


class NewArrayWork(Work):
    """Work whose result is made an array of the caller's kind when it has come."""

    def __init__(self, work: Work, convert: Callable[[Any], Any]) -> None:
        self._work, self._convert = work, convert

    def done(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._work.done()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the operation, and returns a new array; see ``Work.wait``."""
        return self._convert(self._work.wait(timeout_s))

    def __repr__(self) -> str:
        return repr(self._work)


def call(
    comm: Any, again: Callable[[Any, Any], Any], collective: str, root: int | None, x: Any, out: Any
) -> Any:
    """Makes a call with a view of ``x``, and with a new array where it would write to ``x``.

    Args:
        comm: The communicator, a ``Caller``.
        again: ``again(x, out)`` makes the call, with NumPy or CuPy arrays.
        collective: Its name.
        root: The root, of a rooted collective.
        x: An immutable array.
        out: The caller's array for the result, or None for a new one of the kind of ``x``.
    """
    _refuse_group(comm)
    executor = comm.executor_of(x)
    view = executor.take(x, "x", False)
    convert: Callable[[Any], Any] = partial(in_immutable_kind, x)
    result = out
    if out is None and collective in ONE_ARRAY:
        if collective == "allreduce" or (collective == "reduce" and comm.rank == root):
            result = executor.result(None, "", view.shape, view.dtype)
        elif collective == "broadcast" and comm.rank == root:
            convert = partial(_given, x)
        elif collective == "broadcast":
            view = executor.result(None, "", view.shape, view.dtype)
    value = again(view, result)
    if out is not None:
        return value
    return NewArrayWork(value, convert) if isinstance(value, Work) else convert(value)


def call_with_many(comm: Any, again: Callable[[Sequence[Any], Sequence[Any]], Any], xs: Sequence[Any]) -> Any:
    """An all-reduce of a list of arrays, of which some are immutable: these are replaced in the result."""
    _refuse_group(comm)
    views, outs = [], []
    for number, x in enumerate(xs):
        executor = comm.executor_of(x)
        frozen = is_immutable(x)
        views.append(executor.take(x, f"x[{number}]", False) if frozen else x)
        outs.append(executor.result(None, "", views[-1].shape, views[-1].dtype) if frozen else x)

    def convert(results: Sequence[Any]) -> list[Any]:
        return [
            in_immutable_kind(x, result) if is_immutable(x) else x
            for x, result in zip(xs, results, strict=True)
        ]

    value = again(views, outs)
    return NewArrayWork(value, convert) if isinstance(value, Work) else convert(value)


def _given(x: Any, _: Any) -> Any:
    return x


def _refuse_group(comm: Any) -> None:
    if comm._group is not None:
        raise ArgumentError(
            "JAX arrays have no meaning inside comm.group(), which writes its results into arrays at its "
            "end; pass a list: ys = comm.allreduce([a, b])"
        )
