"""Averages of values at the edge of overflow: the rounded mean, in every collective by every algorithm."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms import entries
from flagcx.dtypes import dtype_of
from flagcx.transport.average import average_of
from tests.ranges import exhaustive
from tests.ranks import run_ranks

FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = tuple(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u"))
SPLIT = ("ring 3/4|tree",)


def contribution(rank: int, count: int, name: str) -> np.ndarray:
    """Mostly the largest and smallest values, of one sign in the first half."""
    dtype, random = dtype_of(name).numpy, np.random.default_rng([rank, count])
    if name in INTEGERS:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        values = [high, high - 1, high - rank, low, low + 1, low + rank, 0, 1, 3]
    else:
        high = float(ml_dtypes.finfo(dtype).max)
        values = [high, high / 2, high, -high, -high / 2, high / 4, -high, 0, high / 8]
    drawn = random.integers(0, len(values), count)
    drawn[: count // 2] %= 3
    return np.array(values, object).astype(dtype)[drawn]


def mean_of(size: int, count: int, name: str) -> np.ndarray:
    """By Python's integers, or in double precision."""
    parts = [contribution(q, count, name) for q in range(size)]
    if name in INTEGERS:
        sums = sum(part.astype(object) for part in parts).tolist()
        return np.array([abs(s) // size * (1 if s >= 0 else -1) for s in sums], object).astype(parts[0].dtype)
    total = np.sum([part.astype(np.float64) for part in parts], axis=0)
    return (total / size).astype(np.float32).astype(parts[0].dtype)


def _named(collective: str) -> list[str | None]:
    return [None, *(str(entry.algorithm) for entry in entries(collective))]


def _check(names: tuple[str, ...], block: int) -> int:
    comm = fc.init()
    size, rank, done = comm.size, comm.rank, 0
    count = block * size

    def same(got: np.ndarray, wanted: np.ndarray, *what: object) -> None:
        nonlocal done
        equal = got.reshape(-1).view(np.uint8) == wanted.view(np.uint8)
        assert equal.all(), (*what, got.reshape(-1)[:8], wanted[:8])
        done += 1

    for name in names:
        x, mean = contribution(rank, count, name), mean_of(size, count, name)
        for algorithm in [*_named("allreduce"), *SPLIT]:
            out = comm.allreduce(x, "avg", out=np.empty_like(x), algorithm=algorithm)
            same(out, mean, "allreduce", name, algorithm)
            same(comm.allreduce(x.copy(), "avg", algorithm=algorithm), mean, "in place", name, algorithm)
        same(x, contribution(rank, count, name), "the input")
        for got in comm.allreduce([x.copy(), x.reshape(size, block).copy()], "avg"):
            same(got, mean, "list", name)
        for algorithm in _named("reduce"):
            for root in {0, size - 1}:
                got = comm.reduce(x.copy(), "avg", root, algorithm=algorithm)
                assert (got is None) == (rank != root)
                if got is not None:
                    same(got, mean, "reduce", name, algorithm)
        own = mean[rank * block : (rank + 1) * block]
        for algorithm in _named("reduce_scatter"):
            got = comm.reduce_scatter(x.copy(), "avg", algorithm=algorithm)
            same(got, own, "reduce_scatter", name, algorithm)
            got = comm.reduce_scatter(x, "avg", out=np.empty_like(own), algorithm=algorithm)
            same(got, own, "reduce_scatter", name, algorithm)
            inside = x.copy()
            comm.reduce_scatter(inside, "avg", out=inside[rank * block :][:block], algorithm=algorithm)
            same(inside[rank * block :][:block], own, "reduce_scatter in place", name, algorithm)
        counts = [0] * (size - 1) + [count]
        for algorithm in [None, "ring", "direct"]:
            got = comm.reduce_scatterv(x.copy(), counts, "avg", algorithm=algorithm)
            same(got, mean if rank == size - 1 else mean[:0], "reduce_scatterv", name, algorithm)
    return done


@pytest.mark.parametrize("size", [2, 3, *exhaustive([1, 4])])
def test_threads_get_the_roundedmean_of(size):
    assert min(fc.launch(_check, size, ((*FLOATS, *INTEGERS), 7), threads=True)) > 200


@pytest.mark.parametrize("size", [3, *exhaustive([4])])
def test_processes_get_the_roundedmean_of(size):
    """Through slots, and with 5,000 elements a rank by the ways for longer messages."""
    run_ranks(_check, size, ("float16", "bfloat16", "int8", "int64", "uint64"), 7)
    run_ranks(_check, size, ("float16", "bfloat16", "uint8", "int64"), 5_000)


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("size", [2, 7, 128, 4099, 40_000])
def test_many_ranks_of_the_largest_values(name, size):
    """The arithmetic alone: what so many ranks add up stays inside the wider dtype."""
    average = average_of(dtype_of(name), size)
    assert average is not None
    for sign in (-1, 1) if not name.startswith("u") else (1,):
        limits = ml_dtypes.finfo(name) if name in FLOATS else np.iinfo(name)
        x = np.full(3, limits.min if sign < 0 else limits.max, dtype_of(name).numpy)
        sums = [part * part.dtype.type(size) for part in average.parts(x)]
        out = np.empty_like(x)
        average.finish(sums, out)
        assert (out == x).all()


def test_integers_are_rounded_toward_zero_whatever_the_width():
    for name in INTEGERS[::2]:
        average = average_of(dtype_of(name), 4)
        given = np.array([[7, -7, 5, -5, 3, -3, 1, -1, 0, -4], [0] * 10, [0] * 10, [0] * 10], name)
        sums = [sum(parts) for parts in zip(*map(average.parts, given), strict=True)]
        out = np.empty(10, name)
        average.finish(sums, out)
        assert out.tolist() == [1, -1, 1, -1, 0, 0, 0, 0, 0, -1]


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
def test_wide_dtypes_are_added_up_as_they_are(name):
    assert average_of(dtype_of(name), 4) is None
