"""NCCL's own collectives: which dtypes and operations they take, as NCCL's numbers, without NCCL."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.dtypes import DType, ReduceOp
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Program, Schedule

NATIVE = "native"
"""The algorithm of NCCL's own collectives: ``Algorithm.NATIVE``, which a transport does not import."""

UINT8 = 1
"""NCCL's number of the type for bytes."""

_TYPES = {
    "int8": 0, "uint8": UINT8, "bool": UINT8, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11,
    "complex64": 7, "complex128": 8,
}  # fmt: skip
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_BOOL_OPS = {"sum": 2, "max": 2, "lor": 2, "bor": 2, "prod": 3, "min": 3, "land": 3, "band": 3}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_FLOAT8_SINCE = 22400


@dataclass(frozen=True, slots=True)
class NativeForm:
    """A dtype and operation in NCCL's terms.

    Attributes:
        type: NCCL's number of the type.
        op: NCCL's number of the operation.
        per_element: NCCL's elements for each element, such as 2 for a complex number.
    """

    type: int
    op: int
    per_element: int


def native_form(collective: str, dtype: DType, op: ReduceOp | None, nccl_version: int) -> NativeForm | None:
    """The form in which NCCL's own collective takes a dtype and operation, or None if it does not.

    The version is NCCL's integer: 23007 is 2.30.7.

    Example:
        >>> from flagcx.dtypes import OPS, dtype_of
        >>> native_form("allreduce", dtype_of("complex64"), OPS["sum"], 22809)
        NativeForm(type=7, op=0, per_element=2)
    """
    if not COLLECTIVES[collective].reduces or collective == "barrier":
        return NativeForm(UINT8, 0, dtype.numpy.itemsize)
    if op is None or op.code == 0 or op.scale is not None or dtype.name not in _TYPES:
        return None
    if dtype.name in _FLOAT8 and nccl_version < _FLOAT8_SINCE:
        return None
    if dtype.kind == "complex" and op.name not in ("sum", "avg"):
        return None
    if op.average and dtype.kind == "int":
        return None  # NCCL adds up in the dtype itself, where sums overflow
    known = _BOOL_OPS if dtype.kind == "bool" else _OPS
    if op.name not in known:
        return None
    return NativeForm(_TYPES[dtype.name], known[op.name], 2 if dtype.kind == "complex" else 1)


def native_schedule(collective: str, size: int, root: int | None = None) -> Schedule:
    """The schedule of NCCL's own collective in a ``Call``. It has no steps, which NCCL decides."""
    chunks = size if COLLECTIVES[collective].blocks else 1
    return Schedule(collective, NATIVE, size, chunks, _no_steps, root, aligned=True)


def _no_steps(rank: int) -> Program:
    return Program(rank, ())
