"""All-reduce over hosts: inside each host through memory that its ranks share, between hosts by messages.

::

    host a   rank 0   x x x x     each rank leaves what the others add up     1. contribute
             rank 1   x x x x
                      | | | |     some ranks own a stripe each, and add up    2. add up
                      v v v v     that of all ranks of their host
    host b   ...     <=======>    the owners of one stripe exchange it        3. cross
                      | | | |
                      v v v v     each rank copies the others' stripes        4. gather

A long message goes in pieces. While one is between hosts, others are inside them: the messages of a piece are
begun, and ended only when those of the next one have been begun too, so that the network never rests.

A slot of the shared memory is written again for a piece ``depth`` later. A rank contributes piece t when it
has gathered piece t - depth; so all owners have read that. An owner shows piece t when all ranks of the host
have contributed a piece for which they have gathered piece t - depth. A call begins to write when all ranks
have gathered the last piece of the call before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcx.dtypes import OPS
from flagcx.transport.base import Call
from flagcx.transport.network.crossing import Crossing, Groups, steps_between
from flagcx.transport.network.host_memory import ARRIVED, PART_NBYTES, REDUCED, HostMemory
from flagcx.transport.network.message import kind_of, stamp_of
from flagcx.transport.network.watch import Wait, Watch
from flagcx.transport.network.wire import Flight, Wire
from flagcx.transport.scratch import Scratch
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner

_SHORT_NBYTES = 64 << 10
"""Up to so many bytes one rank of each host adds up, and exchanges, all of a message."""
_LEAST_NBYTES, _MOST_NBYTES, _ENOUGH = 128 << 10, 256 << 10, 32
"""What an owner exchanges of a piece at least and at most, and how many pieces are enough.

With longer ones, answers wait behind data that goes the same way. On 1 Gbit/s (UCX and Open MPI, two hosts of
one rank) 1 MiB takes 8.3 and 9.4 ms by 128 KiB, 10.8 and 11.2 by 256 KiB, 14.7 as one by UCX, and 8.5 and
10.6 by a ring; but 64 MiB 710 and 764 ms by 128 KiB, and 613 and 598 by 256 KiB.
"""
_TILE_NBYTES = 256 << 10
_LINE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a communicator, and what plans over them share.

    Attributes:
        groups: The ranks of each host.
        wire: Carries messages between hosts.
        watch: Counts the calls.
        scratch: The memory that plans share.
        memory: That of this rank's host; None where hosts have a single rank, or their ranks share none.
    """

    groups: Groups
    wire: Wire
    watch: Watch
    scratch: Scratch
    memory: HostMemory | None

    def serves(self, call: Call) -> bool:
        """Whether there is a plan of this module for a call: an all-reduce in the order of these hosts."""
        schedule = call.schedule
        lanes = min(map(len, self.groups))
        serves = schedule.collective == "allreduce" and schedule.algorithm == "hierarchical"
        shares = self.memory is not None or all(len(group) == 1 for group in self.groups)
        return serves and shares and schedule.chunks == lanes * len(self.groups) and len(self.groups) > 1


class _Piece:
    """All pieces of one length, which differ in where they lie.

    Args:
        hosts: The hosts.
        call: The call, of so many elements.
        words: The whole call in words.
        slots: Where each slot begins in the parts of a segment, in bytes.

    Attributes:
        crossing: The steps between hosts.
        count: Elements.
        own: The stripe of this rank.
        leaves: For each slot what this rank contributes: where in the piece, and where it goes.
        sources: For each slot what the ranks of the host contribute to the stripe of this one.
        shown: For each slot where this rank shows its stripe.
        gathered: For each slot what other ranks show: where in the piece it goes, and where it is.
    """

    def __init__(self, hosts: Hosts, call: Call, words: str, slots: Sequence[int]) -> None:
        self.crossing = Crossing(hosts.wire, hosts.watch, call, hosts.scratch, words)
        self.count = int(call.counts)  # type: ignore[arg-type]
        self.own = self.crossing.stripe(call.program())
        self.leaves: list[list[tuple[slice, np.ndarray]]] = []
        self.sources: list[list[np.ndarray]] = []
        self.shown: list[np.ndarray] = []
        self.gathered: list[list[tuple[slice, np.ndarray]]] = []
        if hosts.memory is not None:
            for at in slots:
                self._find_slot(hosts.memory, call, at)

    def _find_slot(self, memory: HostMemory, call: Call, at: int) -> None:
        rank, dtype, own = call.rank, call.dtype.numpy, self.own
        stripes = {q: self.crossing.stripe(call.schedule.program(q)) for q in memory.ranks}
        left = {q: memory.contributed(q, at, self.count, dtype) for q in memory.ranks}
        shown = {q: memory.reduced(q, at, s.stop - s.start, dtype) for q, s in stripes.items()}
        apart = [part for part in (slice(0, own.start), slice(own.stop, None)) if left[rank][part].size]
        self.leaves.append([(part, left[rank][part]) for part in apart])
        self.sources.append([left[q][own] for q in memory.ranks])
        self.shown.append(shown[rank])
        others = [q for q in memory.ranks if q != rank and shown[q].size]
        self.gathered.append([(stripes[q], shown[q]) for q in others])


