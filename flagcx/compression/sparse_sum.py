"""The sum of sparse arrays: each rank knows some elements, and all get the sum.

::

    cut the index range into one region a rank -> send each region's elements to its owner
        -> the owner adds in rank order, and may keep the largest alone -> all owners send theirs to all

The regions are cut so that about equally many elements fall into each, by the mean over the ranks of their
quantiles; the cut is kept for some calls. With k elements on each rank, and owners that keep 2k/n, a rank
sends at most 6k (n-1)/n words (an index and a value are two; with 4k/n it is 10k), which does not grow with
the ranks; the plain all-gather of all elements takes 2k (n-1). Indices travel as the gaps between them, in
two bytes, where no gap is too wide. The ranks exchange their counts first, so all of them see when there are
so many elements that the dense all-reduce is cheaper, and none begins.

Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk, 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.compression.carried import Regions
from flagcx.compression.codec import Scratch, namespace
from flagcx.compression.select import largest
from flagcx.schedule.collectives import cut

if TYPE_CHECKING:
    from flagcx.compression.peers import Peers

KEEP_REGIONS = 64
"""Calls for which the cut is kept."""
_MERGED_SHARE = 1 / 16
_WIDEST = (1 << 16) - 1
FULL = -1
"""Stands for the counts of a rank that has too many elements to count them."""


@dataclass(frozen=True, slots=True)
class SparseSum:
    """The sum of sparse arrays.

    Attributes:
        indices: Places of its elements, in order; the same on every rank.
        values: Its elements.
    """

    indices: Any
    values: Any


def sum_sparse(
    peers: Peers,
    indices: Any,
    values: Any,
    count: int,
    regions: Regions,
    keep: int | None = None,
    full: bool = False,
) -> SparseSum | None:
    """Adds up the elements of all ranks.

    Args:
        peers: The ranks.
        indices: Places of this rank's elements, in order, each once.
        values: The elements, float32 or float64.
        count: Elements of the whole array.
        regions: The cut of earlier calls; renewed when it is old.
        keep: Most elements to keep of the whole sum, the largest of each region; None for all.
        full: Whether this rank has so many elements that it did not look for their places.

    Returns:
        The sum, or None on every rank where the dense all-reduce is cheaper.
    """
    _renew(peers, indices, count, regions)
    assert regions.bounds is not None
    bounds = regions.bounds
    own = _places(indices, bounds)
    packed = _pack(indices, own, bounds)
    gathered = peers.numbers(
        [FULL] * (peers.size + 1) if full else [*np.diff(own).tolist(), _is_packed(packed)]
    )
    counts, short = gathered[:, :-1], bool((gathered[:, -1] > 0).all())
    packed = packed if short else indices
    share = None if keep is None else -(-keep // peers.size)
    if (counts == FULL).any() or _is_dense(counts, bounds, share, values.itemsize, packed.itemsize):
        return None
    parts = _to_owners(peers, packed, values, own, counts, bounds)
    start, stop = int(bounds[peers.rank]), int(bounds[peers.rank + 1])
    places, sums = _reduce(peers.scratch, parts, start, stop - start)
    if share is not None and places.size > share:
        chosen = largest(sums, share)
        places, sums = places[chosen], sums[chosen]
    all_places, all_sums = _to_all(peers, places, sums, bounds)
    return SparseSum(all_places, all_sums)


def _renew(peers: Peers, indices: Any, count: int, regions: Regions) -> None:
    """Agrees on regions into which about equally many elements fall."""
    regions.age += 1
    n, k = peers.size, len(indices)
    if regions.bounds is not None and len(regions.bounds) == n + 1 and regions.age % KEEP_REGIONS:
        return
    even = cut(count, n)[1:-1]
    own = [int(indices[k * i // n]) for i in range(1, n)] if k >= n else list(even)
    middle = peers.numbers(own).mean(axis=0).astype(np.int64)
    regions.bounds = np.concatenate([[0], np.maximum.accumulate(middle), [count]]).astype(np.int64)


def _places(indices: Any, bounds: np.ndarray) -> np.ndarray:
    """Where each region begins in a list of indices, and where the last one ends."""
    xp = namespace(indices)
    found = xp.searchsorted(indices, xp.asarray(bounds.astype(indices.dtype)))
    found = found if xp is np else found.get()
    found[-1] = len(indices)
    return found


def _is_dense(counts: np.ndarray, bounds: np.ndarray, share: int | None, value: int, index: int) -> bool:
    """Whether the busiest rank would send more bytes than in a dense all-reduce of the whole array."""
    n, element = len(counts), value + index
    others = counts * (1 - np.eye(n, dtype=np.int64))
    crossing = max(int(others.sum(axis=0).max()), int(others.sum(axis=1).max()))
    kept = np.minimum(counts.sum(axis=0), np.diff(bounds))
    if share is not None:
        kept = np.minimum(kept, share)
    spreading = max(int(kept.max()) * (n - 1), int(kept.sum() - kept.min()))
    return element * (crossing + spreading) >= 2 * (n - 1) / n * int(bounds[-1]) * value


def _pack(indices: Any, own: np.ndarray, bounds: np.ndarray) -> Any:
    """Indices as the gaps between them, in half the bytes; the indices themselves if a gap is too wide.

    The first gap of a region counts from its bound. ``own`` are the first indices of the regions.
    """
    xp = namespace(indices)
    gaps = xp.empty_like(indices)
    gaps[1:] = indices[1:] - indices[:-1]
    for first, stop, start in zip(own[:-1].tolist(), own[1:].tolist(), bounds.tolist(), strict=False):
        if stop > first:
            gaps[first] = indices[first] - start
    if len(gaps) and int(gaps.max()) > _WIDEST:
        return indices
    return gaps.astype(np.uint16)


def _is_packed(packed: Any) -> int:
    return int(packed.dtype == np.uint16)


def _unpack(packed: Any, start: int, dtype: Any) -> Any:
    """The indices that ``_pack`` was given, of a region that begins at ``start``."""
    if not _is_packed(packed):
        return packed
    indices = namespace(packed).cumsum(packed, dtype=dtype)
    indices += dtype.type(start)
    return indices


def _to_owners(
    peers: Peers, packed: Any, values: Any, own: np.ndarray, counts: np.ndarray, bounds: np.ndarray
) -> list[tuple[Any, Any]]:
    """Sends each region's elements to its owner; returns the indices and values of each rank in this one."""
    rank, xp = peers.rank, namespace(values)
    sends, receives, parts = [], [], []
    for q in range(peers.size):
        part = slice(int(own[q]), int(own[q + 1]))
        expected = int(counts[q, rank])
        if q == rank:
            parts.append((packed[part], values[part]))
            continue
        if part.stop > part.start:
            sends += [(packed[part], q), (values[part], q)]
        arrived = xp.empty(expected, packed.dtype), xp.empty(expected, values.dtype)
        if expected:
            receives += [(arrived[0], q), (arrived[1], q)]
        parts.append(arrived)
    peers.exchange(sends, receives)
    start, dtype = int(bounds[rank]), _index_dtype(bounds)
    return [(_unpack(i, start, dtype), v) for i, v in parts]


