"""PowerSGD: a gradient matrix as the product of two thin ones, found by one step of power iteration.

::

    P = M Q  -> all-reduce P -> orthogonalise P -> Q = M' P -> all-reduce Q -> M is about P Q'

Q is kept for the next step, so that the steps together find the directions that matter. The difference
between the rank's own M and P (P' M) goes into its residual. Vectors travel dense, in one message with P.

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

from flagcx.compression.codec import Payload, check_floats, check_steps, is_finite, namespace
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.slot import Slot
from flagcx.dtypes import ReduceOp
from flagcx.errors import ArgumentError

_TILE = 1 << 16
_SAFE = 1e38  # sums of products with orthogonal rows of length 1 are finite up to there


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
        check_steps(self.warmup_steps)

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

    A matrix with infinity or NaN on any rank comes out as such on all, and so does one whose factors are out
    of range; the next step then begins with the residual and the factors of the step before.
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
            self.spoilt = None
            if self._factor != 1:
                recvbuf *= self._factor
            return
        matrices = [kept[i : i + m * n].reshape(m, n) for i, m, n in layout.matrices]
        factors = slot.memory.get("factors") if slot.lasting else None
        if factors is None:
            factors = [first_factors(x, self._codec, i) for i, x in enumerate(matrices)]
        left, vectors = self._left(kept, matrices, factors)
        own = [p @ x for p, x in zip(left, matrices, strict=True)]
        right = self._summed("right", own, own[0]) if own else []
        if slot.residual is not None:
            self._keep_lost(matrices, left, own, kept)
        self._write(recvbuf, left, right, vectors)
        if slot.lasting:
            self.spoilt = self._look([*left, *right, *vectors], right)
            slot.memory["factors"] = [revived(q, self._codec, slot.step) for q in right]

    def _left(self, kept: Any, matrices: list[Any], factors: list[Any]) -> tuple[list[Any], list[Any]]:
        """P' of every matrix, orthogonal and the same on all ranks; and the sums of the vectors."""
        parts = [q @ x.T for q, x in zip(factors, matrices, strict=True)]
        parts += [kept[part] for part in self._layout.vectors]
        summed = self._summed("left", parts, kept)
        left, vectors = summed[: len(matrices)], summed[len(matrices) :]
        for p in left:
            orthogonalise(p)
        return left, vectors

    def _keep_lost(self, matrices: list[Any], left: list[Any], own: list[Any], kept: Any) -> None:
        """Subtracts from the residual what the rank has contributed to the sum: P times its own part of Q'.

        The published algorithm subtracts the mean instead. All residuals together are the same, and so are
        the results; but by the mean, what is large on one rank alone stays in the residuals of all for ever,
        and small numbers beside it are rounded off.
        """
        for matrix, p, q in zip(matrices, left, own, strict=True):
            step = max(_TILE // matrix.shape[1], 1) if namespace(matrix) is np else len(matrix)
            for row in range(0, len(matrix), step):
                matrix[row : row + step] -= p[:, row : row + step].T @ q
        for part in self._layout.vectors:
            kept[part] = 0

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

    def _look(self, parts: list[Any], right: list[Any]) -> bool | None:
        """Whether the result has infinity or NaN, by the parts that it is made from; None if it may have."""
        if not all(map(is_finite, parts)):
            return True
        large = max((float(abs(q).max()) * len(q) for q in right), default=0.0)
        return None if large * max(abs(self._factor), 1.0) > _SAFE else False

    def _write(self, recvbuf: Any, left: list[Any], right: list[Any], vectors: list[Any]) -> None:
        for (start, m, n), p, q in zip(self._layout.matrices, left, right, strict=True):
            product(p, q, recvbuf[start : start + m * n].reshape(m, n), self._factor)
        for part, summed in zip(self._layout.vectors, vectors, strict=True):
            recvbuf[part] = summed if self._factor == 1 else summed * self._factor


def first_factors(matrix: Any, codec: PowerSGD, number: int) -> Any:
    """The first Q' of a matrix: random, and the same on all ranks."""
    rows, columns = matrix.shape
    rank = min(codec.rank, rows, columns)
    drawn = np.random.default_rng([codec.seed, number]).standard_normal((rank, columns), np.float32)
    return namespace(matrix).asarray(drawn)


def revived(factors: Any, codec: PowerSGD, step: int) -> Any:
    """A copy of Q' for the next step.

    Rows of zeros are random again: they would stay zero for ever. All others are multiplied by powers of two,
    so that their products stay in range after a step with large numbers; the length of a row does not matter.
    """
    xp = namespace(factors)
    exponents = xp.frexp(abs(factors).max(axis=1, keepdims=True))[1]
    factors = xp.ldexp(factors, -exponents)
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


def product(p: Any, q: Any, out: Any, factor: Any = 1) -> None:
    """Writes ``factor`` P Q' into ``out`` (rows, columns), row by row and term by term."""
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
        if factor != 1:
            tile *= factor
