"""What each collective must give, in plain NumPy, from data that every rank can make for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.schedule.collectives import COLLECTIVES


def data(rank: int, count: int, dtype: DType, op: str = "sum") -> np.ndarray:
    """Small whole numbers that differ in every (rank, index), so that sums of 8 ranks are exact."""
    numbers = (np.arange(count) * (2 * rank + 3) + 7 * rank) % 11 + 1
    if op == "prod" or dtype.name.startswith("float8"):
        numbers = numbers % 2 + 1
    if dtype.kind == "bool":
        numbers = numbers % 3 > 0
    if dtype.kind == "complex":
        return (numbers - 1j * (numbers % 2)).astype(dtype.numpy)
    return numbers.astype(dtype.numpy)


def combine(arrays: list[np.ndarray], op: ReduceOp, dtype: DType) -> np.ndarray:
    """All arrays combined in the order of ranks, in the accumulator's type, rounded once."""
    wide = dtype.accumulate or dtype.numpy
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = op.ufunc(total, array.astype(wide)).astype(wide)
    if op.average:
        n = len(arrays)
        total = _divided(total, n)
    return total.astype(dtype.numpy)


def _divided(total: np.ndarray, n: int) -> np.ndarray:
    """Integers toward zero; complex numbers part by part (NumPy's division rounds them twice)."""
    if total.dtype.kind in "iu":
        return np.fix(total / n).astype(total.dtype)
    parts = total.view(total.real.dtype)
    return (parts / parts.dtype.type(n)).view(total.dtype)


def expected(
    collective: str, rank: int, size: int, root: int | None, inputs: list[Any], op: ReduceOp, dtype: DType
) -> np.ndarray | None:
    """The OUTPUT of a rank, from every rank's INPUT (None where it has none)."""
    kind = COLLECTIVES[collective]
    if not kind.has_output(rank, root):
        return None
    blocks = kind.output_blocks(size) if kind.blocks else 1
    parts = []
    for block in range(blocks):
        made = kind.expected(rank, block, size, 1, root)
        arrays = [_block(inputs[q], kind.input_blocks(size), c) for q, c in made]
        parts.append(combine(arrays, op, dtype) if kind.reduces else arrays[0])
    return np.concatenate(parts)


def _block(array: np.ndarray, blocks: int, number: int) -> np.ndarray:
    count = len(array) // blocks
    return array[number * count : (number + 1) * count]
