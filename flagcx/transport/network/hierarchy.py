"""Collectives over hosts: inside each host through memory that its ranks share, between hosts by messages.

::

    host a   rank 0   x x x x     each rank leaves what it contributes        1. contribute
             rank 1   x x x x
                      | | | |     some ranks own a stripe each, and add up    2. add up
                      v v v v     that of all ranks of their host
    host b   ...     <=======>    the owners of one stripe exchange it        3. cross
                      | | | |
                      v v v v     each rank copies what is meant for it       4. gather

The ranks of a host share an image of the message, where sums and the data of other hosts are. What is added
to nothing is contributed straight to the image. All collectives of ``CROSSED`` are these phases;
they differ in what a rank contributes and gathers (its block, or all), and in the steps between hosts.

A long message goes in pieces. While one is between hosts, others are inside them: the messages of a piece are
begun, and ended only when those of the next one have been begun too, so that the network never rests.

When a slot may be written again
--------------------------------
Piece t has slot t mod ``depth``, of the image and of what a rank contributes to sums. With s steps between
hosts a rank contributes piece t when it has gathered piece p = t - s - 3. So an owner that has seen all ranks
contribute piece t knows that all have gathered piece t - s - 3, and may write to the image. A rank that has
gathered piece p knows that all have contributed piece p + s, so have gathered piece p - 3 = t - s - 6, and
may contribute straight to the image: s + 6 slots are enough.

Calls take turns with two halves of the image. A rank that ends a call knows that all ranks of its host have
begun it, and so have ended the call before, whose half comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcx.dtypes import OPS
from flagcx.schedule.collectives import COLLECTIVES, Counts
from flagcx.transport.base import Call
from flagcx.transport.network import CROSSED, pieces
from flagcx.transport.network.coded import STEPS as CODED_STEPS
from flagcx.transport.network.coded import CodedCrossing
from flagcx.transport.network.crossing import Crossing, Groups, order_of, steps_between
from flagcx.transport.network.flight import Flight
from flagcx.transport.network.host_memory import ARRIVED, HALF_NBYTES, REDUCED, HostMemory
from flagcx.transport.network.message import kind_of, stamp_of
from flagcx.transport.network.pieces import Piece, Slot
from flagcx.transport.network.watch import Wait, Watch
from flagcx.transport.network.wire import Wire
from flagcx.transport.scratch import Scratch
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner

_TILE_NBYTES = 256 << 10
_LINE_NBYTES = 64
_PROBE = 1 << 16
"""Numbers of which it is asked how many bytes a coder makes of them."""


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
        """Whether there is a plan of this module for a call: a hierarchy in the order of these hosts."""
        schedule, collective = call.schedule, call.schedule.collective
        if schedule.algorithm != "hierarchical" or collective not in CROSSED or len(self.groups) < 2:
            return False
        if self.memory is None and (collective != "allreduce" or schedule.size > len(self.groups)):
            return False
        lanes = min(map(len, self.groups))
        return collective != "allreduce" or schedule.chunks == lanes * len(self.groups)


class HierarchicalCollective:
    """A collective over hosts. Sums have the same bits on every rank.

    Args:
        hosts: The hosts.
        call: The call; ``transport.average`` makes one of averages that need a wider dtype.
        words: The call in words that are the same on every rank.
    """

    def __init__(self, hosts: Hosts, call: Call, words: str) -> None:
        self._hosts, self._memory, self._words, self._rank = hosts, hosts.memory, words, call.rank
        schedule, dtype = call.schedule, call.dtype.numpy
        kind = COLLECTIVES[schedule.collective]
        blocks = schedule.size if kind.blocks else 1
        each = call.counts if isinstance(call.counts, tuple) else (call.counts,) * blocks
        nbytes = sum(each) * dtype.itemsize
        self._kind, self._reduces = kind_of(words, nbytes), kind.reduces
        self._divisor = schedule.size if call.op is not None and call.op.average else 0
        coder, short = call.coder, nbytes <= pieces.SHORT_NBYTES
        steps = steps_between(schedule, hosts.groups, short, straight=coder is not None)
        ranks = (call.rank,) if self._memory is None else self._memory.ranks
        self._owners = [q for q in ranks if steps.program(q).steps]
        self._steps = CODED_STEPS if coder else len(steps.program(self._owners[0]).steps)
        self._depth, self._turns = self._steps + 6, self._steps + 1
        self._me, self._others = ranks.index(call.rank), [q for q in ranks if q != call.rank]
        self._direct = not self._others and not kind.blocks and kind.has_output(call.rank, schedule.root)
        self._keeps = self._direct and call.in_place
        order = order_of(hosts.groups, len(self._owners)) if kind.blocks else [0]
        messages = len(self._owners) * (len(hosts.groups) if kind.blocks or coder else 1)
        if coder:
            messages *= max(_PROBE * dtype.itemsize // coder(0, len(hosts.groups)).wire_nbytes(_PROBE), 1)
        self._cut(each, dtype.itemsize, messages)
        op = OPS["sum"] if self._divisor else call.op
        self._plan(hosts, call, each, order, replace(call, schedule=steps, op=op, in_place=True))
        self._dtype, self._flights = dtype, dict[int, Flight]()
        self._tile, self._nothing = _TILE_NBYTES // dtype.itemsize, np.empty(0, dtype)
        self._sent = self._result = self._scratch = self._nothing
        self._slots: dict[tuple[Piece, int, int], Slot] = {}
        self._first, self._half, self._combine = 0, 0, None
        if op is not None and self._others:
            self._combine = combiner(op, call.dtype, len(ranks))
            self._accumulator = np.empty(self._tile, accumulator_dtype(op, call.dtype, len(ranks)))

    def _cut(self, counts: Sequence[int], itemsize: int, messages: int) -> None:
        """Cuts blocks into pieces of one length, and shorter ones at the end.

        Args:
            counts: Elements of each block, or of the message.
            itemsize: Bytes of an element.
            messages: Runs of the image that go to another host in messages of their own; of coded ones, which
                are shorter, as many times more.
        """
        line, largest = max(_LINE_NBYTES // itemsize, 1), max(counts)
        stripe = pieces.stripe_nbytes(sum(counts) * itemsize, messages)
        room = min(messages * stripe, HALF_NBYTES // self._depth) // itemsize // len(counts)
        most = room // line * line or max(room, 1)
        number = max(-(-largest // most), 1)
        each = min(-(-largest // (number * line)) * line, most)
        self._starts = range(0, max(largest, 1), max(each, 1))

    def _plan(
        self, hosts: Hosts, call: Call, counts: Sequence[int], order: Sequence[int], steps: Call
    ) -> None:
        """Makes the pieces, of which most are alike."""
        bases = np.cumsum([0, *counts]).tolist()

        def crossing_of(elements: Counts) -> Crossing:
            common = hosts.wire, hosts.watch, replace(steps, counts=elements), hosts.scratch, words
            return CodedCrossing(*common, hosts.groups) if call.coder else Crossing(*common)

        words = self._words
        made: dict[tuple[int, ...], Piece] = {}
        self._pieces = []
        for start in self._starts:
            left = tuple(min(max(count - start, 0), self._starts.step) for count in counts)
            if left not in made:
                made[left] = Piece(crossing_of, call, left, order, bases)
            self._pieces.append(made[left])
        itemsize = call.dtype.numpy.itemsize
        self._slot_nbytes = _lines(self._pieces[0].count * itemsize)
        self._scratch_nbytes = _lines(max(piece.crossing.scratch_nbytes for piece in made.values()))
        hosts.scratch.reserve(self._turns * self._scratch_nbytes)

    def run(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray | None) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        hosts, memory = self._hosts, self._memory
        hosts.watch.calls += 1
        self._head = stamp_of(hosts.watch.calls) + self._kind
        if memory is not None:
            self._half = memory.enter(self._head)
            self._first, memory.pieces = memory.pieces, memory.pieces + len(self._starts)
        self._sent = self._nothing if sendbuf is None else sendbuf.reshape(-1)
        self._result = self._nothing if recvbuf is None else recvbuf.reshape(-1)
        # Another thread may have a plan compiled meanwhile, for which it moves.
        self._scratch = hosts.scratch.memory
        try:
            self._run()
        except BaseException as error:
            hosts.wire.fail(error, self._words)
        finally:
            self._sent = self._result = self._scratch = self._nothing

    def _run(self) -> None:
        count, steps, owns = len(self._starts), self._steps, self._rank in self._owners
        for turn in range(count + steps + 2):
            if turn < count:
                self._contribute(turn)
            if owns and 0 < turn <= count:
                self._add_up(turn - 1)
                self._begin(turn - 1, 0)
            for step in range(steps if owns else 0):
                if 0 <= (piece := turn - 2 - step) < count:
                    self._end(piece, step)
            if turn >= steps + 2:
                self._gather(turn - steps - 2)

    def _slot(self, piece: int) -> tuple[Slot, int]:
        """A piece in memory, and how far after the begin of its blocks it begins."""
        kind, start = self._pieces[piece], self._starts[piece]
        if self._direct:
            image = self._result[start : start + kind.count]
            return Slot(kind, image, (), image), start
        number = (self._first + piece) % self._depth
        slot = self._slots.get((kind, self._half, number))
        if slot is None:
            slot = self._slots[kind, self._half, number] = self._find(kind, number)
        return slot, start

    def _find(self, kind: Piece, number: int) -> Slot:
        memory, at = self._memory, number * self._slot_nbytes
        assert memory is not None
        image = memory.image(self._half, at, kind.count, self._dtype)
        if not self._reduces:
            return Slot(kind, image, (), image)
        left = [memory.contributed(q, at, kind.count, self._dtype) for q in memory.ranks]
        return Slot(kind, image, left, left[self._me])

    def _contribute(self, piece: int) -> None:
        slot, start = self._slot(piece)
        if not self._keeps:
            for part, place in slot.leaves:
                place[...] = part.of(self._sent, start)
        if self._others:
            self._memory.signal(ARRIVED, self._first + piece + 1)  # type: ignore[union-attr]

    def _add_up(self, piece: int) -> None:
        """Waits for what the ranks of the host contribute, and adds up this rank's stripe of it."""
        if self._others:
            self._await(self._others, ARRIVED, piece)
            if piece == 0:  # the others stay in this call until its owners have shown something
                for peer in self._others:
                    self._memory.check(peer, self._head)  # type: ignore[union-attr]
        slot, start = self._slot(piece)
        for part, into, sources in slot.own:
            sent = part.of(self._sent, start)
            if self._combine is not None:
                self._add(sent, into, sources)
            elif not self._keeps:
                into[...] = sent

    def _add(self, sent: np.ndarray, into: np.ndarray, sources: Sequence[np.ndarray]) -> None:
        """Adds up one run; this rank's own data is read where the caller has it."""
        every = [*sources]
        every[self._me] = sent
        for start in range(0, len(into), self._tile):
            tile = slice(start, start + self._tile)
            out = into[tile]
            self._combine([one[tile] for one in every], out, self._accumulator[: len(out)])  # type: ignore[misc]

    def _arrays(self, piece: int) -> tuple[Crossing, list[np.ndarray]]:
        crossing, image = self._pieces[piece].crossing, self._slot(piece)[0].image
        turn = piece % self._turns * self._scratch_nbytes
        scratch = self._scratch[turn : turn + crossing.scratch_nbytes]
        return crossing, [image, image, scratch.view(self._dtype)]

    def _begin(self, piece: int, step: int) -> None:
        crossing, arrays = self._arrays(piece)
        self._flights[piece] = crossing.begin(step, arrays, self._starts[piece])

    def _end(self, piece: int, step: int) -> None:
        """Ends a step of a piece, and begins the next one, or shows the result to the host."""
        crossing, arrays = self._arrays(piece)
        crossing.end(step, self._flights.pop(piece), arrays, self._starts[piece])
        if step + 1 < self._steps:
            self._begin(piece, step + 1)
        elif self._others:
            self._memory.signal(REDUCED, self._first + piece + 1)  # type: ignore[union-attr]

    def _gather(self, piece: int) -> None:
        """Takes what is meant for this rank, when all owners show it; then this piece is done."""
        slot, start = self._slot(piece)
        if self._others:
            self._await([q for q in self._owners if q != self._rank], REDUCED, piece)
        if self._direct:
            if self._divisor:
                np.true_divide(slot.image, self._divisor, out=slot.image)
            return
        for part, place in slot.takes:
            into = part.of(self._result, start)
            if self._divisor:
                np.true_divide(place, self._divisor, out=into)
            else:
                into[...] = place

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


def _lines(nbytes: int) -> int:
    """So many bytes, up to the end of their last cache line."""
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES
