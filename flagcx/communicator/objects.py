"""Python objects between ranks: pickled, and sent as bytes. For control information, not for data.

The ranks of a job trust each other: what they send is unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.communicator import Communicator


def _packed(comm: Communicator, value: Any) -> np.ndarray:
    """The bytes of a value.

    Raises:
        ArgumentError: It cannot be pickled; nothing was sent.
    """
    try:
        return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:  # pickle raises several, and a value's own methods any
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ArgumentError(
            f"rank {comm.rank}: a {kind} cannot be sent, since it cannot be pickled "
            f"({type(error).__name__}: {error}); pass plain values, or objects of classes and functions that "
            f"stand at the top of a module: no lambda, no local class, no open file or lock"
        ) from error


def _unpacked(data: np.ndarray) -> Any:
    return pickle.loads(data.tobytes())


def _parts(data: np.ndarray, counts: list[int]) -> list[Any]:
    bounds = np.concatenate(([0], np.cumsum(counts)))
    return [_unpacked(data[a:b]) for a, b in pairwise(bounds)]


def broadcast(comm: Communicator, value: Any, root: int) -> Any:
    """See ``Communicator.broadcast_object``."""
    data = _packed(comm, value) if comm.rank == root else None
    length = np.array([len(data) if data is not None else 0])
    comm.broadcast(length, root)
    buffer = data.copy() if data is not None else np.empty(int(length[0]), np.uint8)
    comm.broadcast(buffer, root)
    return value if comm.rank == root else _unpacked(buffer)


def allgather(comm: Communicator, value: Any) -> list[Any]:
    """See ``Communicator.allgather_object``."""
    data = _packed(comm, value)
    counts = comm.allgather(np.array([len(data)])).reshape(-1).tolist()
    return _parts(comm.allgatherv(data, counts), counts)


def gather(comm: Communicator, value: Any, root: int) -> list[Any] | None:
    """See ``Communicator.gather_object``."""
    data = _packed(comm, value)
    counts = comm.allgather(np.array([len(data)])).reshape(-1).tolist()
    gathered = comm.gatherv(data, counts, root)
    return None if gathered is None else _parts(gathered, counts)


def scatter(comm: Communicator, values: Sequence[Any] | None, root: int) -> Any:
    """See ``Communicator.scatter_object``."""
    given = list(values) if comm.rank == root and isinstance(values, Iterable) else []
    right = comm.rank != root or len(given) == comm.size
    packed = [_packed(comm, v) for v in given]
    counts = np.array([len(p) for p in packed] if packed and right else [-1] * comm.size)
    comm.broadcast(counts, root)
    if counts[0] < 0:
        got = f"got {len(given)}" if comm.rank == root else f"rank {root} passed another number"
        raise ArgumentError(f"scatter_object needs one value a rank, {comm.size} in all; {got}")
    data = np.concatenate(packed) if packed else None
    return _unpacked(comm.scatterv(data, counts.tolist(), root, dtype=np.uint8))
