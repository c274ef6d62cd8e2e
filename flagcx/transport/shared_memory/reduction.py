"""Combining what several ranks contribute, with NumPy, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.transport.average import Average, average_of

_TILE = 4096
_LEAST_ROWS, _ROW_NBYTES = 4, 4 << 10
_OF_ROWS = (np.add, np.multiply, np.minimum, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
Combine = Callable[[Sequence[np.ndarray], np.ndarray, np.ndarray], object]


def accumulator_dtype(op: ReduceOp, dtype: DType, size: int) -> np.dtype:
    """The dtype in which ``size`` ranks' sums are made: wider than the dtype where that loses less."""
    average = average_of(dtype, size) if op.average else None
    if average is not None:
        return average.wide.numpy
    widen = dtype.accumulate is not None and op.ufunc in (np.add, np.multiply)
    return dtype.accumulate if widen else dtype.numpy  # type: ignore[return-value]


def combiner(op: ReduceOp, dtype: DType, size: int) -> Combine:
    """Makes the function that combines ``size`` arrays, in the order given.

    Returns:
        ``combine(sources, out, accumulator)``; the accumulator has ``accumulator_dtype`` and the same
        length, and may be ``out`` itself where the dtypes are one and no source but the first lies there.
    """
    average = average_of(dtype, size) if op.average else None
    if average is not None:
        return _averaging(average)
    if accumulator_dtype(op, dtype, size) != dtype.numpy:
        return _widening(op.ufunc)
    return _plain(op.ufunc, size, op.average)


def row_combiner(op: ReduceOp, dtype: DType, size: int, count: int) -> Combine | None:
    """Makes the function that combines the rows of one array of ``size`` rows, in their order.

    One call of NumPy instead of one for each row: four to six times faster for short rows of many ranks.

    Returns:
        ``combine(rows, out, accumulator)`` with the bits of ``combiner``'s; None where the operation has
        none, or where rows are so few or long that it would be no faster.
    """
    average = average_of(dtype, size) if op.average else None
    short = count * dtype.numpy.itemsize <= _ROW_NBYTES * size
    # NumPy adds up a single column in pairs, which rounds otherwise.
    if average is not None or op.ufunc not in _OF_ROWS or not short or size < _LEAST_ROWS or count < 2:
        return None
    reduce, wide = op.ufunc.reduce, accumulator_dtype(op, dtype, size)
    same, divides = wide == dtype.numpy, op.average

    def combine(rows, out, accumulator) -> None:
        into = out if same else accumulator
        reduce(rows, 0, wide, into, False, None)  # no initial value: -0.0 + -0.0 stays -0.0
        if divides:
            np.true_divide(into, size, out=out)
        elif not same:
            out[...] = into

    return combine


def _by_position(ufunc: np.ufunc) -> Callable[[np.ndarray, np.ndarray, np.ndarray], object]:
    """A ufunc as ``f(a, b, out)``, the quickest form, which NumPy 2.4 deprecates for these two."""
    if ufunc in (np.maximum, np.minimum):
        return lambda a, b, out: ufunc(a, b, out=out)
    return ufunc


def _plain(ufunc: np.ufunc, size: int, divides: bool) -> Combine:
    f = _by_position(ufunc)
    if size == 2 and not divides:
        return lambda sources, out, accumulator: f(sources[0], sources[1], out)

    def combine(sources, out, accumulator) -> None:
        if len(sources) == 2:
            f(sources[0], sources[1], out)
        else:
            f(sources[0], sources[1], accumulator)
            for source in sources[2:-1]:
                f(accumulator, source, accumulator)
            f(accumulator, sources[-1], out)
        if divides:
            np.true_divide(out, size, out=out)

    return combine


def _widening(f: np.ufunc) -> Combine:
    def combine(sources, out, accumulator) -> None:
        accumulator[...] = sources[0]
        for source in sources[1:]:
            f(accumulator, source.astype(accumulator.dtype), accumulator)
        out[...] = accumulator

    return combine


def _averaging(average: Average) -> Combine:
    wide, weight, add = average.wide.numpy, average.weight, np.add

    def combine(sources, out, accumulator) -> None:
        accumulator[...] = sources[0]
        if weight != 1:
            accumulator *= weight
        for source in sources[1:]:
            part = source.astype(wide)
            if weight != 1:
                part *= weight
            add(accumulator, part, accumulator)
        average.finish((accumulator,), out)

    def combine_in_tiles(sources, out, accumulator) -> None:
        for start in range(0, len(out), _TILE):
            tile = slice(start, start + _TILE)
            sums = average.parts(sources[0][tile])
            for source in sources[1:]:
                for total, part in zip(sums, average.parts(source[tile]), strict=True):
                    total += part
            average.finish(sums, out[tile])

    return combine if average.sums == 1 else combine_in_tiles