class HierarchicalAllReduce:
    """An all-reduce over hosts. The same bits on every rank.

    Args:
        hosts: The hosts.
        call: The call; ``transport.average`` makes one of averages that need a wider dtype.
        words: The call in words that are the same on every rank.
    """

    def __init__(self, hosts: Hosts, call: Call, words: str) -> None:
        assert call.op is not None
        self._hosts, self._memory, self._words = hosts, hosts.memory, words
        self._divisor = call.schedule.size if call.op.average else 0
        dtype, count = call.dtype.numpy, int(call.counts)  # type: ignore[arg-type]
        self._kind, in_place = kind_of(words, count * dtype.itemsize), call.in_place
        steps = steps_between(call.schedule, hosts.groups, count * dtype.itemsize <= _SHORT_NBYTES)
        ranks = (call.rank,) if self._memory is None else self._memory.ranks
        self._owners = [q for q in ranks if steps.program(q).steps]
        self._steps = len(steps.program(self._owners[0]).steps)
        self._depth = self._steps + 3
        self._cut(count, dtype.itemsize, len(self._owners))
        call = replace(call, schedule=steps, op=OPS["sum"] if call.op.average else call.op, in_place=True)
        slots = [slot * self._slot_nbytes for slot in range(self._depth)]
        self._last = _Piece(hosts, replace(call, counts=count - self._starts[-1]), words, slots)
        self._whole = self._last
        if len(self._starts) > 1:
            self._whole = _Piece(hosts, replace(call, counts=self._starts[1]), words, slots)
        self._turns = self._steps + 1
        self._scratch_nbytes = -(-self._whole.crossing.scratch_nbytes // _LINE_NBYTES) * _LINE_NBYTES
        hosts.scratch.reserve(self._turns * self._scratch_nbytes)
        self._dtype, self._rank, self._me = dtype, call.rank, ranks.index(call.rank)
        self._others = [q for q in ranks if q != call.rank]
        self._in_place, self._first, self._flights = in_place, 0, dict[int, Flight]()
        self._tile, self._nothing = _TILE_NBYTES // dtype.itemsize, np.empty(0, dtype)
        self._sent = self._result = self._scratch = self._nothing
        assert call.op is not None
        self._combine = combiner(call.op, call.dtype, len(ranks)) if self._others else None
        self._accumulator = np.empty(self._tile, accumulator_dtype(call.op, call.dtype, len(ranks)))

    def _cut(self, count: int, itemsize: int, owners: int) -> None:
        """Cuts the message into pieces of one length, and a shorter one at the end."""
        line = max(_LINE_NBYTES // itemsize, 1)
        stripe = min(max(count * itemsize // (owners * _ENOUGH), _LEAST_NBYTES), _MOST_NBYTES)
        most = min(owners * stripe, PART_NBYTES // self._depth) // itemsize // line * line
        pieces = max(-(-count // most), 1)
        each = min(-(-count // (pieces * line)) * line, most)
        self._starts = range(0, max(count, 1), max(each, 1))
        self._slot_nbytes = -(-each * itemsize // _LINE_NBYTES) * _LINE_NBYTES

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        hosts, memory = self._hosts, self._memory
        hosts.watch.calls += 1
        self._head = stamp_of(hosts.watch.calls) + self._kind
        if memory is not None:
            memory.enter(self._head)
            self._first, memory.pieces = memory.pieces, memory.pieces + len(self._starts)
        self._sent, self._result = sendbuf.reshape(-1), recvbuf.reshape(-1)
        self._scratch = (
            hosts.scratch.memory
        )  # another thread may have a plan compiled meanwhile, for which it moves
        try:
            self._run()
        except BaseException as error:
            hosts.wire.fail(error, self._words)
        finally:
            self._sent = self._result = self._scratch = self._nothing

    def _run(self) -> None:
        pieces, steps, owns = len(self._starts), self._steps, self._rank in self._owners
        for turn in range(pieces + steps + 2):
            if turn < pieces and self._others:
                self._contribute(turn)
            if owns and 0 < turn <= pieces:
                self._add_up(turn - 1)
                self._begin(turn - 1, 0)
            for step in range(steps if owns else 0):
                if 0 <= (piece := turn - 2 - step) < pieces:
                    self._end(piece, step)
            if turn >= steps + 2:
                self._gather(turn - steps - 2)

    def _at(self, piece: int) -> tuple[_Piece, int, slice]:
        """A piece: what all of its length have in common, its slot, and where it is in the message."""
        kind = self._last if piece == len(self._starts) - 1 else self._whole
        start = self._starts[piece]
        return kind, (self._first + piece) % self._depth, slice(start, start + kind.count)

    def _contribute(self, piece: int) -> None:
        kind, slot, at = self._at(piece)
        sent = self._sent[at]
        for part, place in kind.leaves[slot]:
            place[...] = sent[part]
        self._memory.signal(ARRIVED, self._first + piece + 1)  # type: ignore[union-attr]

    def _add_up(self, piece: int) -> None:
        """Adds up this rank's stripe of what the ranks of the host have contributed."""
        kind, slot, at = self._at(piece)
        sent, out = self._sent[at][kind.own], self._result[at][kind.own]
        if self._combine is None:
            if not self._in_place:
                out[...] = sent
            return
        self._await(self._others, ARRIVED, piece)
        if piece == 0:  # the others stay in this call until its owners have shown something
            for peer in self._others:
                self._memory.check(peer, self._head)  # type: ignore[union-attr]
        sources = [*kind.sources[slot]]
        sources[self._me] = sent
        for start in range(0, len(out), self._tile):
            tile = slice(start, start + self._tile)
            into = out[tile]
            self._combine([source[tile] for source in sources], into, self._accumulator[: len(into)])

    def _arrays(self, piece: int) -> tuple[Crossing, list[np.ndarray]]:
        kind, _, at = self._at(piece)
        part, turn = self._result[at], piece % self._turns * self._scratch_nbytes
        scratch = self._scratch[turn : turn + kind.crossing.scratch_nbytes]
        return kind.crossing, [part, part, scratch.view(self._dtype)]

    def _begin(self, piece: int, step: int) -> None:
        crossing, arrays = self._arrays(piece)
        self._flights[piece] = crossing.begin(step, arrays)

    def _end(self, piece: int, step: int) -> None:
        """Ends a step of a piece, and begins the next one, or shows the result to the host."""
        crossing, arrays = self._arrays(piece)
        crossing.end(step, self._flights.pop(piece), arrays)
        if step + 1 < self._steps:
            self._begin(piece, step + 1)
        elif self._others:
            kind, slot, at = self._at(piece)
            kind.shown[slot][...] = self._result[at][kind.own]
            self._memory.signal(REDUCED, self._first + piece + 1)  # type: ignore[union-attr]

    def _gather(self, piece: int) -> None:
        """Takes what other ranks of the host show; then this piece is done."""
        kind, slot, at = self._at(piece)
        result = self._result[at]
        if self._others:
            self._await([q for q in self._owners if q != self._rank], REDUCED, piece)
            for part, place in kind.gathered[slot]:
                result[part] = place
        if self._divisor:
            np.true_divide(result, self._divisor, out=result)

    def _await(self, ranks: Sequence[int], counter: int, piece: int) -> None:
        """Waits until ranks of the host have come to a piece."""
        memory, value = self._memory, self._first + piece + 1
        assert memory is not None
        for peer in ranks:
            if memory.words[peer][counter] < value:
                self._wait(peer, memory, counter, value)
        if memory.fence:
            memory.fence()

    def _wait(self, peer: int, memory: HostMemory, counter: int, value: int) -> None:
        wire, words = self._hosts.wire, memory.words[peer]
        wait = Wait(self._hosts.watch, self._words, lambda: memory.gave_up() or wire.noticed())
        while words[counter] < value:
            wire.keep_moving()
            wait.pause(lambda: (peer, True))
        wait.end()
