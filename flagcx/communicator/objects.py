"""Python objects between ranks: pickled, and sent as bytes. For control information, not for data.

The ranks of a job trust each other: what they send is unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.communicator import Communicator


def _packed(value: Any) -> np.ndarray:
    return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def _unpacked(data: np.ndarray) -> Any:
    return pickle.loads(data.tobytes())


def _parts(data: np.ndarray, counts: list[int]) -> list[Any]:
    bounds = np.concatenate(([0], np.cumsum(counts)))
    return [_unpacked(data[a:b]) for a, b in pairwise(bounds)]


def broadcast(comm: Communicator, value: Any, root: int) -> Any:
    """See ``Communicator.broadcast_object``."""
    data = _packed(value) if comm.rank == root else None
    length = np.array([len(data) if data is not None else 0])
    comm.broadcast(length, root)
    buffer = data.copy() if data is not None else np.empty(int(length[0]), np.uint8)
    comm.broadcast(buffer, root)
    return value if comm.rank == root else _unpacked(buffer)


def allgather(comm: Communicator, value: Any) -> list[Any]:
    """See ``Communicator.allgather_object``."""
    data = _packed(value)
    counts = comm.allgather(np.array([len(data)])).reshape(-1).tolist()
    return _parts(comm.allgatherv(data, counts), counts)


def gather(comm: Communicator, value: Any, root: int) -> list[Any] | None:
    """See ``Communicator.gather_object``."""
    data = _packed(value)
    counts = comm.allgather(np.array([len(data)])).reshape(-1).tolist()
    gathered = comm.gatherv(data, counts, root)
    return None if gathered is None else _parts(gathered, counts)


def scatter(comm: Communicator, values: Sequence[Any] | None, root: int) -> Any:
    """See ``Communicator.scatter_object``."""
    given = list(values) if comm.rank == root and values is not None else []
    right = comm.rank != root or len(given) == comm.size
    packed = [_packed(v) for v in given]
    counts = np.array([len(p) for p in packed] if packed and right else [-1] * comm.size)
    comm.broadcast(counts, root)
    if counts[0] < 0:
        got = f"got {len(given)}" if comm.rank == root else f"rank {root} passed another number"
        raise ArgumentError(f"scatter_object needs one value a rank, {comm.size} in all; {got}")
    data = np.concatenate(packed) if packed else None
    return _unpacked(comm.scatterv(data, counts.tolist(), root, dtype=np.uint8))
