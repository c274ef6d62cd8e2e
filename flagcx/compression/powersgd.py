"""PowerSGD: a gradient matrix as the product of two thin ones, found by one step of power iteration.

::

    P = M Q  -> all-reduce P -> orthogonalise P -> Q = M' P -> all-reduce Q -> M is about P Q'

Q is kept for the next step, so that the steps together find the directions that matter. The difference
between M and the product goes into the residual. Vectors travel dense, in one message with P.

Results that must have the same bits on all ranks are computed by single products and sums in a fixed order:
matrix libraries may add in another order on another processor.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD" (2019), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from flagcx.compression.codec import Payload, check_floats, is_finite, namespace
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.slot import Slot
from flagcx.dtypes import ReduceOp
from flagcx.errors import ArgumentError

_TILE = 1 << 16


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Matrices of low rank.

    An array of two dimensions is a matrix, and one of more dimensions a matrix with as many rows as its first
    dimension is long. An array of one dimension travels dense, unless the shapes of the parameters in it are
    given, here or by ``feedback.slot(key, shapes)``.

    Attributes:
        rank: Columns of P and Q, 1 or more.
        seed: Seed of the first Q.
        warmup_steps: First steps in which gradients travel dense: at the start of a training they change too
            fast for the directions found in the step before.
        shapes: Shapes of the parameters that lie end to end in an array; None for the array's own shape.

    Example:
        >>> codec = PowerSGD(rank=1)
        >>> x = np.float32([[1, 2], [3, 6]])
        >>> codec.decode(codec.encode(x)).reshape(2, 2).round(3).tolist()
        [[1.0, 2.0], [3.0, 6.0]]
    """

    name: ClassVar[str] = "powersgd"
    lossless: ClassVar[bool] = False
    rank: int = 4
    seed: int = 0
    warmup_steps: int = 0
    shapes: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, int) and self.rank >= 1):
            raise ArgumentError(f"rank={self.rank!r} must be an integer from 1")

    def encode(self, x: Any) -> Payload:
        """Encodes an array (float32) as P', Q' and the elements that are not part of a matrix."""
        flat = check_floats(x).reshape(-1)
        layout = find_matrices(flat.size, [x.shape], self.rank)
        if not layout.matrices:
            none = flat[:0].reshape(1, 0)
            return Payload(self.name, flat.size, (none, none, flat.copy()))
        ((_, rows, columns),) = layout.matrices
        matrix = flat[: rows * columns].reshape(rows, columns)
        p = first_factors(matrix, self, 0) @ matrix.T
        orthogonalise(p)
        return Payload(self.name, flat.size, (p, p @ matrix, flat[rows * columns :].copy()))

    def decode(self, payload: Payload, out: Any = None) -> Any:
        """Decodes a payload into ``out`` (float32), or into a new array."""
        p, q, rest = payload.parts
        if out is None:
            out = namespace(p).empty(payload.count, np.float32)
        flat, size = out.reshape(-1), p.shape[1] * q.shape[1]
        if size:
            product(p, q, flat[:size].reshape(p.shape[1], q.shape[1]))
        flat[size:] = rest
        return out

    def ratio(self, count: int, ranks: int = 2) -> float:
        """That of the shapes; without any, the ratio for one matrix that is about square."""
        return min(find_matrices(count, self.shapes, self.rank).sent / max(count, 1), 1.0)


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """The matrices and vectors that lie end to end in an array.

    Attributes:
        matrices: Start, rows and columns of each matrix that gains from being coded.
        vectors: The other parts.
        sent: Numbers that are sent for all of them.
    """

    matrices: tuple[tuple[int, int, int], ...]
    vectors: tuple[slice, ...]
    sent: int


def find_matrices(count: int, shapes: Sequence[tuple[int, ...]] | None, rank: int) -> MatrixLayout:
    """Finds the matrices in an array.

    Args:
        count: Its elements.
        shapes: Shapes of the parameters that lie end to end in it. Those of more than two dimensions are
            taken as matrices with as many rows as the first has. If None, the array is one matrix that is
            about square, and a rest: for estimates.
        rank: Columns of P and Q.
    """
    if shapes is None:
        rows = max(math.isqrt(count), 1)
        columns = count // rows
        shapes = [(rows, columns), (count - rows * columns,)]
    matrices, vectors, start, sent = [], [], 0, 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        coded = min(rank, rows, columns) * (rows + columns)
        if coded < size:
            matrices.append((start, rows, columns))
            sent += coded
        elif size:
            vectors.append(slice(start, start + size))
            sent += size
        start += size
    return MatrixLayout(tuple(matrices), tuple(vectors), sent)


