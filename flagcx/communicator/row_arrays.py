"""The arrays of an all-reduce of rows with an epilogue: checked, and made plain where they are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flagcx.dtypes import dtype_of
from flagcx.errors import ArgumentError, ArrayError
from flagcx.executor.host import Executor
from flagcx.executor.rows import find_rows
from flagcx.executor.staging import PlainArrays
from flagcx.foreign_arrays import in_kind
from flagcx.kernels.epilogue import (
    COLUMN,
    ELEMENT,
    FLOATS,
    ROW,
    Epilogue,
    Operand,
    Piece,
    check_numbers,
    operands_of,
    pieces_named,
    result_dtype,
)
from flagcx.kernels.rows import MOST_ARRAYS, MOST_COLUMNS, MOST_NUMBERS
from flagcx.transport.base import DEVICE, Plan
from flagcx.transport.rows import RowArrays, Rows

_SINGLE = np.dtype(np.float32)
_MAY_BE_ONE = ({"x", "out"}, {"residual", "residual_out"})
"""Arrays of which one may take the place of the other."""


class RowBuffers(NamedTuple):
    """The arrays of a call, checked.

    Attributes:
        rows: The operation.
        arrays: What this rank gives.
        out: Where the result goes.
        value: What the caller gets.
        plain: The arrays in the place of those that were not plain.
    """

    rows: Rows
    arrays: RowArrays
    out: Any
    value: Any
    plain: PlainArrays

    def plan(self, executor: Executor, algorithm: str | None, key: tuple = ()) -> Plan:
        """The plan of the call, with the copies if there are any; without, calls with the key go there."""
        plan = find_rows(executor, self.rows, self.out is self.arrays.x, algorithm)
        around = self.plain.around(plan)
        if key and around is plan and self.value is self.out:
            operands = self.rows.epilogue.operands
            written = {"out", *(operand.name for operand in operands if operand.keeps)}
            executor.remember(key, RowRepeat(plan, operands, written))
        return around


class RowRepeat(NamedTuple):
    """What is left to do of a call like an earlier one.

    Attributes:
        plan: Its plan.
        operands: The operands of its epilogue, in order.
        written: The names of the arrays that it writes.
    """

    plan: Plan
    operands: Sequence[Operand]
    written: set[str]


def repeated(
    executor: Executor, key: tuple, x: Any, out: Any, given: Mapping[str, Any]
) -> tuple[Plan, RowArrays] | None:
    """A call like an earlier one, whose arrays can be taken as they are; None where it has to be checked."""
    repeat: RowRepeat | None = executor.quick.get(key)
    if repeat is None:
        return None
    placed = {"x": x, "out": out}
    for operand in repeat.operands:
        array = given.get(operand.name)
        if array is None and operand.name == "residual_out":
            array = given["residual"]
        if array is not None:
            placed[operand.name] = array
    on_host = executor.transport.kind != DEVICE
    for name, array in placed.items():
        if array.__class__ is not x.__class__ or not executor.is_plain(array):
            return None
        if on_host and name in repeat.written and not array.flags.writeable:
            return None
    _check_apart(executor, placed, repeat.written)
    return repeat.plan, RowArrays(x, [placed.get(operand.name) for operand in repeat.operands])


def key_of(x: Any, names: tuple, out: Any, dtype: Any, algorithm: Any, given: Mapping[str, Any]) -> tuple:
    """What is seen of a call: calls with the same key differ in the addresses of their arrays alone."""
    seen: list[Any] = [names, x.__class__, x.shape, x.dtype, out is x, dtype, algorithm]
    for name, value in given.items():
        seen += (name, value.shape, value.dtype) if hasattr(value, "shape") else (name, value)
    return (*seen, None if out is None else (out.shape, out.dtype))


def row_buffers(
    executor: Executor, x: Any, names: tuple[Any, ...], out: Any, dtype: Any, given: Mapping[str, Any]
) -> RowBuffers:
    """Takes the arrays of a call.

    Args:
        executor: Takes arrays of this kind, and makes them.
        x: The caller's rows.
        names: The pieces of the epilogue, by name or themselves.
        out: The caller's array for the result, or None.
        dtype: The dtype of a quantised result, or None.
        given: The caller's operands and numbers, by name.

    Raises:
        ArrayError: An array has another shape or dtype than it must have, or overlaps another.
        ArgumentError: An operand or number is missing, or there is one that no piece takes.
    """
    pieces = pieces_named(names)
    operands = operands_of(pieces)
    _check_names(pieces, operands, given)
    numbers = check_numbers(pieces, given)
    taken = executor.take(x, "x", out is x)
    kind = dtype_of(taken.dtype)
    if kind.name not in FLOATS or taken.ndim == 0:
        raise ArrayError(
            f"x has dtype {kind.name} and shape {taken.shape}; expected rows of {', '.join(FLOATS)}"
        )
    columns = taken.shape[-1]
    if executor.transport.kind == DEVICE and columns > MOST_COLUMNS:
        raise ArrayError(
            f"x has rows of {columns} elements, and on GPUs they may have {MOST_COLUMNS}; call "
            f"comm.allreduce, and what follows it by itself"
        )
    made = result_dtype(pieces, kind, dtype)
    same = out is x and made == kind
    target = taken if same else executor.result(out, "out", taken.shape, made.numpy)
    arrays = {o.name: _operand(executor, o, given.get(o.name), taken.shape) for o in operands}
    if "residual_out" in arrays and arrays["residual_out"] is None:
        arrays["residual_out"] = executor.take(given["residual"], "residual", True)
    plain = PlainArrays(executor)
    placed = {"x": plain.take(taken), "out": plain.take(target, reads=False, writes=True)}
    for operand in operands:
        array = arrays[operand.name]
        if array is not None:
            keeps = bool(operand.keeps)
            placed[operand.name] = plain.take(array, reads=not keeps, writes=keeps)
    _check_apart(executor, placed, {"out", *(o.name for o in operands if o.keeps)})
    dtypes = tuple(None if arrays[o.name] is None else dtype_of(arrays[o.name].dtype) for o in operands)
    rows = Rows(taken.size // max(columns, 1), columns, kind, Epilogue(pieces, numbers, dtypes, made))
    value = in_kind(x, target) if out is None else out
    if any(o.name == "scales" for o in operands):
        scales = given.get("scales")
        value = value, in_kind(x, arrays["scales"]) if scales is None else scales
    used = RowArrays(placed["x"], [placed.get(o.name) for o in operands])
    return RowBuffers(rows, used, placed["out"], value, plain)


def _check_names(pieces: Sequence[Piece], operands: Sequence[Operand], given: Mapping[str, Any]) -> None:
    numbers = [name for piece in pieces for name in piece.numbers]
    known = [*(operand.name for operand in operands), *numbers]
    extra = [name for name in given if name not in known]
    names = [piece.name for piece in pieces]
    if extra:
        raise ArgumentError(f"no piece of {names} takes {extra[0]!r}; expected some of {', '.join(known)}")
    if len(operands) > MOST_ARRAYS or len(numbers) > MOST_NUMBERS:
        raise ArgumentError(
            f"{names} take {len(operands)} arrays and {len(numbers)} numbers; an epilogue may have "
            f"{MOST_ARRAYS} and {MOST_NUMBERS}"
        )
    for operand in operands:
        if given.get(operand.name) is None and not (operand.default or operand.keeps):
            raise ArgumentError(f"{names} need {operand.name}=, an array of {_words(operand)}")


def _operand(executor: Executor, operand: Operand, array: Any, shape: tuple[int, ...]) -> Any:
    """Takes an operand, or makes the array for one that is written for each row."""
    name = operand.name
    if array is None:
        return executor.result(None, name, (*shape[:-1], 1), _SINGLE) if operand.shape == ROW else None
    taken = executor.take(array, name, bool(operand.keeps))
    count = {
        ELEMENT: math.prod(shape),
        COLUMN: shape[-1],
        ROW: math.prod(shape[:-1]),
    }.get(operand.shape, 1)
    dtypes = FLOATS if operand.shape in (ELEMENT, COLUMN) else ("float32",)
    right = taken.size == count and (operand.shape != ELEMENT or taken.shape[-1:] == shape[-1:])
    if not right or taken.dtype.name not in dtypes:
        raise ArrayError(
            f"{name} has shape {taken.shape} and dtype {taken.dtype}; x has shape {shape}, so it must be "
            f"{_words(operand)} ({count} elements) in {' or '.join(dtypes)}"
        )
    return taken


def _words(operand: Operand) -> str:
    each = {ELEMENT: "the shape of x", COLUMN: "one value for each column", ROW: "one value for each row"}
    return each.get(operand.shape, "one value")


def _check_apart(executor: Executor, arrays: Mapping[str, Any], written: set[str]) -> None:
    """Raises ArrayError where an array that is written overlaps one that it does not take the place of."""
    on_device = executor.transport.kind == DEVICE
    spans = []
    for name, array in arrays.items():
        begin = array.data.ptr if on_device else array.ctypes.data
        spans.append((begin, begin + array.nbytes, name))
    for i, (begin, end, name) in enumerate(spans):
        for first, last, other in spans[:i]:
            if begin >= last or first >= end or not (name in written or other in written):
                continue
            if (begin, end) != (first, last) or {name, other} not in _MAY_BE_ONE:
                raise ArrayError(
                    f"{other} and {name} overlap, and one of them is written; pass arrays that lie apart, "
                    f"such as {name}.copy()"
                )
