"""The sum of sparse arrays: each rank knows some elements, and all get the sum.

::

    cut the index range into one region a rank -> send each region's elements to its owner
        -> the owner adds in rank order, and may keep the largest alone -> all owners send theirs to all

The regions are cut so that about equally many elements fall into each, by the mean over the ranks of their
quantiles; the cut is kept for some calls. With k elements on each rank, and owners that keep 2k/n, a rank
sends at most 6k (n-1)/n words (an index and a value are two; with 4k/n it is 10k), which does not grow with
the ranks; the plain all-gather of everything takes 2k (n-1). Indices travel as the gaps between them, in two
bytes, where no gap is too wide. Where the elements are so many that the dense all-reduce is cheaper, all
ranks see it in the counts that they exchange first, and none begins.

Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk, 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.compression.codec import Scratch, namespace
from flagcx.compression.peers import Peers
from flagcx.compression.select import largest
from flagcx.schedule.collectives import cut

KEEP_REGIONS = 64
"""Calls between two looks at where the elements lie."""
_MERGED_SHARE = 1 / 16
_WIDEST = (1 << 16) - 1
FULL = -1
"""In place of a rank's counts: it has too many elements to be worth counting."""


@dataclass(frozen=True, slots=True)
class Sum:
    """What came out.

    Attributes:
        indices: The elements that the sum has, in order; the same on every rank.
        values: Their sums.
        sent: Elements that this rank sent, in both phases.
    """

    indices: Any
    values: Any
    sent: int


@dataclass(slots=True)
class Regions:
    """Where the index range is cut, from call to call."""

    bounds: np.ndarray | None = None
    age: int = 0


