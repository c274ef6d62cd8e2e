"""Combining what several ranks contribute, with NumPy, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.transport.steps import divide_by

Combine = Callable[[Sequence[np.ndarray], np.ndarray, np.ndarray], object]


def accumulator_dtype(op: ReduceOp, dtype: DType) -> np.dtype:
    """The dtype in which sums are made: float32 for half precision and fp8, else the dtype itself."""
    widen = dtype.accumulate is not None and op.ufunc in (np.add, np.multiply)
    return dtype.accumulate if widen else dtype.numpy  # type: ignore[return-value]


def combiner(op: ReduceOp, dtype: DType, size: int) -> Combine:
    """Makes the function that combines ``size`` arrays, in the order given.

    Returns:
        ``combine(sources, out, accumulator)``; the accumulator has ``accumulator_dtype`` and the same
        length, and may be ``out`` itself where the dtypes are one and no source but the first lies there.
    """
    divide = divide_by(size, dtype) if op.average else None
    if accumulator_dtype(op, dtype) != dtype.numpy:
        return _widening(op.ufunc, size, divide)
    return _plain(op.ufunc, size, divide)


def _plain(f: np.ufunc, size: int, divide) -> Combine:
    if size == 2 and divide is None:
        return lambda sources, out, accumulator: f(sources[0], sources[1], out)

    def combine(sources, out, accumulator) -> None:
        if len(sources) == 2:
            f(sources[0], sources[1], out)
        else:
            f(sources[0], sources[1], accumulator)
            for source in sources[2:-1]:
                f(accumulator, source, accumulator)
            f(accumulator, sources[-1], out)
        if divide is not None:
            divide(out)

    return combine


def _widening(f: np.ufunc, size: int, divide) -> Combine:
    def combine(sources, out, accumulator) -> None:
        accumulator[...] = sources[0]
        for source in sources[1:]:
            f(accumulator, source.astype(accumulator.dtype), accumulator)
        if divide is not None:
            divide(accumulator)
        out[...] = accumulator

    return combine
