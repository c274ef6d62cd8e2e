"""Which CuPy function an operation of the caller's own becomes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.dtypes import ReduceOp
from flagcx.errors import OperationError
from flagcx.kernels.launch import cupy_function


def test_a_numpy_ufunc_becomes_its_namesake():
    cupy = SimpleNamespace(hypot="cupy's hypot")
    assert cupy_function(cupy, ReduceOp("hypot", np.hypot, ("float",))) == "cupy's hypot"


def test_a_kernel_of_the_callers_own_is_taken_as_it_is():
    def kernel(a, b, out):
        return out

    assert cupy_function(SimpleNamespace(), ReduceOp("mine", kernel, ("float",))) is kernel


def test_a_ufunc_that_cupy_lacks_is_named():
    with pytest.raises(OperationError, match=r"op='spacing' .* CuPy has not.*ElementwiseKernel"):
        cupy_function(SimpleNamespace(), ReduceOp("spacing", np.spacing, ("float",)))
