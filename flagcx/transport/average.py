"""Averages of small dtypes and of integers, whose sums would overflow in the dtype itself.

Contributions are added up in a wider dtype, in the order of the algorithm; the sum is divided and rounded
once. So the mean is right wherever it can be represented.

================================  =====================================  =================================
dtype                             partial sums                           the mean
================================  =====================================  =================================
float16, fp8                      float32                                rounded to the nearest
bfloat16                          float32, of contributions divided by   rounded to the nearest
                                  a power of two, which loses nothing
integers of 8 and 16 bits         int32                                  rounded toward zero
integers of 32 bits               int64                                  rounded toward zero
integers of 64 bits               two, of the upper and lower 32 bits    rounded toward zero
float32, float64, complex         the dtype itself                       the sum, divided
================================  =====================================  =================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flagcx.dtypes import OPS, DType, dtype_of
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call, Plan

_MOST_OF_SHORTS = 1 << 15
"""Ranks whose 16-bit integers an int32 can add up."""


class Average(ABC):
    """How averages over ``size`` ranks are made in one dtype.

    Attributes:
        wide: The dtype of partial sums.
        sums: How many sums are made.
        weight: What contributions are multiplied by.
    """

    sums = 1
    weight = 1.0

    def __init__(self, wide: DType, size: int) -> None:
        self.wide, self._size = wide, size

    @abstractmethod
    def parts(self, x: np.ndarray) -> list[np.ndarray]:
        """New arrays of ``wide``: what ``x`` contributes to each sum."""

    @abstractmethod
    def finish(self, sums: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Makes the mean of the sums of all ranks' parts, which may be overwritten."""


class _Floats(Average):
    def __init__(self, wide: DType, size: int, reaches_as_far: bool) -> None:
        super().__init__(wide, size)
        if reaches_as_far:
            self.weight = 2.0 ** -(size - 1).bit_length()
        self._divisor = size * self.weight

    def parts(self, x: np.ndarray) -> list[np.ndarray]:
        wide = x.astype(self.wide.numpy)
        if self.weight != 1:
            wide *= self.weight
        return [wide]

    def finish(self, sums: Sequence[np.ndarray], out: np.ndarray) -> None:
        total = sums[0]
        np.true_divide(total, self._divisor, total)
        out[...] = total


class _Integers(Average):
    def parts(self, x: np.ndarray) -> list[np.ndarray]:
        return [x.astype(self.wide.numpy)]

    def finish(self, sums: Sequence[np.ndarray], out: np.ndarray) -> None:
        total, size = sums[0], self._size
        if out.dtype.kind == "i":
            toward_zero = total >> 8 * total.itemsize - 1  # -1 where the sum is negative, else 0
            toward_zero &= size - 1
            total += toward_zero
        np.floor_divide(total, size, out=total)
        out[...] = total


class _Halves(Average):
    sums = 2

    def parts(self, x: np.ndarray) -> list[np.ndarray]:
        return [x >> 32, x & 0xFFFFFFFF]

    def finish(self, sums: Sequence[np.ndarray], out: np.ndarray) -> None:
        upper, lower = sums
        size = self._size
        mean = upper // size
        lower += upper - mean * size << 32
        below = lower // size
        mean = (mean << 32) + below
        if out.dtype.kind == "i":
            mean += (mean < 0) & (lower > below * size)
        out[...] = mean


def average_of(dtype: DType, size: int) -> Average | None:
    """How averages are made in a dtype; None where sums are made in the dtype itself, and divided."""
    if dtype.kind == "int":
        nbytes = dtype.numpy.itemsize
        if nbytes == 8:
            return _Halves(dtype, size)
        short = nbytes <= 2 and size <= _MOST_OF_SHORTS
        return _Integers(dtype_of(np.int32 if short else np.int64), size)
    if dtype.accumulate is None:
        return None
    return _Floats(dtype_of(dtype.accumulate), size, dtype.name == "bfloat16")


class Averaged:
    """A plan that adds up in a wider dtype, and divides and rounds once.

    Args:
        plan: Adds up arrays of that dtype; in place, except where the message has blocks.
        average: How averages are made.
        in_place: Whether ``plan`` works in place.
    """

    def __init__(self, plan: Plan, average: Average, in_place: bool) -> None:
        self._plan, self._average, self._in_place = plan, average, in_place

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray | None) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        sums = []
        for part in self._average.parts(sendbuf.reshape(-1)):
            total = part
            if not self._in_place and recvbuf is not None:
                total = np.empty(recvbuf.size, part.dtype)
            self._plan.run(part, None if recvbuf is None else total)
            sums.append(total)
        if recvbuf is not None:
            self._average.finish(sums, recvbuf.reshape(-1))


def averaging(
    call: Call, make: Callable[[Call], Plan], wrap: Callable[[Plan, Average, bool], Plan] = Averaged
) -> Plan:
    """Makes the plan of a call by ``make``; of an average as a sum in a wider dtype, where it needs one.

    Args:
        call: The call.
        make: Makes the plan of a call whose sums are made in its dtype.
        wrap: Makes of the sum the average; see ``Averaged``.
    """
    size = call.schedule.size
    average = None
    if call.op is not None and call.op.average:
        average = average_of(call.dtype, size)
    if average is None:
        return make(call)
    if size == 1:
        return make(replace(call, op=OPS["sum"]))
    whole = not COLLECTIVES[call.schedule.collective].blocks
    return wrap(make(replace(call, dtype=average.wide, op=OPS["sum"], in_place=whole)), average, whole)
