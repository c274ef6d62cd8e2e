"""The kernel that adds up rows over all ranks and applies an epilogue to each of them.

A block of threads works on one row after the other; a thread holds PIECES packs of the row in registers, as
float32, from the sum to the result. There are three forms:

* *one_shot*: every rank pushes its rows to all peers as bare packets and adds up all contributions, in the
  order of ranks. One hop, no barrier; the sum is not rounded before the epilogue.
* *two_shot*: each rank adds up its share of the columns of every row and pushes the sum, rounded to the dtype
  of the rows, to all ranks. Two hops, with as little traffic as an all-reduce has; every rank applies the
  epilogue to all rows, which costs less than sending what it makes.
* *local*: the rows are the sum already.

The packets are those of ``flagcx.kernels.peer_packets``, in the same slots, so that these calls and others
may follow each other.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass

from flagcx.dtypes import OPS, DType
from flagcx.kernels.epilogue import COLUMN, ELEMENT, LIMITS, ONE, ROW, Epilogue, Operand, Piece, Statistic
from flagcx.kernels.peer import WARP, PeerArgs, PeerKernel, PeerLayout
from flagcx.kernels.peer_cuda import INTRINSICS
from flagcx.kernels.peer_packets import SLOTS
from flagcx.kernels.rows_cuda import ELEMENTS, LOCAL_ROWS, ROW_INTRINSICS
from flagcx.kernels.rows_exchange import EXCHANGED

_PACK_NBYTES = 16

NAME = "flagcx_rows"
"""Name of the kernel in every module."""

LOCAL = "local"
ROW_FORMS = ("one_shot", "two_shot", LOCAL)

ROW_THREADS = 512
"""Most threads of a block."""
MOST_ARRAYS, MOST_NUMBERS = 12, 8
"""Most operands, and numbers, of an epilogue."""

MOST_COLUMNS = 16384
"""Most columns of a row, whose values are in registers."""


class RowArgs(ctypes.Structure):
    """The only argument of the kernel; ``RowArgs`` in its source."""

    _fields_ = (
        ("a", PeerArgs),
        ("arrays", ctypes.c_uint64 * MOST_ARRAYS),
        ("rows", ctypes.c_int64),
        ("numbers", ctypes.c_float * MOST_NUMBERS),
    )


@dataclass(frozen=True, slots=True)
class RowShape:
    """How the threads of one block, or of the blocks of a cluster, share a row.

    Attributes:
        columns: Elements of the row.
        packs: Packs of 16 bytes of the row, the last of which may be partly filled.
        pieces: Packs that a thread holds.
        threads: Threads of a block.
        cluster: Blocks.

    Example:
        >>> RowShape.of(5120, 2)
        RowShape(columns=5120, packs=640, pieces=2, threads=320, cluster=1)
    """

    columns: int
    packs: int
    pieces: int
    threads: int
    cluster: int

    @classmethod
    def of(cls, columns: int, itemsize: int, cluster: int = 1) -> RowShape:
        """The shape for rows of so many elements of ``itemsize`` bytes."""
        packs = -(-columns // (_PACK_NBYTES // itemsize))
        held = -(-packs // cluster)
        pieces = max(-(-held // ROW_THREADS), 1)
        threads = max(-(-held // pieces), 1)
        return cls(columns, packs, pieces, -(-threads // WARP) * WARP, cluster)

    @property
    def places(self) -> int:
        """Packs of a row that a block has places for."""
        return self.pieces * self.threads

    def share(self, ranks: int) -> int:
        """Packs of a row, of those of a block, that each rank adds up in two-shot."""
        return -(-self.places // ranks)


_KINDS = {
    "float32": "Float32", "float16": "Float16", "bfloat16": "Bfloat16",
    "int8": "Int8", "float8_e4m3fn": "Float8E4m3fn", "float8_e5m2": "Float8E5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowKernel:
    """One kernel.

    Attributes:
        form: One of ``ROW_FORMS``.
        dtype: The dtype of the rows.
        epilogue: What is done with them; its numbers are arguments.
        layout: The memory; of one rank for a local kernel.
        shape: How threads share a row.
        aligned: Whether all rows, of all arrays, begin at multiples of 16 bytes.
        ahead: Rows that a block sends before it finishes one.
    """

    form: str
    dtype: DType
    epilogue: Epilogue
    layout: PeerLayout
    shape: RowShape
    aligned: bool
    ahead: int = 1

    def source(self, intrinsics: str = INTRINSICS, own: str = ROW_INTRINSICS, **changed: int) -> str:
        """The whole CUDA source; the arguments take the place of what a host defines in its own way."""
        local, shape = self.form == LOCAL, self.shape
        shared = PeerKernel(
            "one_shot" if local else self.form, True, self.dtype, OPS["sum"], self.layout, True
        )
        values = {
            "MOST_ARRAYS": MOST_ARRAYS, "MOST_NUMBERS": MOST_NUMBERS, "ROWS": _KINDS[self.dtype.name],
            "LIMIT": f"{LIMITS.get(self.epilogue.out.name, 3.4e38)}f", "COLUMNS": shape.columns,
            "PACKS": shape.packs, "PIECES": shape.pieces, "ROW_THREADS": shape.threads,
            "CLUSTER": shape.cluster, "SHARE": shape.share(self.layout.ranks), "AHEAD": self.ahead,
            "ALIGNED": int(self.aligned), "FULL": int(shape.places * shape.cluster == shape.packs),
        }  # fmt: skip
        head = "".join(f"#define {name} {value}\n" for name, value in values.items())
        text = shared.prelude(intrinsics, **changed) + head + own + ("" if local else SLOTS) + ELEMENTS
        return text + "\n".join(self._generated()) + (LOCAL_ROWS if local else EXCHANGED)

    def _generated(self) -> Iterator[str]:
        """The parts that depend on the epilogue."""
        yield from self._loads(COLUMN, "Columns", "load_columns", "")
        yield from self._loads(ELEMENT, "Elements", "load_elements_of", " + row * COLUMNS")
        yield (
            "FLAGCX_DEVICE void finish_row(const RowArgs& r, i64 row, float (*values)[N],"
            " const Columns& columns, const Elements& elements, float* scratch, u32& turn) {"
        )
        yield "  (void)columns; (void)elements; (void)scratch; (void)turn;"
        number = 0
        for piece in self.epilogue.pieces:
            yield "  {"
            yield from self._piece(piece, number)
            yield "  }"
            number += len(piece.numbers)
        yield f"  {self._stored(_KINDS[self.epilogue.out.name], 'r.a.recvbuf')}\n}}"

    def _given(self) -> Iterator[tuple[int, Operand, DType]]:
        """The operands that a call has, with their places."""
        pairs = zip(self.epilogue.operands, self.epilogue.dtypes, strict=True)
        for place, (operand, dtype) in enumerate(pairs):
            if dtype is not None:
                yield place, operand, dtype

    def _loads(self, shape: str, name: str, function: str, start: str) -> Iterator[str]:
        """What a thread keeps of the operands of one shape, and how it loads them."""
        found = [(p, o, _KINDS[d.name]) for p, o, d in self._given() if o.shape == shape and not o.keeps]
        yield f"struct {name} {{ " + " ".join(f"Few<{k}> {o.name}[PIECES];" for _, o, k in found) + " };"
        row = "i64 row, " if start else ""
        yield f"FLAGCX_DEVICE void {function}(const RowArgs& r, {row}{name}& few) {{"
        yield f"  (void)r; (void)few;{' (void)row;' if start else ''}"
        for place, operand, kind in found:
            at = f"(const {kind}::S*)r.arrays[{place}]{start}"
            yield f"  EACH_PACK few.{operand.name}[i] = load_few<{kind}>({at}, i);"
        yield "}"

    def _stored(self, kind: str, array: str) -> str:
        return f"EACH_PACK store_few<{kind}>(({kind}::S*){array} + row * COLUMNS, i, values[i]);"

    def _piece(self, piece: Piece, number: int) -> Iterator[str]:
        words = " ".join([piece.element, *(s.of + s.then for s in piece.statistics)])
        if _uses(words, "count"):
            yield "    const float count = COLUMNS;"
        for i, name in enumerate(piece.numbers):
            yield f"    const float {name} = r.numbers[{number + i}];"
        for statistic in piece.statistics:
            yield from self._statistic(piece, statistic)
        yield f"    EACH_VALUE {{ {self._names(piece, piece.element)} values[i][e] = {piece.element}; }}"
        for place, operand, dtype in self._given():
            if operand not in piece.operands or not operand.keeps:
                continue
            if operand.shape == ELEMENT:
                yield f"    {self._stored(_KINDS[dtype.name], f'r.arrays[{place}]')}"
            else:
                yield f"    if (is_first()) ((float*)r.arrays[{place}])[row] = {operand.keeps};"

    def _statistic(self, piece: Piece, statistic: Statistic) -> Iterator[str]:
        name, of = statistic.name, statistic.of
        combined = f"{name} + ({of})" if statistic.combine == "sum" else f"larger({name}, {of})"
        yield f"    float {name} = 0.0f;"
        yield (f"    EACH_VALUE if (has_value(i, e)) {{ {self._names(piece, of)} {name} = {combined}; }}")
        yield f"    {name} = {statistic.combine}_of_row({name}, scratch, turn++);"
        yield f"    {name} = {statistic.then};"

    def _names(self, piece: Piece, words: str) -> str:
        """Declares the names that words use: the value, and operands."""
        found = ["const float x = values[i][e];"] if _uses(words, "x") else []
        given = {operand.name: (place, dtype) for place, operand, dtype in self._given()}
        for operand in piece.operands:
            if operand.keeps or not _uses(words, operand.name):
                continue
            if operand.name not in given:
                value = operand.default
            elif operand.shape in (ROW, ONE):
                index = "row" if operand.shape == ROW else "0"
                value = f"((const float*)r.arrays[{given[operand.name][0]}])[{index}]"
            else:
                kind = _KINDS[given[operand.name][1].name]
                few = "columns" if operand.shape == COLUMN else "elements"
                value = f"{kind}::widen({few}.{operand.name}[i].at[e])"
            found.append(f"const float {operand.name} = {value};")
        return " ".join(found)


def _uses(words: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", words) is not None
