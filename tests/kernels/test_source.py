"""Every kernel compiles without a warning, for each architecture, on a machine without a GPU."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from flagcx.dtypes import DTYPES, OPS, DType, ReduceOp, dtype_of, scaled_sum
from flagcx.errors import OperationError
from flagcx.kernels import source
from tests.kernels import nvrtc

needs_nvrtc = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
KERNELS = [
    (dtype, op)
    for dtype in DTYPES.values()
    for op in OPS.values()
    if source.has_kernel(dtype, op) and source.base_name(op, dtype) == op.name
]


def some_kernels() -> list[tuple[DType, ReduceOp]]:
    """Every dtype, and every operation of every kind of dtype, in as few kernels as that takes."""
    kinds = defaultdict(list)
    for dtype, op in KERNELS:
        kinds[dtype.kind].append((dtype, op))
    made = []
    for kernels in kinds.values():
        dtypes, ops = (
            list({each.name: each for each in column}.values()) for column in zip(*kernels, strict=True)
        )
        count = max(len(dtypes), len(ops))
        made += [(dtypes[i % len(dtypes)], ops[i % len(ops)]) for i in range(count)]
    return made


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kernels", "quickly"),
    [
        pytest.param("sm_90", some_kernels()[::4], False, id="sm_90-few"),  # as on a GPU
        pytest.param("sm_90", some_kernels(), True, id="sm_90-some"),
        pytest.param(  # to PTX, since ptxas has had every dtype and every operation
            "compute_90",
            [kernel for kernel in KERNELS if kernel not in some_kernels()],
            True,
            id="compute_90-others",
            marks=pytest.mark.exhaustive,
        ),
        # The text is the same for every architecture: only what NVIDIA's headers make of a dtype differs.
        pytest.param("sm_80", some_kernels(), True, id="sm_80-some", marks=pytest.mark.exhaustive),
    ],
)
def test_every_kernel_compiles_without_a_warning(architecture, kernels, quickly):

    def compiled(kernel):
        return nvrtc.compile_for(source.kernel_source(*kernel), architecture, source.OPTIONS, quickly)

    with ThreadPoolExecutor(2) as pool:
        for (dtype, op), made in zip(kernels, pool.map(compiled, kernels), strict=True):
            assert made.status == 0, f"{dtype.name} {op.name}: {made.log}"
            assert made.log == "", f"{dtype.name} {op.name} warns: {made.log}"
            assert source.NAME.encode() in made.code


@needs_nvrtc
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("__device__ void f() { unknown_name(); }", "error"),
        ("__device__ void f() { int unused = 0; }", "warning"),
        ('extern "C" __global__ void f() { asm volatile("unknown;"); }', "known instruction: 'unknown'"),
    ],
)
@pytest.mark.parametrize("quickly", [False, True])
def test_a_faulty_source_is_noticed(fault, said, quickly):
    text = source.kernel_source(dtype_of("float32"), OPS["sum"]) + f"\n{fault}\n"
    compiled = nvrtc.compile_for(text, "sm_90", source.OPTIONS, quickly)
    assert said in compiled.log


def test_every_dtype_has_a_kernel_for_every_operation_of_its_kind():
    made = {(dtype.name, op.name) for dtype, op in KERNELS}
    expected = {
        (dtype.name, op.name)
        for dtype in DTYPES.values()
        for op in OPS.values()
        if dtype.kind in op.kinds and source.base_name(op, dtype) == op.name
    }
    assert made == expected


def test_average_and_scaled_sum_share_the_kernel_of_the_sum():
    dtype = dtype_of("float16")
    assert source.kernel_source(dtype, OPS["avg"]) == source.kernel_source(dtype, OPS["sum"])
    assert source.kernel_source(dtype, scaled_sum(0.5)) == source.kernel_source(dtype, OPS["sum"])


def test_an_operation_that_has_no_kernel_is_named():
    with pytest.raises(OperationError, match=r"no kernel for op='band' of float32.*max, min, prod, sum"):
        source.kernel_source(dtype_of("float32"), OPS["band"])


def test_a_ufunc_of_the_callers_own_has_no_kernel():
    import numpy as np

    assert not source.has_kernel(dtype_of("float32"), ReduceOp("hypot", np.hypot, ("float",)))
