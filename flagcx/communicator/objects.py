"""Python objects between ranks: pickled, and sent as bytes. For control information, not for data.

The ranks of a job trust each other: what they send is unpickled. Bytes that no rank sent as an object, such
as another call's or memory that was never written, are not: a mark and a checksum come before each pickle.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import numpy as np

from flagcx.arguments import check_rank
from flagcx.communicator.caller import Caller
from flagcx.communicator.foreign_calls import refuse, refuses_foreign
from flagcx.errors import ArgumentError, MismatchError

_MARK = b"flagcx object\n"
_HEADER = struct.Struct(f"<{len(_MARK)}sI")
_MOST_NBYTES = 1 << 40

T = TypeVar("T")


def _packed(comm: Caller, value: Any) -> np.ndarray:
    """The bytes of a value.

    Raises:
        ArgumentError: It cannot be pickled, or a group is open; nothing was sent.
    """
    if comm._group is not None:
        raise ArgumentError(
            "Python objects cannot be sent inside comm.group(): its calls run at its end, and the value is "
            "wanted now; make the call before or after the group"
        )
    try:
        pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises several, and a value's own methods any
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ArgumentError(
            f"rank {comm.rank}: a {kind} cannot be sent, since it cannot be pickled "
            f"({type(error).__name__}: {error}); pass plain values, or objects of classes and functions that "
            f"stand at the top of a module: no lambda, no local class, no open file or lock"
        ) from error
    return np.frombuffer(_HEADER.pack(_MARK, zlib.crc32(pickled)) + pickled, np.uint8)


def _unpacked(data: np.ndarray) -> Any:
    """The value whose bytes came.

    Raises:
        MismatchError: They are those of no value.
    """
    content = data.tobytes()
    header = content[: _HEADER.size].ljust(_HEADER.size)
    pickled = memoryview(content)[_HEADER.size :]
    if _HEADER.unpack(header) != (_MARK, zlib.crc32(pickled)):
        raise MismatchError(
            f"{len(data)} bytes that came are no Python object that a rank sent, and were not unpickled; "
            f"every rank must make the same calls in the same order"
        )
    return pickle.loads(pickled)


def _parts(data: np.ndarray, counts: Sequence[int]) -> list[Any]:
    bounds = np.concatenate(([0], np.cumsum(counts)))
    return [_unpacked(data[a:b]) for a, b in pairwise(bounds)]


@refuses_foreign()
def broadcast_object(
    comm: Caller,
    value: Any = None,
    root: int = 0,
    *more: NoReturn,
    **foreign: NoReturn,
) -> Any:
    """Returns the root's ``value`` on every rank. Pickled: for control information, not for data."""
    if more or foreign:
        refuse(broadcast_object, more, foreign)
    root = check_rank(root, comm.size, "root")
    data = _packed(comm, value if comm.rank == root else None)
    broadcast = partial(comm.call, "broadcast", root=root, part_of="broadcast_object")
    length = np.array([len(data)])
    broadcast(length)
    if comm.rank == root:
        broadcast(data.copy())
        return value
    if not _HEADER.size <= length[0] <= _MOST_NBYTES:
        raise MismatchError(
            f"rank {root} sent an object of {length[0]} bytes, which is none; every rank must make the same "
            f"calls in the same order"
        )
    buffer = np.empty(int(length[0]), np.uint8)
    broadcast(buffer)
    return _unpacked(buffer)


@refuses_foreign("value")
def allgather_object(
    comm: Caller,
    value: T = None,  # type: ignore[assignment]
    *more: NoReturn,
    part_of: str = "allgather_object",
    **foreign: NoReturn,
) -> list[T]:
    """Returns the values of all ranks, in rank order, on every rank."""
    if more or foreign:
        refuse(allgather_object, more, foreign)
    data = _packed(comm, value)
    counts = _counts(comm, data, part_of)
    return _parts(comm.call("allgather", data, counts=counts, part_of=part_of), counts)


@refuses_foreign("value")
def gather_object(
    comm: Caller,
    value: T = None,  # type: ignore[assignment]
    root: int = 0,
    *more: NoReturn,
    **foreign: NoReturn,
) -> list[T] | None:
    """Returns the values of all ranks, in rank order, at the root; elsewhere None."""
    if more or foreign:
        refuse(gather_object, more, foreign)
    data = _packed(comm, value)
    counts = _counts(comm, data, "gather_object")
    gathered = comm.call("gather", data, root=root, counts=counts, part_of="gather_object")
    return None if gathered is None else _parts(gathered, counts)


@refuses_foreign()
def scatter_object(
    comm: Caller,
    values: Sequence[Any] | None = None,
    root: int = 0,
    *more: NoReturn,
    **foreign: NoReturn,
) -> Any:
    """Returns entry ``rank`` of the root's ``values``, which must have one entry a rank."""
    if more or foreign:
        refuse(scatter_object, more, foreign)
    root = check_rank(root, comm.size, "root")
    given = list(values) if comm.rank == root and isinstance(values, Iterable) else []
    right = comm.rank != root or len(given) == comm.size
    packed = [_packed(comm, v) for v in given or [None]]
    counts = np.array([len(p) for p in packed] if given and right else [-1] * comm.size)
    comm.call("broadcast", counts, root=root, part_of="scatter_object")
    if counts[0] < 0:
        got = f"got {len(given)}" if comm.rank == root else f"rank {root} passed another number"
        raise ArgumentError(f"scatter_object needs one value a rank, {comm.size} in all; {got}")
    data = np.concatenate(packed) if given else None
    each = tuple(counts.tolist())
    return _unpacked(
        comm.call("scatter", data, root=root, counts=each, dtype=np.uint8, part_of="scatter_object")
    )


def _counts(comm: Caller, data: np.ndarray, part_of: str) -> tuple[int, ...]:
    """The bytes of every rank's value."""
    return tuple(comm.call("allgather", np.array([len(data)]), part_of=part_of).reshape(-1).tolist())