def _index_dtype(bounds: np.ndarray) -> np.dtype:
    return np.dtype(np.int32 if int(bounds[-1]) < 1 << 31 else np.int64)


def _reduce(scratch: Scratch, parts: list[tuple[Any, Any]], start: int, width: int) -> tuple[Any, Any]:
    """Adds up the elements of one region, in rank order."""
    like = parts[0][1]
    if namespace(like) is np and sum(len(indices) for indices, _ in parts) < _MERGED_SHARE * width:
        return _merge(parts)
    total = scratch.get(f"region {like.dtype.itemsize}", width, like.dtype, like, zeros=True)
    touched = scratch.get("touched", width, np.bool_, like, zeros=True)
    for indices, values in parts:
        places = indices - indices.dtype.type(start)
        total[places] += values
        touched[places] = True
    places = namespace(like).flatnonzero(touched)
    values = total[places]
    total[places] = 0
    touched[places] = False
    return (places + start).astype(parts[0][0].dtype), values


def _merge(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The same for few elements, without an array of the whole region."""
    indices = np.concatenate([i for i, _ in parts])
    order = np.argsort(indices, kind="stable")  # stable: equal indices stay in rank order
    indices, values = indices[order], np.concatenate([v for _, v in parts])[order]
    first = np.ones(len(indices) + 1, np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=first[1:-1])
    starts = np.flatnonzero(first)
    lengths, starts = np.diff(starts), starts[:-1]
    sums = values[starts]
    for j in range(1, len(parts)):
        more = np.flatnonzero(lengths > j)
        sums[more] += values[starts[more] + j]
    return indices[starts], sums


def _to_all(peers: Peers, indices: Any, values: Any, bounds: np.ndarray) -> tuple[Any, Any]:
    """Gives all ranks the elements of all regions."""
    packed = _pack(indices, np.array([0, len(indices)]), bounds[peers.rank :])
    sizes, short = peers.numbers([len(indices), _is_packed(packed)]).T
    packed = packed if short.all() else indices
    ends = np.cumsum(sizes)
    xp = namespace(values)
    all_indices, all_values = xp.empty(int(ends[-1]), packed.dtype), xp.empty(int(ends[-1]), values.dtype)
    parts, sends, receives = [], [], []
    for q, (stop, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        part = slice(stop - size, stop)
        parts.append(part)
        if q == peers.rank:
            all_indices[part], all_values[part] = packed, values
            continue
        if size:
            receives += [(all_indices[part], q), (all_values[part], q)]
        if len(packed):
            sends += [(packed, q), (values, q)]
    peers.exchange(sends, receives)
    if not _is_packed(all_indices):
        return all_indices, all_values
    unpacked = [_unpack(all_indices[part], int(bounds[q]), indices.dtype) for q, part in enumerate(parts)]
    return xp.concatenate(unpacked), all_values
