"""All-reduces of a few elements: the plans of top-k, random-k and sparse."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.compression.codec import namespace
from flagcx.compression.peers import CodecReduce
from flagcx.compression.select import density_of, select
from flagcx.compression.sparse_sum import Regions, sum_sparse
from flagcx.compression.topk import RandomK, Sparse, TopK

_TILE = 1 << 17


class TopKReduce(CodecReduce[TopK]):
    """The all-reduce of the largest elements; the dense one of all elements where that is cheaper.

    Elements that a rank selected and the owner of their region dropped stay in the rank's residual. With
    momentum, elements take along what it would still add to them; all of an array that goes dense gathers
    momentum as ever.
    """

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        slot, peers = self._slot, self._peers
        source = slot.source(sendbuf, peers.scratch, peers.size)
        kept = source if slot.residual is None else slot.residual
        whole, add = kept, None if slot.residual is None else source
        if slot.velocity is not None:
            if add is not None:
                kept += add
            whole, add = slot.ahead(kept, peers.scratch), None
        last = slot.memory.get("threshold") if slot.lasting else None
        step = slot.step if slot.lasting else self._codec.warmup_steps + 1
        indices, slot.memory["threshold"] = self._codec.find(whole, peers.scratch, step, last, add)
        regions = slot.memory.setdefault("regions", Regions())
        keep = round(self._codec.keep * self._codec.count(kept.size, step)) or None
        total = sum_sparse(peers, indices, whole[indices], kept.size, regions, keep)
        if total is None:
            peers.allreduce(kept, recvbuf)
            _scale(recvbuf, np.float32(self._factor))
            if slot.residual is not None:
                slot.residual[...] = 0
            return
        if slot.residual is not None or slot.velocity is not None:
            slot.sent(self._common(indices, total.indices, kept))
        _scatter(recvbuf, total.indices, total.values, np.float32(self._factor))

    def _common(self, own: Any, summed: Any, like: Any) -> Any:
        """The indices of this rank's elements that are in the sum."""
        flags = self._peers.scratch.get("sent", like.size, np.bool_, like, zeros=True)
        flags[summed] = True
        common = own[flags[own]]
        flags[summed] = False
        return common


class RandomKReduce(CodecReduce[RandomK]):
    """The all-reduce of elements that all ranks draw alike: a dense one of k values."""

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        slot, peers = self._slot, self._peers
        source = slot.total(sendbuf, peers.scratch, peers.size)
        indices = namespace(source).asarray(self._codec.places(source.size, slot.step))
        values = source[indices] if slot.velocity is None else slot.ahead(source, peers.scratch)[indices]
        peers.allreduce(values, values)
        slot.sent(indices)
        _scatter(recvbuf, indices, values, np.float32(self._factor))


class SparseReduce(CodecReduce[Sparse]):
    """The all-reduce of all elements that are not zero. Nothing is lost."""

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        slot, peers = self._slot, self._peers
        full = density_of(sendbuf, slot.step) > self._codec.most
        indices = select(sendbuf[:0] if full else sendbuf, 1, peers.scratch)
        regions = slot.memory.setdefault("regions", Regions())
        total = sum_sparse(peers, indices, sendbuf[indices], sendbuf.size, regions, full=full)
        factor = sendbuf.dtype.type(self._factor)
        if total is None:
            peers.allreduce(sendbuf, recvbuf)
            _scale(recvbuf, factor)
        else:
            _scatter(recvbuf, total.indices, total.values, factor)


def _scatter(out: Any, indices: Any, values: Any, factor: Any) -> None:
    """Writes the elements, in order of their indices, and zeros between them."""
    if factor != 1:
        values *= factor
    if namespace(out) is not np:
        out[...] = 0
        out[indices] = values
        return
    places = indices.astype(np.intp)
    starts = range(0, out.size, _TILE)
    ends = np.searchsorted(places, [*starts, out.size]).tolist()
    for start, a, b in zip(starts, ends, ends[1:], strict=False):  # while the tile is in the cache
        tile = out[start : start + _TILE]
        tile.fill(0)
        tile[places[a:b] - start] = values[a:b]


def _scale(x: Any, factor: Any) -> None:
    if factor != 1:
        x *= factor
