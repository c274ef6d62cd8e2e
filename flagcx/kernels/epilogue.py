"""What may be done with the rows of a sum before they are stored: the pieces of an epilogue.

The sum of all ranks' rows is in registers as float32, and an epilogue is a sequence of pieces that each turn
every value ``x`` of a row into another: add a residual, normalise the row, quantise it. A piece is a few
words of CUDA and a function of NumPy arrays that computes the same; the kernels of ``flagcx.kernels.rows``
are generated from the words, and arrays of the host take the function.

In the words of a piece these names have a meaning:

* ``x``: the value so far.
* the names of its operands: the operand's value for this element, column or row, as float32.
* the names of its numbers, which come with the call.
* the names of its statistics: what was computed of the whole row.
* ``count``: the number of columns; ``LIMIT``: the largest value of the dtype of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flagcx.arguments import is_number
from flagcx.dtypes import DType, dtype_of
from flagcx.errors import ArgumentError

ELEMENT, COLUMN, ROW, ONE = "element", "column", "row", "one"
"""What an operand has a value for: each element of the sum, each column, each row; or it is one value."""

FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes of the rows, and of operands for elements and columns. Operands for rows, or of one value, are
float32."""
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Dtypes of a quantised result, and the largest value of each."""

_LEAST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that a piece reads or writes besides the sum.

    Attributes:
        name: What callers and the words of the piece call it.
        shape: ``ELEMENT``, ``COLUMN``, ``ROW`` or ``ONE``.
        default: What the words read in its place where a call has no such array; empty if it must have one.
        keeps: For an operand that is written: what of, "x" or a statistic. Empty for one that is read.
    """

    name: str
    shape: str
    default: str = ""
    keeps: str = ""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number that is computed of a whole row.

    Attributes:
        name: What the words of the piece call it.
        combine: "sum", or "max" of numbers from 0 up.
        of: What is combined over the row.
        then: What is made of the combined value, which has the same name.
    """

    name: str
    combine: str
    of: str
    then: str


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One step of an epilogue.

    Attributes:
        name: Its name.
        element: The new value of each element, in CUDA.
        counterpart: The same with NumPy: (x, operands and numbers by name) -> the new x. ``x`` is float32, of
            shape (rows, columns); operands are float32 too, but for those that are written, which it fills.
        operands: The arrays that it reads or writes.
        numbers: Names of its numbers.
        statistics: What it computes of each row first, in this order.
        quantizes: Whether the result has a dtype of ``LIMITS`` after it; only the last piece may.
    """

    name: str
    element: str
    counterpart: Callable[..., np.ndarray]
    operands: tuple[Operand, ...] = ()
    numbers: tuple[str, ...] = ()
    statistics: tuple[Statistic, ...] = ()
    quantizes: bool = False


def _add_residual(x: np.ndarray, residual: np.ndarray, residual_out: np.ndarray) -> np.ndarray:
    x = x + residual
    residual_out[...] = x
    return x


