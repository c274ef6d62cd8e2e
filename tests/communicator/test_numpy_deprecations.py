"""A job with warnings as errors: what flagcx calls in NumPy is deprecated in no version that is supported."""

from __future__ import annotations

import warnings

import numpy as np

import flagcx as fc
from tests.ranks import run_ranks

OPS = ("sum", "prod", "min", "max", "avg", np.maximum, np.fmin)
ALGORITHMS = (None, "ring", "tree", "one_shot", "two_shot", "recursive_doubling")


def _all_operations() -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = fc.init()
        results = []
        for op in OPS:
            for algorithm in ALGORITHMS:
                for count in (5, 40_000):
                    for dtype in (np.float16, np.float32):
                        x = np.full(count, 1 + comm.rank, dtype)
                        results.append(float(comm.allreduce(x, op, algorithm=algorithm)[-1]))
            comm.reduce(np.ones(3), op)
            comm.reduce_scatter(np.ones(3 * comm.size), op)
            comm.allreduce([np.ones(3), np.ones(4)], op)
        return results


def test_no_call_is_deprecated():
    for size, expected in ((2, (3, 2, 1, 2, 1.5, 2, 1)), (3, (6, 6, 1, 3, 2, 3, 1))):
        per_op = 4 * len(ALGORITHMS)
        wanted = [float(value) for value in expected for _ in range(per_op)]
        assert run_ranks(_all_operations, size) == [wanted] * size
