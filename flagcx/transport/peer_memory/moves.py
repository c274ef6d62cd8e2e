"""The launches of ``flagcx_move``: which bytes go where, in collectives and for sends and receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from flagcx.kernels.peer import WARP, PeerLayout
from flagcx.kernels.peer_move import FEW_STEPS, MOST_JOBS, Job, MoveArgs
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call
from flagcx.transport.device_messages import Message
from flagcx.transport.peer_memory.grids import Grid
from flagcx.transport.peer_memory.plans import PeerPlan

ALWAYS_MOVED = ("gather", "scatter")
_MOVED = (*ALWAYS_MOVED, "allgather", "alltoall")
_NO_MESSAGE = -1
_COPIED_NBYTES = 64 << 10
"""Bytes that a block copies which has nothing else to do."""


def is_moved(call: Call) -> bool:
    """Whether the kernel carries out a call: blocks that differ in size, or go to or from one rank."""
    collective = call.schedule.collective
    return collective in ALWAYS_MOVED or (collective in _MOVED and not isinstance(call.counts, int))


def counted_on_gpu(call: Call) -> bool:
    """Whether the counts of an alltoall lie on the GPU: then the call has none."""
    return call.counts == ()


def jobs_of(call: Call) -> list[Job]:
    """What a rank sends and receives in a collective: to the k-th rank after it, from the k-th before it.

    What it has for itself comes last.
    """
    rank, size, root = call.rank, call.schedule.size, call.schedule.root
    pairs = [((rank + k) % size, (rank - k) % size) for k in (*range(1, size), 0)]
    if counted_on_gpu(call):
        return [Job(0, 0, 0, 0, *pair) for pair in pairs]
    kind, itemsize = COLLECTIVES[call.schedule.collective], call.dtype.numpy.itemsize
    sent, taken = _blocks(call)
    starts, stops = ([0, *accumulate(each)] for each in (sent, taken))
    made = []
    for target, source in pairs:
        sends = kind.has_input(rank, root) and kind.has_output(target, root)
        takes = kind.has_output(rank, root) and kind.has_input(source, root)
        job = Job(0, 0, _NO_MESSAGE, _NO_MESSAGE, target, source)
        if sends:
            block = rank if kind.before == "each" else target
            job.start = 0 if kind.before == "each" else starts[target] * itemsize
            job.sends = sent[block] * itemsize
        if takes:
            block = rank if kind.after == "each" else source
            job.stop = 0 if kind.after == "each" else stops[source] * itemsize
            job.takes = taken[block] * itemsize
        if sends or takes:
            made.append(job)
    return made


def _blocks(call: Call) -> tuple[Sequence[int], Sequence[int]]:
    """Elements of each block that this rank may send, and of each that it may get."""
    counts = call.counts
    if isinstance(counts, int):
        counts = (counts,) * call.schedule.size
    return counts if isinstance(counts[0], tuple) else (counts, counts)


def rounds_of(rank: int, size: int, messages: Sequence[Message]) -> Iterator[list[Job]]:
    """The launches of sends and receives that are made together: each the next message to and from each peer.

    The messages of a launch come in an order that all ranks share, as far as they have them: a rank with more
    messages than blocks of threads has some after others.
    """
    queues: dict[tuple[int, bool], list[Message]] = defaultdict(list)
    for message in messages:
        queues[message.peer, message.sends].append(message)

    def place(message: Message) -> tuple[int, bool]:
        return (rank + message.peer) % size, message.sends != (rank < message.peer)

    for number in range(max(map(len, queues.values()), default=0)):
        together = sorted((queue[number] for queue in queues.values() if number < len(queue)), key=place)
        for first in range(0, len(together), MOST_JOBS):
            yield [
                Job(at, 0, nbytes, _NO_MESSAGE, peer, rank)
                if sends
                else Job(0, at, _NO_MESSAGE, nbytes, rank, peer)
                for sends, at, nbytes, peer in together[first : first + MOST_JOBS]
            ]


def fill_jobs(
    args: MoveArgs, layout: PeerLayout, jobs: Sequence[Job], pairs: bool = False, on_gpu: bool = False
) -> Grid:
    """Enters jobs in the arguments of a launch, and returns its grid.

    Args:
        args: The arguments, with the rank.
        layout: The memory.
        jobs: The jobs; what a rank has for itself comes last.
        pairs: Whether they are sends and receives, which have channels of their own.
        on_gpu: Whether sizes are known on the GPU alone.
    """
    last = jobs[-1]
    args.own = last.target == last.source == args.rank
    args.jobs = len(jobs) - args.own
    args.first = layout.channels if pairs else 0
    args.few, args.most = few, most = channels_for(layout, pairs)
    for i, job in enumerate(jobs):
        args.job[i] = job
    largest = max(max(job.sends, job.takes) for job in jobs)
    args.channels = most if on_gpu else channels_of(layout, largest, few, most)
    copying = (
        -(-last.sends // _COPIED_NBYTES) if args.own else 0
    )  # by blocks of their own, where there is room
    items = args.jobs * args.channels
    return Grid(min(layout.blocks, max(items + copying, 1)), layout.shape.work + WARP, 0, 0, 1)


def channels_for(layout: PeerLayout, pairs: bool) -> tuple[int, int]:
    """Channels of a message that is not long, of which each block has one at most, and of one that is."""
    if pairs:
        return max(layout.pair_channels // 2, 1), layout.pair_channels
    return max(layout.blocks // max(layout.ranks - 1, 1), 1), layout.channels


def channels_of(layout: PeerLayout, nbytes: int, few: int, most: int) -> int:
    """Channels that a message goes over; ``cut_of`` in the kernel."""
    packs = -(-nbytes // 16)
    if packs <= few * layout.box_packs * FEW_STEPS:
        most = few
    if nbytes <= layout.most_small and packs <= few * layout.small_packs:
        return max(min(-(-packs // layout.packs_each), most), 1)
    work = layout.shape.work
    chunk = min(-(-packs // (most * 4 * work)) * work, layout.box_packs)
    return min(-(-packs // chunk), most)


class CountedPlan:
    """An alltoall whose counts lie on the GPU.

    Args:
        plan: The launch.
    """

    __slots__ = ("_plan", "call")

    def __init__(self, plan: PeerPlan) -> None:
        self._plan, self.call = plan, plan.call

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Enqueues the call on the current stream; each buffer is a pair: the array, and its counts."""
        args = self._plan.args
        (x, sent), (out, taken) = sendbuf, recvbuf
        counts = args.sent_counts, args.taken_counts = sent.data.ptr, taken.data.ptr
        sizes = args.sendbuf_count, args.recvbuf_count = x.size, out.size
        self._plan.run(x, out, (*counts, *sizes))

    def __repr__(self) -> str:
        return f"<CountedPlan {self.call}>"
