"""What collectives must give, from NumPy alone. Data differs in every (rank, index)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flagcx.dtypes import OPS


def contribution(rank: int, count: int, dtype, op: str = "sum", offset: int = 0) -> np.ndarray:
    """What ``rank`` contributes: small whole numbers, so that sums are exact in every dtype."""
    return _kept_contribution(rank, count, np.dtype(dtype), op, offset).copy()


def _contribution(rank: int, count: int, dtype: np.dtype, op: str, offset: int) -> np.ndarray:
    index = np.arange(offset, offset + count)
    if dtype == np.bool_ or op in ("land", "lor"):
        return ((index + rank) % 3 > 0).astype(dtype)
    if op == "prod":
        return (1 + ((index + rank) % 5 == 0)).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind not in "iu":  # fp8
        return ((index + rank) % 2).astype(dtype)
    values = (index * 7 + rank * 13 + index // 11) % 7
    if dtype.kind == "c":
        return (values + 1j * ((index + 3 * rank) % 5)).astype(dtype)
    return values.astype(dtype)


_kept_contribution = lru_cache(maxsize=256)(_contribution)


def reduced(size: int, count: int, dtype, op: str = "sum", offset: int = 0) -> np.ndarray:
    """What all ranks' contributions come to."""
    make = _kept_reduced if count < 200_000 else _reduced  # all algorithms ask for the same small ones
    return make(size, count, np.dtype(dtype), op, offset)


def _reduced(size: int, count: int, dtype: np.dtype, op: str, offset: int) -> np.ndarray:
    parts = [_contribution(q, count, dtype, op, offset) for q in range(size)]
    wide = dtype if dtype.kind in "biuc" else np.dtype(np.float64)
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = OPS[op].ufunc(total, part.astype(wide))
    if op == "avg":
        total = np.trunc(total / size) if dtype.kind in "iu" else total / size
    return np.asarray(total).astype(dtype)


_kept_reduced = lru_cache(maxsize=64)(_reduced)


def assert_same(got, expected, what: str) -> None:
    """Compares bit by bit where numbers are whole; an average is rounded once."""
    got = np.asarray(got)
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.size == expected.size, f"{what}: {got.size} elements, expected {expected.size}"
    same = got.reshape(-1) == expected.reshape(-1)
    if not same.all():
        wrong = np.flatnonzero(~same)
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.size} wrong, first at {wrong[0]}: {got.reshape(-1)[wrong[0]]!r}, "
            f"expected {expected.reshape(-1)[wrong[0]]!r}"
        )