def sum_sparse(
    peers: Peers,
    indices: Any,
    values: Any,
    count: int,
    regions: Regions,
    keep: int | None = None,
    full: bool = False,
) -> Sum | None:
    """Adds up the elements of all ranks.

    Args:
        peers: The ranks.
        indices: Places of this rank's elements, in order, each once.
        values: The elements, float32 or float64.
        count: Elements of the whole array.
        regions: The cut of earlier calls; renewed where it is old.
        keep: How many elements at most are kept of the whole sum, the largest of each region; None for all.
        full: Whether this rank has so many that it did not even look for them.

    Returns:
        The sum, or None on every rank where the dense all-reduce is cheaper.
    """
    _renew(peers, indices, count, regions)
    assert regions.bounds is not None
    bounds = regions.bounds
    own = _places(indices, bounds)
    said = _said(indices, own, bounds)
    everybodys = peers.numbers(
        [FULL] * (peers.size + 1) if full else [*np.diff(own).tolist(), _is_short(said)]
    )
    counts, short = everybodys[:, :-1], bool((everybodys[:, -1] > 0).all())
    said = said if short else indices
    share = None if keep is None else -(-keep // peers.size)
    if (counts == FULL).any() or _is_dense(counts, bounds, share, values.itemsize, said.itemsize):
        return None
    parts = _to_owners(peers, said, values, own, counts, bounds)
    start, stop = int(bounds[peers.rank]), int(bounds[peers.rank + 1])
    places, sums = _reduce(peers.scratch, parts, start, stop - start)
    if share is not None and places.size > share:
        chosen = largest(sums, share)
        places, sums = places[chosen], sums[chosen]
    all_places, all_sums = _to_all(peers, places, sums, bounds)
    crossing = int(counts[peers.rank].sum() - counts[peers.rank, peers.rank])
    return Sum(all_places, all_sums, sent=crossing + places.size * (peers.size - 1))


def _renew(peers: Peers, indices: Any, count: int, regions: Regions) -> None:
    """Agrees on regions into which about equally many elements fall."""
    regions.age += 1
    if regions.bounds is not None and regions.age % KEEP_REGIONS:
        return
    n, k = peers.size, len(indices)
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
    """Whether the busiest rank would carry more bytes than in a dense all-reduce of the whole array."""
    n, element = len(counts), value + index
    others = counts * (1 - np.eye(n, dtype=np.int64))
    crossing = max(int(others.sum(axis=0).max()), int(others.sum(axis=1).max()))
    kept = np.minimum(counts.sum(axis=0), np.diff(bounds))
    if share is not None:
        kept = np.minimum(kept, share)
    spreading = max(int(kept.max()) * (n - 1), int(kept.sum() - kept.min()))
    return element * (crossing + spreading) >= 2 * (n - 1) / n * int(bounds[-1]) * value


def _said(indices: Any, own: np.ndarray, bounds: np.ndarray) -> Any:
    """Indices as the gaps between them, in 16 bits each, half the bytes; plainly if one is too wide.

    Args:
        indices: In order.
        own: Where each region begins among them.
        bounds: Where each region begins in the array; the first gap of a region counts from there.
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


def _is_short(said: Any) -> int:
    return int(said.dtype == np.uint16)


def _heard(said: Any, start: int, dtype: Any) -> Any:
    """The indices that ``_said`` has put so, of a region that begins at ``start``."""
    if not _is_short(said):
        return said
    indices = namespace(said).cumsum(said, dtype=dtype)
    indices += dtype.type(start)
    return indices


def _to_owners(
    peers: Peers, said: Any, values: Any, own: np.ndarray, counts: np.ndarray, bounds: np.ndarray
) -> list[tuple[Any, Any]]:
    """Sends each region's elements to its owner.

    Returns:
        For each rank its elements of this rank's region: indices and values.
    """
    rank, xp = peers.rank, namespace(values)
    sends, receives, parts = [], [], []
    for q in range(peers.size):
        part = slice(int(own[q]), int(own[q + 1]))
        expected = int(counts[q, rank])
        if q == rank:
            parts.append((said[part], values[part]))
            continue
        if part.stop > part.start:
            sends += [(said[part], q), (values[part], q)]
        arrived = xp.empty(expected, said.dtype), xp.empty(expected, values.dtype)
        if expected:
            receives += [(arrived[0], q), (arrived[1], q)]
        parts.append(arrived)
    peers.exchange(sends, receives)
    start, dtype = int(bounds[rank]), _index_dtype(bounds)
    return [(_heard(i, start, dtype), v) for i, v in parts]


def _index_dtype(bounds: np.ndarray) -> np.dtype:
    return np.dtype(np.int32 if int(bounds[-1]) < 1 << 31 else np.int64)


def _reduce(scratch: Scratch, parts: list[tuple[Any, Any]], start: int, width: int) -> tuple[Any, Any]:
    """Adds up the elements of one region, in rank order."""
    like = parts[0][1]
    if namespace(like) is np and sum(len(indices) for indices, _ in parts) < _MERGED_SHARE * width:
        return _merge(parts)
    total = _cleared(scratch, f"region {like.dtype.itemsize}", width, like.dtype, like)
    touched = _cleared(scratch, "touched", width, np.bool_, like)
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
    """The same for few elements, without a look at the rest of the region."""
    indices = np.concatenate([i for i, _ in parts])
    order = np.argsort(indices, kind="stable")  # merges what is in order, and leaves equal ones in rank order
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


def _cleared(scratch: Scratch, name: str, count: int, dtype: Any, like: Any) -> Any:
    """A scratch array of zeros, which its user leaves as zeros."""
    return scratch.get(name, count, dtype, like, zeros=True)


def _to_all(peers: Peers, indices: Any, values: Any, bounds: np.ndarray) -> tuple[Any, Any]:
    """Gives everybody the elements of all regions."""
    said = _said(indices, np.array([0, len(indices)]), bounds[peers.rank :])
    sizes, short = peers.numbers([len(indices), _is_short(said)]).T
    said = said if short.all() else indices
    ends = np.cumsum(sizes)
    xp = namespace(values)
    all_said, all_values = xp.empty(int(ends[-1]), said.dtype), xp.empty(int(ends[-1]), values.dtype)
    parts, sends, receives = [], [], []
    for q, (stop, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        part = slice(stop - size, stop)
        parts.append(part)
        if q == peers.rank:
            all_said[part], all_values[part] = said, values
            continue
        if size:
            receives += [(all_said[part], q), (all_values[part], q)]
        if len(said):
            sends += [(said, q), (values, q)]
    peers.exchange(sends, receives)
    if not _is_short(all_said):
        return all_said, all_values
    heard = [_heard(all_said[part], int(bounds[q]), indices.dtype) for q, part in enumerate(parts)]
    return xp.concatenate(heard), all_values
