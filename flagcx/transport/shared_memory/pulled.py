"""Long blocks that each rank reads for itself where they lie: one step, with a barrier before and after.

Of all-gather, all-to-all, broadcast, scatter, gather and reduce-scatter by ``direct``. Where ranks share
cores, a message through a channel costs two changes of the rank that runs; here all of a call cost as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call
from flagcx.transport.shared_memory.arena import COPIED_PART_NBYTES, Arena
from flagcx.transport.shared_memory.in_place import InPlace
from flagcx.transport.shared_memory.places import Places
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner
from flagcx.transport.shared_memory.words import LOCATIONS

_SERVED = frozenset({"broadcast", "scatter", "gather", "allgather", "alltoall", "reduce_scatter"})


class _Block(NamedTuple):
    """A block that this rank takes: from which rank, and where it begins in the OUTPUT, in elements."""

    peer: int
    start: int


class Pulled(InPlace):
    """A collective in one step, in which ranks read and nobody writes into a peer's array."""

    def __init__(self, arena: Arena, call: Call, signature: int) -> None:
        super().__init__(arena, call, signature)
        kind, root = COLLECTIVES[call.schedule.collective], call.schedule.root
        rank, size = arena.rank, arena.size
        self._places = Places(arena)
        self._read = [None if q == rank else arena.steps.attached[q].read for q in range(size)]
        blocks = kind.input_blocks(size)
        self._total = blocks * self._count
        # Of each INPUT this rank takes the block that begins here.
        self._start = rank * self._count if blocks > 1 else 0
        several = kind.output_blocks(size) > 1
        ranks = [(rank + i) % size for i in range(size)] if kind.has_output(rank, root) else []
        self._blocks = [_Block(q, q * self._count * several) for q in ranks if kind.has_input(q, root)]
        self._reduces = kind.reduces
        if kind.reduces:
            self._combine = combiner(call.op, call.dtype, size)  # type: ignore[arg-type]
            self._piece = COPIED_PART_NBYTES // self._dtype.itemsize
            wide = accumulator_dtype(call.op, call.dtype, size)  # type: ignore[arg-type]
            self._accumulator = arena.accumulator(self._piece, wide)
            incoming = [arena.incoming(q, self._dtype) for q in range(size)]
            self._incoming = [(a, a.__array_interface__["data"][0]) for a in incoming]

    @staticmethod
    def serves(collective: str, algorithm: str, nbytes: int, size: int) -> bool:
        """Whether ranks read blocks of ``nbytes`` bytes."""
        return collective in _SERVED and algorithm == "direct" and nbytes > 0 and size > 1

    def run(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray | None) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        places = self._places
        places.look_up(sendbuf, recvbuf)
        index = self._enter(places.words[0], 0)
        locations = [words[LOCATIONS + 2 * index] for words in self._signals.words]
        given = None if sendbuf is None else sendbuf.reshape(-1)
        result = None if recvbuf is None else recvbuf.reshape(-1)
        self._finish(self._reduce if self._reduces else self._take, locations, given, result)

    def _take(self, locations: Sequence[int], given: np.ndarray, result: np.ndarray) -> None:
        count, start, itemsize = self._count, self._start, self._dtype.itemsize
        mine, at = self._places.addresses
        for q, low in self._blocks:
            read = self._read[q]
            if read is None:
                if mine + start * itemsize != at + low * itemsize:
                    result[low : low + count] = given[start : start + count]
                continue
            mapped = self._map(q, locations[q], self._total)
            if mapped is None:
                read(at + low * itemsize, locations[q] + start * itemsize, count * itemsize)
            else:
                result[low : low + count] = mapped[start : start + count]

    def _reduce(self, locations: Sequence[int], given: np.ndarray, result: np.ndarray) -> None:
        """Adds up what it reads, a piece after the other, in rank order."""
        itemsize, piece, incoming = self._dtype.itemsize, self._piece, self._incoming
        mapped = [self._map(q, location, self._total) for q, location in enumerate(locations)]
        mapped[self._arena.rank] = given
        for low in range(0, self._count, piece):
            out, start, sources = result[low : low + piece], self._start + low, []
            for q, array in enumerate(mapped):
                if array is not None:
                    sources.append(array[start : start + len(out)])
                    continue
                room, address = incoming[q]
                self._read[q](address, locations[q] + start * itemsize, out.nbytes)  # type: ignore[misc]
                sources.append(room[: len(out)])
            self._combine(sources, out, self._accumulator[: len(out)])