class PowerReduce(CodecReduce[PowerSGD]):
    """The all-reduce of an array's matrices by two dense ones of their factors.

    A matrix with infinity or NaN on any rank comes out as such on all; what the ranks have of it that is
    finite stays in their residuals, and the next step begins with the factors of the step before.
    """

    def __init__(self, peers: Peers, codec: PowerSGD, count: int, op: ReduceOp, slot: Slot) -> None:
        super().__init__(peers, codec, count, op, slot)
        self._factor = float(np.float32(self._factor))
        shapes = codec.shapes or ((count,),)
        total = sum(map(math.prod, shapes))
        if total != count:
            raise ArgumentError(
                f"the shapes of a PowerSGD have {total} elements together, but the array has {count}"
            )
        self._layout = find_matrices(count, shapes, codec.rank)

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        slot, peers, layout = self._slot, self._peers, self._layout
        kept = slot.total(sendbuf, peers.scratch, peers.size)
        if slot.step <= self._codec.warmup_steps:
            peers.allreduce(kept, recvbuf)
            slot.sent_all()
            if self._factor != 1:
                recvbuf *= self._factor
            return
        matrices = [kept[i : i + m * n].reshape(m, n) for i, m, n in layout.matrices]
        factors = slot.memory.get("factors") if slot.lasting else None
        if factors is None:
            factors = [first_factors(x, self._codec, i) for i, x in enumerate(matrices)]
        left, vectors = self._left(kept, matrices, factors)
        right = self._right(matrices, left)
        good = [is_finite(p) and is_finite(q) for p, q in zip(left, right, strict=True)]
        self._write(recvbuf, left, right, vectors, good)
        if slot.lasting:
            new = zip(factors, right, good, strict=True)
            slot.memory["factors"] = [revived(q, self._codec, slot.step) if ok else old for old, q, ok in new]
        if all(good):
            slot.heal_velocity()
        else:
            slot.heal()

    def _left(self, kept: Any, matrices: list[Any], factors: list[Any]) -> tuple[list[Any], list[Any]]:
        """P' of every matrix, orthogonal and the same on all ranks; and the sums of the vectors."""
        parts = [q @ x.T for q, x in zip(factors, matrices, strict=True)]
        parts += [kept[part] for part in self._layout.vectors]
        summed = self._summed("left", parts, kept)
        left, vectors = summed[: len(matrices)], summed[len(matrices) :]
        for p in left:
            orthogonalise(p)
        return left, vectors

    def _right(self, matrices: list[Any], left: list[Any]) -> list[Any]:
        """Q' of every matrix: the sum over the ranks."""
        parts = [p @ x for p, x in zip(left, matrices, strict=True)]
        return self._summed("right", parts, parts[0]) if parts else []

    def _summed(self, name: str, parts: list[Any], like: Any) -> list[Any]:
        """Sums of arrays over the ranks, made in one all-reduce."""
        sizes = [part.size for part in parts]
        flat = self._peers.scratch.get(name, sum(sizes), np.float32, like)
        ends = np.cumsum(sizes)
        views = [flat[end - n : end].reshape(p.shape) for p, n, end in zip(parts, sizes, ends, strict=True)]
        for view, part in zip(views, parts, strict=True):
            view[...] = part
        if flat.size:
            self._peers.allreduce(flat, flat)
        return views

    def _write(
        self, recvbuf: Any, left: list[Any], right: list[Any], vectors: list[Any], good: list[bool]
    ) -> None:
        residual, share = self._slot.residual, np.float32(1 / self._peers.size)
        for (start, m, n), p, q, ok in zip(self._layout.matrices, left, right, good, strict=True):
            part = slice(start, start + m * n)
            lost = residual if ok else None
            product(p, q, recvbuf[part].reshape(m, n), self._factor, lost, start, share)
        for part, summed in zip(self._layout.vectors, vectors, strict=True):
            recvbuf[part] = summed if self._factor == 1 else summed * self._factor
            if residual is not None:
                residual[part] = 0


def first_factors(matrix: Any, codec: PowerSGD, number: int) -> Any:
    """The first Q' of a matrix: random, and the same on all ranks."""
    rows, columns = matrix.shape
    rank = min(codec.rank, rows, columns)
    drawn = np.random.default_rng([codec.seed, number]).standard_normal((rank, columns), np.float32)
    return namespace(matrix).asarray(drawn)


def revived(factors: Any, codec: PowerSGD, step: int) -> Any:
    """A copy of Q' whose rows of zeros are random again: they would stay zero for ever."""
    factors = factors.copy()
    dead = ~(factors != 0).any(axis=1)
    if bool(dead.any()):
        drawn = np.random.default_rng([codec.seed, step]).standard_normal(factors.shape, np.float32)
        factors[dead] = namespace(factors).asarray(drawn)[dead]
    return factors


def orthogonalise(rows: Any) -> None:
    """Makes rows orthogonal and of length 1, in place; one that depends on those before becomes zero."""
    xp = namespace(rows)
    wide = rows.astype(np.float64)
    for i in range(len(wide)):
        row, before = wide[i], (wide[i] * wide[i]).sum()
        for _ in range(2):  # a second time, against rounding
            for j in range(i):
                row -= (row * wide[j]).sum() * wide[j]
        after = (row * row).sum()
        if float(after) <= 1e-12 * float(before):
            row[...] = 0
        else:
            row /= xp.sqrt(after)
    rows[...] = wide


def product(
    p: Any, q: Any, out: Any, factor: Any = 1, residual: Any = None, start: int = 0, share: Any = 1
) -> None:
    """Writes ``factor`` P Q' into ``out`` (rows, columns), row by row and term by term.

    If there is a residual, ``share`` P Q' is subtracted from it, from element ``start`` on.
    """
    xp, columns = namespace(out), out.shape[1]
    step = max(_TILE // columns, 1) if xp is np else len(out)
    term = xp.empty((min(step, len(out)), columns), np.float32)
    for row in range(0, len(out), step):
        tile = out[row : row + step]
        part = term[: len(tile)]
        xp.multiply(p[0, row : row + step, None], q[0], out=tile)
        for k in range(1, len(p)):
            xp.multiply(p[k, row : row + step, None], q[k], out=part)
            tile += part
        if residual is not None:
            begin = start + row * columns
            xp.multiply(tile, share, out=part)
            residual[begin : begin + tile.size] -= part.reshape(-1)
        if factor != 1:
            tile *= factor
