"""Overflows inside a call: results stand, no rank is left behind, and warnings name the caller's line."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import Any

import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks

HUGE = {"float16": 6e4, "float32": 3e38, "float64": 1.7e308, "complex64": 3e38}


def _line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def _said(call: Any) -> tuple[Any, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return call(), caught


def _warned() -> int:
    """Warnings of this rank, each of which names a line of this file."""
    comm, count = fc.init(), 0
    for dtype, huge in HUGE.items():
        for n in (3, 5000, 300_000):
            for _ in range(3):  # the second goes the quick way
                x = np.full(n, huge, dtype)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    line = _line() + 1
                    comm.allreduce(x)
                assert not np.isfinite(x).any(), (dtype, n)
                for said in caught:
                    assert said.category is RuntimeWarning and "encountered in a reduction" in str(
                        said.message
                    )
                    assert (said.filename, said.lineno) == (__file__, line)
                count += len(caught)
    x = np.full(12, 3e38, "f4")
    for call in (
        lambda: comm.reduce_scatter(x, out=np.empty(12 // comm.size, "f4")),
        lambda: comm.reduce(x, out=np.empty(12, "f4")),
        lambda: comm.allreduce(x.copy(), async_op=True).wait(),
        lambda: comm.allreduce([x.copy(), x.astype("f8") * 1e270]),
        lambda: comm.allreduce(x.copy(), algorithm="ring"),
    ):
        for _ in range(2):
            for said in _said(call)[1]:
                assert said.filename == __file__, said
                count += 1
    with np.errstate(all="ignore"):
        assert not _said(lambda: comm.allreduce(x.copy()))[1]
    assert not _said(lambda: comm.allreduce(np.ones(3)))[1]
    return count


@pytest.mark.parametrize("size", [2, 3])
def test_a_warning_names_the_callers_line(size):
    counts = run_ranks(_warned, size)
    assert sum(counts) > 30, counts


def _raising() -> None:
    """A caller whose floating-point errors raise, and whose warnings do."""
    comm = fc.init()
    before = np.geterr()
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype, huge in HUGE.items():
            for algorithm in (None, "ring", "tree", "recursive_doubling", "one_shot", "two_shot"):
                for n in (2, 1000, 200_003):
                    for work in (False, True):
                        x = np.full(n, huge, dtype)
                        got = comm.allreduce(x, algorithm=algorithm, async_op=work)
                        if work:
                            got.wait()
                        assert not np.isfinite(x).any(), (dtype, algorithm, n)
        small = np.full(100, 1e-30, "f4")
        comm.allreduce(small, "prod")
        assert (small == 0).all()
        infinite = np.full(100, np.inf if comm.rank else -np.inf, "f4")
        assert np.isnan(comm.allreduce(infinite)).all()
        comm.allreduce(np.full(1000, 3e38, "f4"), compression="int8")
        assert np.geterr()["over"] == "raise", "the caller's mode is its own"
    assert np.geterr() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with contextlib.suppress(RuntimeWarning):  # after the call, on the ranks that add something up
                comm.allreduce(np.full(9, 3e38, "f4"))
    assert (comm.allreduce(np.ones(3)) == comm.size).all()


@pytest.mark.parametrize("size", [2, 3])
def test_a_caller_whose_errors_raise_loses_no_rank(size):
    run_ranks(_raising, size)
