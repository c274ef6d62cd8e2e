"""Data, buffers and expected results of each collective, worked out by NumPy.

Every rank can make the data of all ranks, so it works out its expected result without communication. All
values are chosen so that the right result is exact in the message's dtype, in any order of addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES

PERIOD = 65521
"""Elements after which the data repeats: a prime, so that no two chunks of one message are alike."""

SHIFT = 7919
"""Elements by which the data of each block is rolled against that of the block before."""

_WHOLE_UP_TO = {"float16": 2**11, "bfloat16": 2**8, "float8_e4m3fn": 2**4, "float8_e5m2": 2**3}
"""The limit of exact whole numbers; that of the other dtypes is further away than is needed here."""


@dataclass(frozen=True, slots=True)
class BenchMessage:
    """A collective on a message: the same on every rank.

    Attributes:
        collective: Its name.
        size: Number of ranks.
        root: The root, or None.
        count: Elements of the message, or of one block where each rank has a block.
        dtype: The dtype.
        op: The reduction, or None.
    """

    collective: str
    size: int
    root: int | None
    count: int
    dtype: DType
    op: ReduceOp | None

    def blocks(self, rank: int) -> tuple[int, int]:
        """Blocks of ``count`` elements in the ``sendbuf`` of ``rank``, and in its ``recvbuf``."""
        kind = COLLECTIVES[self.collective]
        sent = kind.input_blocks(self.size) if kind.has_input(rank, self.root) else 0
        received = kind.output_blocks(self.size) if kind.has_output(rank, self.root) else 0
        return sent, received

    @property
    def nbytes(self) -> int:
        """The whole message, in bytes."""
        most = max(max(self.blocks(rank)) for rank in range(self.size))
        return most * self.count * self.dtype.numpy.itemsize

    def columns(self) -> dict[str, Any]:
        """The message in the columns of nccl-tests."""
        op, root = self.op.name if self.op else "none", -1 if self.root is None else self.root
        return {
            "nbytes": self.nbytes, "count": self.count, "dtype": self.dtype.name, "op": op, "root": root
        }  # fmt: skip


def data(message: BenchMessage, rank: int, block: int) -> np.ndarray:
    """The first ``PERIOD`` elements of a block that ``rank`` contributes; then they repeat.

    Raises:
        ArgumentError: No data of this dtype has an exact result over so many ranks.
    """
    dtype, op = message.dtype, message.op
    random = np.random.default_rng([rank, dtype.code, op.code if op else 0])
    if dtype.kind == "bool" or (op and op.ufunc is np.multiply):
        values = random.integers(0, 2, PERIOD)
        values = values if dtype.kind in ("bool", "int") else 2 * values - 1
    else:
        values = random.integers(0, _values_below(message), PERIOD)
    if op and op.average:
        values *= message.size
    return np.roll(values, block * SHIFT).astype(dtype.numpy)


def _values_below(message: BenchMessage) -> int:
    """The limit of the values, such that sums stay exact."""
    dtype, op = message.dtype, message.op
    whole = int(np.iinfo(dtype.numpy).max) if dtype.kind == "int" else _WHOLE_UP_TO.get(dtype.name, 1 << 18)
    terms = message.size if op and op.ufunc is np.add else 1
    limit = min(whole, 1 << 18) // terms // (terms if op and op.average else 1)
    if limit < 2:
        raise ArgumentError(
            f"{op.name if op else 'this'} of {dtype.name} over {message.size} ranks can't be verified "
            f"exactly; use fewer ranks or a wider dtype"
        )
    return limit


def expected(message: BenchMessage, rank: int, block: int) -> np.ndarray:
    """The first ``PERIOD`` elements of a block of ``rank``'s expected result; then they repeat."""
    kind = COLLECTIVES[message.collective]
    sources = kind.expected(rank, block, message.size, 1, message.root)
    parts = np.stack([data(message, source, part) for source, part in sources])
    if message.op is None:
        return parts[0]
    wide = {"float": np.dtype(np.float64), "complex": np.dtype(np.complex128)}
    assert isinstance(message.op.ufunc, np.ufunc)
    combined = message.op.ufunc.reduce(parts.astype(wide.get(message.dtype.kind, parts.dtype)), axis=0)
    combined = combined / message.size if message.op.average else combined
    return combined.astype(message.dtype.numpy)


class Buffers:
    """The arrays of one rank for one message, laid out in ``storage``, on the host or on a GPU.

    ``in_place`` lets them overlap as in a call in place; ``module`` is NumPy, or CuPy for a storage on a GPU.

    Attributes:
        sendbuf: The rank's contribution, or None.
        recvbuf: The place of its result, or None.
    """

    def __init__(
        self, message: BenchMessage, rank: int, storage: Any, in_place: bool, module: Any = np
    ) -> None:
        self._message, self._rank, self._module = message, rank, module
        inputs, outputs = (blocks * message.count for blocks in message.blocks(rank))
        start_in, start_out = (0, inputs) if not in_place else _overlap(message, rank)
        self.sendbuf = storage[start_in : start_in + inputs] if message.blocks(rank)[0] else None
        self.recvbuf = storage[start_out : start_out + outputs] if message.blocks(rank)[1] else None

    def fill(self) -> None:
        """Writes this rank's data into ``sendbuf``, after other bytes into ``recvbuf``."""
        if self.recvbuf is not None:
            self.recvbuf.view(np.uint8)[:] = 1
        for block in range(self._message.blocks(self._rank)[0]):
            values = np.resize(data(self._message, self._rank, block), self._message.count)
            # As bytes: CuPy does not know all of NumPy's dtypes.
            self._block(self.sendbuf, block)[:] = self._module.asarray(values.view(np.uint8))

    def count_wrong(self) -> int:
        """How many elements of the result differ from the expected ones."""
        wrong = 0
        for block in range(self._message.blocks(self._rank)[1]):
            want = np.resize(expected(self._message, self._rank, block), self._message.count)
            bytes_got = self._block(self.recvbuf, block)
            got = bytes_got if self._module is np else self._module.asnumpy(bytes_got)
            wrong += int(np.count_nonzero(got.view(want.dtype) != want))
        return wrong

    def _block(self, array: Any, block: int) -> Any:
        """The bytes of a block."""
        return array[block * self._message.count : (block + 1) * self._message.count].view(np.uint8)


def storage_count(message: BenchMessage, rank: int) -> int:
    """How many elements the buffers of ``rank`` take, out of place."""
    return sum(message.blocks(rank)) * message.count


def has_place(message: BenchMessage) -> tuple[bool, bool]:
    """Whether the collective has a form out of place, and a form in place."""
    return message.collective != "broadcast", message.collective != "alltoall"


def _overlap(message: BenchMessage, rank: int) -> tuple[int, int]:
    """Where input and output begin, in elements, in a call in place."""
    kind = COLLECTIVES[message.collective]
    chunks = message.size if kind.blocks else 1
    shift = kind.in_place_shift(rank, message.size, chunks, message.root)
    from_input, from_output = shift or (0, 0)
    return from_output * message.count, from_input * message.count
