"""What callers may give as ``op=``."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.dtypes import OPS, dtype_of, resolve_op
from flagcx.errors import OperationError

DOUBLE = dtype_of("float64")


class Kernel:
    """Has the face of CuPy's ufuncs and of its ElementwiseKernel."""

    def __init__(self, name: str, nin: int = 2, nout: int = 1) -> None:
        self.name, self.nin, self.nout = name, nin, nout

    def __call__(self, a, b, c=None):
        raise NotImplementedError


def test_a_numpy_ufunc_of_the_table_is_that_operation():
    assert resolve_op(np.add, DOUBLE) is OPS["sum"]
    assert resolve_op(np.hypot, DOUBLE).ufunc is np.hypot


def test_a_ufunc_of_cupy_is_its_namesake():
    assert resolve_op(Kernel("cupy_add"), DOUBLE) is OPS["sum"]
    assert resolve_op(Kernel("cupy_hypot"), DOUBLE) == resolve_op(np.hypot, DOUBLE)


def test_a_kernel_of_the_callers_own_is_taken_as_it_is():
    kernel = Kernel("add")  # No ufunc of CuPy's: it only happens to be called so.
    assert resolve_op(kernel, DOUBLE).ufunc is kernel


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (np.sqrt, "takes 1 arrays and returns 1; expected 2 and 1"),
        (Kernel("mine", nin=3), "takes 3 arrays and returns 1; expected 2 and 1"),
        (np.equal, "gives bool; expected float64 back"),
        (lambda a, b: a, "is a function; expected one of sum"),
        ("mean", "op='mean' is not an operation; expected one of sum"),
        ("band", "op='band' is not defined for float64; it takes bool and int arrays"),
    ],
)
def test_what_is_no_operation_is_refused(op, message):
    with pytest.raises(OperationError, match=message.replace("(", r"\(")):
        resolve_op(op, DOUBLE)


def test_a_kernel_for_gpus_is_refused_for_numpy_arrays():
    with fc.init() as comm:
        x = np.ones(10)
        with pytest.raises(OperationError, match="op='mine' is a kernel for arrays on GPUs"):
            comm.allreduce(x, Kernel("mine"))
        assert comm.allreduce(x)[0] == 1