def _normalise(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
    mean = np.mean(x * x, axis=1, keepdims=True, dtype=np.float32)
    return x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight


def _standardise(x: np.ndarray, weight: Any, shift: Any, eps: float) -> np.ndarray:
    apart = x - np.mean(x, axis=1, keepdims=True, dtype=np.float32)
    spread = np.mean(apart * apart, axis=1, keepdims=True, dtype=np.float32)
    return apart * (np.float32(1) / np.sqrt(spread + np.float32(eps))) * weight + shift


def _quantize_rows(x: np.ndarray, scales: np.ndarray, limit: float) -> np.ndarray:
    scale = np.abs(x).max(axis=1, keepdims=True, initial=0) / np.float32(limit)
    scale[scale < _LEAST_SCALE] = _LEAST_SCALE
    scales[...] = scale
    return _limited(x / scale, limit)


def _quantize(x: np.ndarray, scale: np.ndarray, limit: float) -> np.ndarray:
    return _limited(x / scale, limit)


def _limited(x: np.ndarray, limit: float) -> np.ndarray:
    return np.clip(x, np.float32(-limit), np.float32(limit))


def _silu_mul(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return gate / (np.float32(1) + np.exp(-gate)) * x


_WEIGHT = Operand("weight", COLUMN, "1.0f")

PIECES: dict[str, Piece] = {
    piece.name: piece
    for piece in (
        Piece("bias", "x + bias", lambda x, bias: x + bias, (Operand("bias", COLUMN),)),
        Piece("scale", "x * factor", lambda x, factor: x * np.float32(factor), numbers=("factor",)),
        Piece("silu_mul", "gate / (1.0f + expf(-gate)) * x", _silu_mul, (Operand("gate", ELEMENT),)),
        Piece(
            "residual", "x + residual", _add_residual,
            (Operand("residual", ELEMENT), Operand("residual_out", ELEMENT, keeps="x")),
        ),
        Piece(
            "rmsnorm", "x * inverse * weight", _normalise, (_WEIGHT,), ("eps",),
            (Statistic("inverse", "sum", "x * x", "1.0f / sqrtf(inverse / count + eps)"),),
        ),
        Piece(
            "layernorm", "(x - mean) * inverse * weight + shift", _standardise,
            (_WEIGHT, Operand("shift", COLUMN, "0.0f")), ("eps",),
            (
                Statistic("mean", "sum", "x", "mean / count"),
                Statistic(
                    "inverse", "sum", "(x - mean) * (x - mean)", "1.0f / sqrtf(inverse / count + eps)"
                ),
            ),
        ),
        Piece(
            "quantize_rows", "limited(x / scale)", _quantize_rows,
            (Operand("scales", ROW, keeps="scale"),), (),
            (Statistic("scale", "max", "fabsf(x)", "not_below(scale / LIMIT, 1.17549435e-38f)"),), True,
        ),
        Piece("quantize", "limited(x / scale)", _quantize, (Operand("scale", ONE),), quantizes=True),
    )
}  # fmt: skip
"""The pieces that there are, by name. A caller may make another: see ``Piece``."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What is done with each row of a sum.

    Attributes:
        pieces: In the order in which they are applied.
        numbers: The numbers of all pieces, in order.
        dtypes: The dtype of each operand, in order; None where a call has no such array.
        out: The dtype of the result.
    """

    pieces: tuple[Piece, ...]
    numbers: tuple[float, ...]
    dtypes: tuple[DType | None, ...]
    out: DType

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of all pieces, in order."""
        return operands_of(self.pieces)

    def describe(self) -> str:
        """The epilogue in words that must be the same on every rank."""
        numbers = iter(self.numbers)
        words = []
        for piece in self.pieces:
            given = "".join(f" {name}={next(numbers):.9g}" for name in piece.numbers)
            words.append(piece.name + given)
        dtypes = ", ".join("none" if dtype is None else dtype.name for dtype in self.dtypes)
        return f"{' | '.join(words)} ({dtypes}) to {self.out.name}"

    def apply(self, x: np.ndarray, arrays: Sequence[np.ndarray | None], out: np.ndarray) -> None:
        """Applies the epilogue on the host.

        Args:
            x: The sum, of shape (rows, columns).
            arrays: The operands, in order: of shape (rows, columns), (columns,), (rows, 1) or (1,).
            out: Where the result goes, of the shape of ``x``.
        """
        if not x.size:  # rows without columns: NumPy warns of the mean of nothing
            for operand, array in zip(self.operands, arrays, strict=True):
                if operand.keeps and array is not None:
                    array[...] = 0
            return
        given: dict[str, Any] = {"limit": LIMITS.get(self.out.name, 0.0)}
        for operand, array in zip(self.operands, arrays, strict=True):
            if array is None:
                given[operand.name] = np.float32(float(operand.default.rstrip("f")))
            else:
                given[operand.name] = array if operand.keeps else array.astype(np.float32, copy=False)
        value, numbers = x.astype(np.float32, copy=False), iter(self.numbers)
        for piece in self.pieces:
            names = [operand.name for operand in piece.operands]
            options = {name: given[name] for name in names}
            options |= {name: next(numbers) for name in piece.numbers}
            if piece.quantizes:
                options["limit"] = given["limit"]
            value = piece.counterpart(value, **options)
        if self.out.name == "int8":
            value = np.rint(np.where(np.isnan(value), -1, value))
        out[...] = value


@lru_cache(maxsize=256)
def operands_of(pieces: Sequence[Piece]) -> tuple[Operand, ...]:
    """The operands of pieces, in order."""
    return tuple(operand for piece in pieces for operand in piece.operands)


@lru_cache(maxsize=256)
def pieces_named(names: tuple[Any, ...]) -> tuple[Piece, ...]:
    """The pieces that a caller names, or brings.

    Raises:
        ArgumentError: There is no such piece, two have an operand or number of one name, or one that
            quantises is not the last.

    Example:
        >>> [piece.numbers for piece in pieces_named(("residual", "rmsnorm"))]
        [(), ('eps',)]
    """
    found: list[Piece] = []
    for name in names:
        piece = name if isinstance(name, Piece) else PIECES.get(name)
        if piece is None:
            raise ArgumentError(
                f"there is no piece {name!r}; expected some of {', '.join(PIECES)}, or a Piece"
            )
        found.append(piece)
    used = [o.name for piece in found for o in piece.operands] + [n for piece in found for n in piece.numbers]
    twice = next((name for i, name in enumerate(used) if name in used[:i]), None)
    if twice is not None:
        raise ArgumentError(
            f"two pieces of {[piece.name for piece in found]} take {twice!r}; make a Piece that calls it "
            f"something else"
        )
    early = next((piece.name for piece in found[:-1] if piece.quantizes), None)
    if early is not None:
        raise ArgumentError(f"{early} must be the last piece, got {[piece.name for piece in found]}")
    return tuple(found)


def result_dtype(pieces: Sequence[Piece], dtype: DType, quantized: Any) -> DType:
    """The dtype of the result.

    Args:
        pieces: The pieces.
        dtype: The dtype of the rows.
        quantized: The dtype that the caller asks for, or None.

    Raises:
        ArgumentError: A dtype is asked for and nothing quantises, or the other way round.
    """
    quantizes = bool(pieces) and pieces[-1].quantizes
    if not quantizes and quantized is None:
        return dtype
    found = dtype_of(quantized) if quantizes and quantized is not None else None
    if found is None or found.name not in LIMITS:
        wanted = f"one of {', '.join(LIMITS)}" if quantizes else "none, since no piece quantises"
        raise ArgumentError(f"the dtype of the quantised result is {quantized!r}; expected {wanted}")
    return found


def check_numbers(pieces: Sequence[Piece], given: Mapping[str, Any]) -> tuple[float, ...]:
    """The numbers of all pieces, in order, of those that a caller gives by name.

    Raises:
        ArgumentError: One is missing, or no finite number; ``eps`` must not be negative.
    """
    numbers = []
    for piece in pieces:
        for name in piece.numbers:
            value = float(given[name]) if is_number(given.get(name)) else np.nan
            if not np.isfinite(value) or (name == "eps" and value < 0):
                wanted = "a number from 0 up" if name == "eps" else "a finite number"
                raise ArgumentError(f"{piece.name} needs {name}={wanted}, got {given.get(name)!r}")
            numbers.append(value)
    return tuple(numbers)
