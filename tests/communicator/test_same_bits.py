"""Every rank ends with the same bits where operands are not free to change places."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms import entries
from tests.ranks import run_ranks

ALGORITHMS = [str(entry.algorithm) for entry in entries("allreduce")]


def _contributions(rank: int, count: int) -> list[tuple[np.ndarray, str]]:
    """Arrays and operations whose result depends on which operand comes first."""
    random = np.random.default_rng([rank, count])
    factors = random.standard_normal(count) + 1j * random.standard_normal(count)
    zeros = np.where(random.random(count) < 0.5, 0.0, -0.0)
    payloads = random.integers(1, 1 << 20, count)
    single = (payloads | 0x7FC00000).astype(np.uint32).view(np.float32)
    double = (payloads | 0x7FF8000000000000).astype(np.uint64).view(np.float64)
    half = (payloads & 0x1FF | 0x7E00).astype(np.uint16).view(np.float16)
    sums = random.uniform(-2, 2, count) * 2.0 ** random.integers(-12, 12, count)
    return [
        (factors, "prod"),
        (factors.astype(np.complex64), "prod"),
        *((zeros.astype(dtype), op) for dtype in ("f2", "f4", "f8") for op in ("min", "max")),
        *((nans, op) for nans in (single, double, half) for op in ("sum", "prod", "min", "max")),
        (double, "avg"),
        *((sums.astype(dtype), "sum") for dtype in ("f2", "f4", "f8")),
    ]


def _check(algorithms: list[str], counts: tuple[int, ...]) -> None:
    comm = fc.init()
    for count in counts:
        for number, (x, op) in enumerate(_contributions(comm.rank, count)):
            with np.errstate(all="ignore"):
                results = [comm.allreduce(x, op, out=np.empty_like(x), algorithm=a) for a in algorithms]
                for at in (1, 3):  # in place, in memory of another alignment on each rank
                    shifted = np.empty(count + 8, x.dtype)[at + comm.rank % 3 :][:count]
                    shifted[...] = x
                    results += [comm.allreduce(shifted.copy() if at == 3 else shifted, op)]
            for label, mine in zip([*algorithms, "shifted", "in place"], results, strict=True):
                raw = comm.allgather(mine.reshape(-1).view(np.uint8))
                differing = np.flatnonzero((raw != raw[0]).any(0))
                assert not differing.size, (label, op, number, x.dtype, count, differing[:5])


@pytest.mark.parametrize("size", [2, 3])
def test_threads_end_with_the_same_bits(size):
    fc.launch(_check, size, (ALGORITHMS, (1, 1003)), threads=True)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_end_with_the_same_bits(size):
    run_ranks(_check, size, ALGORITHMS, (1003, 40_001))
