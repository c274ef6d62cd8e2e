"""What NCCL's own collectives are asked for."""

from __future__ import annotations

import numpy as np
import pytest

from flagcx.dtypes import DTYPES, OPS, ReduceOp, dtype_of, scaled_sum
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.nccl.native import NativeForm, native_form, native_schedule

VERSION = 22809


@pytest.mark.parametrize(
    ("dtype", "op", "form"),
    [
        ("float32", "sum", NativeForm(7, 0, 1)),
        ("bfloat16", "avg", NativeForm(9, 4, 1)),
        ("uint64", "min", NativeForm(5, 3, 1)),
        ("complex128", "sum", NativeForm(8, 0, 2)),
        ("bool", "land", NativeForm(1, 3, 1)),
        ("bool", "sum", NativeForm(1, 2, 1)),
    ],
)
def test_what_it_knows(dtype, op, form):
    assert native_form("allreduce", dtype_of(dtype), OPS[op], VERSION) == form


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("int16", "sum"), ("float32", "land"), ("int32", "bxor"), ("complex64", "prod"), ("bool", "bxor"),
        ("uint8", "avg"), ("int64", "avg"),
    ],
)  # fmt: skip
def test_what_it_does_not_know(dtype, op):
    assert native_form("reduce_scatter", dtype_of(dtype), OPS[op], VERSION) is None


def test_operations_of_the_callers_own_and_scaled_sums_are_not_its():
    single = dtype_of("float32")
    assert native_form("allreduce", single, scaled_sum(0.5), VERSION) is None
    assert native_form("allreduce", single, ReduceOp("hypot", np.hypot, ("float",)), VERSION) is None


def test_fp8_is_known_from_a_certain_version_on():
    fp8 = dtype_of("float8_e4m3fn")
    assert native_form("allreduce", fp8, OPS["sum"], 22304) is None
    assert native_form("allreduce", fp8, OPS["sum"], VERSION) == NativeForm(10, 0, 1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
def test_what_is_not_combined_travels_as_bytes(dtype):
    assert native_form("alltoall", dtype, None, VERSION) == NativeForm(1, 0, dtype.numpy.itemsize)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_its_schedule_has_blocks_and_no_steps(collective):
    root = 1 if COLLECTIVES[collective].rooted else None
    schedule = native_schedule(collective, 3, root)
    assert schedule.chunks == (3 if COLLECTIVES[collective].blocks else 1)
    assert [p.steps for p in schedule.programs()] == [(), (), ()]
