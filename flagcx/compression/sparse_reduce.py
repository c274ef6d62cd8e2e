"""All-reduces of a few elements: the plans of top-k, random-k and sparse."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.compression.carried import Regions
from flagcx.compression.codec import is_finite, namespace
from flagcx.compression.peers import CodecReduce
from flagcx.compression.select import density_of, select
from flagcx.compression.sparse_sum import sum_sparse
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
        kept, whole, add = source, source, None
        if slot.residuals is not None:
            kept, whole, add = slot.residuals.now, slot.residuals.before, source
        if slot.velocity is not None:
            if add is not None:
                namespace(kept).add(whole, add, out=kept)
            whole, add = slot.ahead(kept, peers.scratch), None
        last = slot.memory.get("threshold") if slot.lasting else None
        step = slot.step if slot.lasting else self._codec.warmup_steps + 1
        indices, slot.memory["threshold"] = self._codec.find(whole, peers.scratch, step, last, add, kept)
        whole = whole if add is None else kept
        regions = slot.memory.setdefault("regions", Regions())
        keep = round(self._codec.keep * self._codec.count(kept.size, step)) or None
        values = whole[indices]  # with all that is infinite or NaN
        total = sum_sparse(peers, indices, values, kept.size, regions, keep)
        remembers = slot.residual is not None or slot.velocity is not None
        if total is None:
            peers.allreduce(kept, recvbuf)
            _scale(recvbuf, np.float32(self._factor))
            slot.sent_all()
            self.spoilt = None
            return
        if remembers:
            slot.sent(self._common(indices, total.indices, kept))
        _scatter(recvbuf, total.indices, total.values, np.float32(self._factor))
        self.spoilt = not is_finite(total.values) if slot.lasting else None

    def _common(self, own: Any, summed: Any, like: Any) -> Any:
        """The indices of this rank's elements that are in the sum."""
        flags = self._peers.scratch.get("sent", like.size, np.bool_, like, zeros=True)
        flags[summed] = True
        common = own[flags[own]]
        flags[summed] = False
        return common


class RandomKReduce(CodecReduce[RandomK]):
    """The all-reduce of elements that all ranks draw alike: a dense one of k values.

    One number more tells all ranks of infinity or NaN in elements that were not drawn: the step is then NaN,
    as it would be if all elements were sent.
    """

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        slot, peers = self._slot, self._peers
        source = slot.total(sendbuf, peers.scratch, peers.size)
        xp = namespace(source)
        indices = xp.asarray(self._codec.places(source.size, slot.step))
        message = xp.empty(len(indices) + 1, np.float32)
        values, spoilt = message[:-1], message[-1:]
        whole = source if slot.velocity is None else slot.ahead(source, peers.scratch)
        values[...] = whole[indices]
        finite = is_finite(whole) if xp is np else xp.isfinite(whole).all()  # on a GPU nothing waits
        spoilt[...] = xp.where(finite, np.float32(0), np.float32(np.nan))
        peers.allreduce(message, message)
        slot.sent(indices)
        values *= spoilt + np.float32(self._factor)
        _scatter(recvbuf, indices, values)
        self.spoilt = not is_finite(values) if slot.lasting else None


class SparseReduce(CodecReduce[Sparse]):
    """The all-reduce of all elements that are not zero, which ends with the bits of the dense one."""

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        slot, peers, op = self._slot, self._peers, self._op
        source = slot.source(sendbuf, peers.scratch, peers.size)
        full = density_of(source, slot.step) > self._codec.most
        indices = select(source[:0] if full else source, 1, peers.scratch)
        regions = slot.memory.setdefault("regions", Regions())
        values = source[indices]
        if op.scale is not None:
            values *= source.dtype.type(op.scale)
        total = sum_sparse(peers, indices, values, source.size, regions, full=full)
        if total is None:
            peers.allreduce(source, recvbuf, op)
            self.spoilt = None
        else:
            sums = total.values
            if op.average:
                sums /= source.dtype.type(peers.size)
            _scatter(recvbuf, total.indices, sums)
            self.spoilt = not is_finite(sums) if slot.lasting else None


def _scatter(out: Any, indices: Any, values: Any, factor: Any = 1) -> None:
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
