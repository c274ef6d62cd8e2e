"""Which arrays on a GPU are taken, and what is said of the others, with a fake of CuPy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.errors import ArrayError
from flagcx.kernels.views import device_array, device_result


class FakeArray(np.ndarray):
    """Stands for CuPy's class: memory of the host, but not NumPy's own class."""


CUPY = SimpleNamespace(ndarray=FakeArray)


def made(shape: tuple[int, ...], dtype: str = "float32") -> FakeArray:
    return np.zeros(shape, dtype).view(FakeArray)


def test_cupys_arrays_are_taken_as_they_are():
    x = made((3, 4))
    assert device_array(CUPY, x, "x", True) is x


def test_an_array_of_the_host_beside_one_on_a_gpu_is_refused():
    with pytest.raises(
        ArrayError, match=r"out is a builtins.list, and another array of the call is on a GPU"
    ):
        device_array(CUPY, [1, 2], "out", True)


def test_jaxs_arrays_are_not_written():
    kind = type("ArrayImpl", (), {"__module__": "jaxlib.xla_extension", "__dlpack__": None})
    with pytest.raises(ArrayError, match=r"x is a JAX array, which nothing may write to; pass out="):
        device_array(CUPY, kind(), "x", True)


def test_a_tensor_of_the_host_is_refused():
    kind = type("Tensor", (), {"__module__": "torch", "is_cuda": False, "device": "cpu"})
    with pytest.raises(ArrayError, match=r"x is a tensor on cpu; expected one on a GPU, such as x.cuda\(\)"):
        device_array(CUPY, kind(), "x", True)


def test_a_result_of_another_kind_or_size_is_refused():
    with pytest.raises(ArrayError, match="out has dtype int32, expected float32"):
        device_result(CUPY, made((4,), "int32"), "out", (4,), np.dtype("float32"))
    with pytest.raises(ArrayError, match=r"out has 3 elements \(shape \(3,\)\), expected 4: shape \(2, 2\)"):
        device_result(CUPY, made((3,)), "out", (2, 2), np.dtype("float32"))
