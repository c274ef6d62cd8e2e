"""Callers' arrays on a GPU as CuPy arrays, without a copy: CuPy's, torch's, JAX's and Numba's.

CuPy views existing memory as fp8, but refuses to allocate fp8 arrays or to compute with them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flagcx.arguments import check_result
from flagcx.errors import ArrayError
from flagcx.foreign_arrays import as_carried, is_immutable, library_of, tell_of_writes


def device_array(cupy: Any, array: Any, what: str, writable: bool) -> Any:
    """Takes an array of a GPU, of any strides, without a copy.

    Args:
        cupy: The CuPy module.
        array: A CuPy array, or anything on a GPU that offers ``__cuda_array_interface__`` or DLPack.
        what: Its name for messages.
        writable: Whether it will be written.

    Returns:
        A CuPy array over the same memory.

    Raises:
        ArrayError: It is no array on a GPU, or immutable and to be written.
    """
    return array if isinstance(array, cupy.ndarray) else _viewed(cupy, array, what, writable)


def device_result(cupy: Any, out: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Checks an ``out=`` array on a GPU, or makes one.

    Raises:
        ArrayError: It has another dtype or number of elements, or cannot be written in place.
    """
    if out is None:
        return empty(cupy, shape, dtype)
    view = device_array(cupy, out, what, True)
    check_result(view, what, shape, dtype)
    return view


def empty(cupy: Any, shape: tuple[int, ...] | int, dtype: Any) -> Any:
    """An uninitialised array on the current device; of fp8 too, which ``cupy.empty`` refuses."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = cupy.cuda.alloc(max(1, math.prod(shape) * dtype.itemsize))
    return cupy.ndarray(shape, dtype, memory)


def _viewed(cupy: Any, array: Any, what: str, writable: bool) -> Any:
    if library_of(array) == "torch":
        return _from_torch(cupy, array, what, writable)
    if writable and is_immutable(array):
        raise ArrayError(
            f"{what} is a JAX array, which nothing may write to; pass "
            f"out=cupy.empty_like(cupy.asarray({what})), or a CuPy array"
        )
    if not hasattr(array, "__dlpack__") and not hasattr(array, "__cuda_array_interface__"):
        raise ArrayError(
            f"{what} is a {type(array).__module__}.{type(array).__qualname__}, and another array of the call "
            f"is on a GPU; expected an array on that GPU too, such as cupy.asarray({what})"
        )
    try:
        return cupy.asarray(array) if hasattr(array, "__cuda_array_interface__") else cupy.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(f"{what} cannot be taken as a CuPy array: {error}") from error


def _from_torch(cupy: Any, tensor: Any, what: str, writable: bool) -> Any:
    """A torch tensor's memory; dtypes that DLPack lacks are exchanged as integers."""
    if not tensor.is_cuda:
        raise ArrayError(
            f"{what} is a tensor on {tensor.device}; expected one on a GPU, such as {what}.cuda()"
        )
    if writable:
        tell_of_writes(tensor)
    plain, carrier, dtype = as_carried(tensor)
    return cupy.from_dlpack(plain) if carrier is None else cupy.from_dlpack(plain.view(carrier)).view(dtype)
