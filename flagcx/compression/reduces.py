"""The all-reduce of each kind of codec."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from flagcx.compression.codec import FixedRate
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.powersgd import PowerReduce, PowerSGD
from flagcx.compression.slot import Slot
from flagcx.compression.sparse_reduce import RandomKReduce, SparseReduce, TopKReduce
from flagcx.compression.topk import RandomK, Sparse, TopK
from flagcx.compression.two_step import TwoStep

_REDUCES: MappingProxyType[type, Any] = MappingProxyType(
    {TopK: TopKReduce, RandomK: RandomKReduce, Sparse: SparseReduce, PowerSGD: PowerReduce}
)


def reduce_of(peers: Peers, codec: Any, count: int, factor: float, slot: Slot) -> CodecReduce:
    """The all-reduce of a codec other than "auto"; takes what ``CodecReduce`` does."""
    kind = TwoStep if isinstance(codec, FixedRate) else _REDUCES[type(codec)]
    return kind(peers, codec, count, factor, slot)
