"""The all-reduce of each kind of codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flagcx.compression.codec import FixedRate
from flagcx.compression.over_hosts import OverHosts
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.powersgd import PowerReduce, PowerSGD
from flagcx.compression.slot import Slot
from flagcx.compression.sparse_reduce import RandomKReduce, SparseReduce, TopKReduce
from flagcx.compression.topk import RandomK, Sparse, TopK
from flagcx.compression.two_step import TwoStep
from flagcx.dtypes import ReduceOp

_REDUCES: MappingProxyType[type, Any] = MappingProxyType(
    {TopK: TopKReduce, RandomK: RandomKReduce, Sparse: SparseReduce, PowerSGD: PowerReduce}
)


def reduce_of(peers: Peers, codec: Any, count: int, op: ReduceOp, slot: Slot) -> CodecReduce:
    """The all-reduce of a codec other than "auto"; takes what ``CodecReduce`` does."""
    if isinstance(codec, FixedRate):
        kind = OverHosts if peers.over_hosts else TwoStep
    else:
        kind = _REDUCES[type(codec)]
    return kind(peers, codec, count, op, slot)


def with_shapes(codec: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The codec for parameters of these shapes; the codec itself where it minds none, or has its own."""
    minds = isinstance(codec, PowerSGD) and codec.shapes is None
    return replace(codec, shapes=tuple(shapes)) if minds else codec
