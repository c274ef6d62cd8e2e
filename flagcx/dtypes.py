"""The one table of dtypes and reduce operations.

Where one rank adds up all contributions in half precision or fp8, it does so in float32 and rounds once.
Averages are made in a wider dtype by every algorithm: see ``flagcx.transport.average``.
bfloat16 and fp8 come from ``ml_dtypes``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

import ml_dtypes
import numpy as np

from flagcx.errors import ArrayError, OperationError
from flagcx.migration import operation_hint


@dataclass(frozen=True, slots=True)
class DType:
    """One element type that flagcx carries.

    Attributes:
        name: NumPy's (or ml_dtypes') name.
        numpy: The NumPy dtype.
        kind: "bool", "int", "float" or "complex".
        accumulate: The dtype in which contributions are added up, or None for the same.
        code: A small number, unique in the table, for signatures that ranks compare.
    """

    name: str
    numpy: np.dtype
    kind: str
    accumulate: np.dtype | None
    code: int


def _table() -> dict[np.dtype, DType]:
    single = np.dtype(np.float32)
    integers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    small = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    rows: list[tuple[list, str, np.dtype | None]] = [
        (["bool"], "bool", None),
        (integers, "int", None),
        (["float16"], "float", single),
        (["float32", "float64"], "float", None),
        (["complex64", "complex128"], "complex", None),
        (small, "float", single),
    ]
    flat = [(np.dtype(name), kind, wide) for names, kind, wide in rows for name in names]
    return {dtype: DType(dtype.name, dtype, kind, wide, i) for i, (dtype, kind, wide) in enumerate(flat)}


DTYPES: dict[np.dtype, DType] = _table()


def dtype_of(dtype) -> DType:
    """Looks a dtype up.

    Raises:
        ArrayError: flagcx does not carry that dtype.
    """
    try:
        return DTYPES[np.dtype(dtype)]
    except (KeyError, TypeError):
        known = ", ".join(d.name for d in DTYPES.values())
        raise ArrayError(
            f"arrays of dtype {dtype!s} cannot be sent; the dtypes are {known}. Convert with "
            f".astype(...), or use the object forms such as comm.allgather_object"
        ) from None


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """How contributions are combined. Must be associative and commutative.

    Attributes:
        name: Short name: "sum", "prod", "min", ... or the ufunc's name.
        ufunc: The binary NumPy ufunc that combines two arrays; for arrays on GPUs also a CuPy kernel.
        kinds: The kinds of dtype it is defined for.
        average: Whether the result is divided by the number of ranks.
        scale: Factor by which each contribution is multiplied before, or None.
        code: A small number, unique in the table; 0 for a ufunc that is not in it.
    """

    name: str
    ufunc: Any
    kinds: tuple[str, ...]
    average: bool = False
    scale: float | None = None
    code: int = 0


Op = str | ReduceOp | np.ufunc
"""How a caller names an operation."""

_ALL = ("bool", "int", "float", "complex")
_REAL = ("bool", "int", "float")
_BITS = ("bool", "int")

OPS: dict[str, ReduceOp] = {
    name: ReduceOp(name, ufunc, kinds, average=name == "avg", code=code)
    for code, (name, ufunc, kinds) in enumerate(
        (
            ("sum", np.add, _ALL),
            ("prod", np.multiply, _ALL),
            ("min", np.minimum, _REAL),
            ("max", np.maximum, _REAL),
            ("avg", np.add, ("int", "float", "complex")),
            ("band", np.bitwise_and, _BITS),
            ("bor", np.bitwise_or, _BITS),
            ("bxor", np.bitwise_xor, _BITS),
            ("land", np.logical_and, _ALL),
            ("lor", np.logical_or, _ALL),
        ),
        start=1,
    )
}


def scaled_sum(factor: float) -> ReduceOp:
    """The sum of all contributions, each multiplied by ``factor`` before it is sent.

    Raises:
        OperationError: ``factor`` is no real number.

    Example:
        >>> comm.allreduce(gradient, op=fc.scaled_sum(1 / 4))  # doctest: +SKIP
    """
    if not isinstance(factor, Real) or isinstance(factor, bool):
        raise OperationError(f"factor must be a number, such as 1 / 4, got {factor!r}")
    return ReduceOp("scaled_sum", np.add, ("float", "complex"), scale=float(factor), code=len(OPS) + 1)


def resolve_op(op: str | ReduceOp | np.ufunc | Callable, dtype: DType) -> ReduceOp:
    """Turns the ``op=`` argument of a call into a ReduceOp for ``dtype``.

    Args:
        op: A name of ``OPS``, a ReduceOp, or any binary NumPy ufunc that is associative and commutative. For
            arrays on GPUs also such a CuPy ufunc, or ``cupy.ElementwiseKernel`` of two inputs and one output.
        dtype: The dtype of the arrays.

    Raises:
        OperationError: ``op`` is unknown, not binary, or not defined for the dtype.
    """
    try:
        return _resolved(op, dtype)
    except TypeError:
        if type(op).__hash__ is not None:
            raise
        raise _no_operation(op) from None


@lru_cache(maxsize=256)
def _resolved(op: Any, dtype: DType) -> ReduceOp:
    if isinstance(op, str):
        if op not in OPS:
            raise OperationError(
                f"op={op!r} is not an operation; expected one of {', '.join(OPS)} or a ufunc"
                f"{operation_hint(op)}"
            )
        found = OPS[op]
    elif isinstance(op, ReduceOp):
        found = op
        if isinstance(op.ufunc, np.ufunc):
            _check_binary(op.ufunc)
    elif isinstance(op, np.ufunc):
        found = _from_ufunc(op, dtype)
    elif callable(op) and hasattr(op, "nin"):
        found = _from_kernel(op, dtype)
    else:
        raise _no_operation(op)
    if dtype.kind not in found.kinds:
        raise OperationError(
            f"op={found.name!r} is not defined for {dtype.name}; it takes {' and '.join(found.kinds)} arrays"
        )
    return found


def _no_operation(op: Any) -> OperationError:
    what = "op" if hasattr(op, "__array_interface__") else f"op={op!r}"  # not a large array's elements
    return OperationError(
        f"{what} is a {type(op).__name__}; expected one of {', '.join(OPS)}, fc.scaled_sum(factor) or a "
        f"binary NumPy ufunc such as np.maximum{operation_hint(op)}"
    )


def check_for_host(op: ReduceOp | None) -> None:
    """Raises OperationError if an operation combines arrays on GPUs alone."""
    if op is not None and not isinstance(op.ufunc, np.ufunc):
        raise OperationError(
            f"op={op.name!r} is a kernel for arrays on GPUs, and the array is a NumPy one; expected a binary "
            f"NumPy ufunc such as np.maximum"
        )


def flushes_subnormals() -> bool:
    """Whether this thread takes the numbers below the smallest normal one for zero.

    It is a mode of the core that libraries built with ``-ffast-math`` set when they are loaded.
    """
    smallest = np.array([1], np.uint32).view(np.float32)
    return not np.multiply(smallest, np.float32(1)).view(np.uint32)[0]


def _from_ufunc(ufunc: np.ufunc, dtype: DType) -> ReduceOp:
    for known in OPS.values():
        if known.ufunc is ufunc and not known.average:
            return known
    _check_binary(ufunc)
    try:
        with np.errstate(all="ignore"):
            sample = ufunc(np.ones(1, dtype.numpy), np.ones(1, dtype.numpy))
    except TypeError as error:
        raise OperationError(f"op={ufunc!r} is not defined for {dtype.name}: {error}") from None
    if sample.dtype != dtype.numpy:
        raise OperationError(
            f"op={ufunc!r} of two {dtype.name} arrays gives {sample.dtype}; expected {dtype.name} back"
        )
    return ReduceOp(ufunc.__name__, ufunc, (dtype.kind,))


def _from_kernel(kernel: Any, dtype: DType) -> ReduceOp:
    """A CuPy ufunc, as the NumPy ufunc of its name where there is one, or a kernel of the caller."""
    namesake = getattr(np, kernel.name.removeprefix("cupy_"), None)
    if kernel.name.startswith("cupy_") and isinstance(namesake, np.ufunc):
        return _from_ufunc(namesake, dtype)
    _check_binary(kernel)
    return ReduceOp(kernel.name, kernel, (dtype.kind,))


def _check_binary(function: Any) -> None:
    if function.nin != 2 or function.nout != 1:
        raise OperationError(
            f"op={function!r} takes {function.nin} arrays and returns {function.nout}; expected 2 and 1"
        )
    if getattr(function, "signature", None) is not None:
        raise OperationError(
            f"op={function!r} combines whole arrays ({function.signature}); expected a ufunc that combines "
            f"them element by element, such as np.maximum"
        )
