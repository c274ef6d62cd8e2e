"""The launches that move blocks: which bytes go where, in which order, over how many blocks of threads."""

from __future__ import annotations

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.dtypes import dtype_of
from flagcx.kernels.peer import PeerLayout
from flagcx.kernels.peer_move import Job, MoveArgs
from flagcx.transport.base import Call
from flagcx.transport.device_messages import Message
from flagcx.transport.peer_memory.moves import fill_jobs, jobs_of, rounds_of

MANY = 1 << 16


def _call(collective: str, rank: int, counts, size: int = 4, dtype: str = "float32") -> Call:
    root = 1 if collective in ("gather", "scatter") else None
    schedule = build(collective, "direct", size, root=root)
    return Call(schedule, rank, counts, dtype_of(dtype), None, False, "peer_memory")


def _messages(collective: str, counts_of, size: int = 4) -> set[tuple]:
    """(sender, receiver, place and bytes at the sender, place and bytes at the receiver) of all jobs."""
    sent, taken = {}, {}
    for rank in range(size):
        for job in jobs_of(_call(collective, rank, counts_of(rank), size)):
            if job.sends >= 0:
                sent[rank, job.target] = job.start, job.sends
            if job.takes >= 0:
                taken[job.source, rank] = job.stop, job.takes
    assert sent.keys() == taken.keys(), "a rank waits for what no rank sends"
    return {(*pair, *sent[pair], *taken[pair]) for pair in sent}


def test_each_block_has_one_message_from_its_place_to_its_place():
    counts = (1, 0, 5, 3)
    assert _messages("gather", lambda _: 2) == {(q, 1, 0, 8, 8 * q, 8) for q in range(4)}
    assert _messages("scatter", lambda _: counts) == {
        (1, 0, 0, 4, 0, 4), (1, 1, 4, 0, 0, 0), (1, 2, 4, 20, 0, 20), (1, 3, 24, 12, 0, 12)
    }  # fmt: skip
    assert _messages("allgather", lambda _: counts) == {
        (q, r, 0, 4 * counts[q], (0, 4, 4, 24)[q], 4 * counts[q]) for q in range(4) for r in range(4)
    }
    sizes = np.arange(16).reshape(4, 4)
    found = _messages("alltoall", lambda r: (tuple(sizes[r].tolist()), tuple(sizes[:, r].tolist())))
    assert (2, 1, 4 * 8, 4 * 9, 4 * (1 + 5), 4 * 9) in found and len(found) == 16


def test_messages_to_one_rank_go_one_after_the_other_in_an_order_that_all_share():
    sizes = np.random.default_rng(1).integers(1, 99, (5, 5))
    made = []
    for rank in range(5):
        others = [q for q in range(5) if q != rank for _ in range(2)]
        messages = [Message(sends, 16, int(sizes[rank, q]), q) for q in others for sends in (True, False)]
        rounds = list(rounds_of(rank, 5, messages))
        assert [len(jobs) for jobs in rounds] == [8, 8]
        for jobs in rounds:
            made.append([(rank, j.target) if j.takes < 0 else (j.source, rank) for j in jobs])
    before = {(a, b) for order in made for i, a in enumerate(order) for b in order[i + 1 :]}
    assert not any((b, a) in before for a, b in before), "two ranks have two messages in another order"


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("one_gpu", [True, False])
def test_a_launch_of_jobs_fits_its_blocks(ranks, one_gpu):
    layout = PeerLayout(ranks, 12, one_gpu)
    for nbytes in (0, 1, 4096, MANY, 1 << 30):
        for many in (1, 2, ranks, 2 * ranks - 2):
            args = MoveArgs(rank=0)
            jobs = [Job(0, 0, nbytes, -1, 1, 0)] * many + [Job(0, 0, nbytes, nbytes, 0, 0)]
            grid = fill_jobs(args, layout, jobs, pairs=True)
            assert (args.jobs, args.own) == (many, 1)
            assert 1 <= args.channels <= args.most == layout.pair_channels
            assert min(layout.blocks, many * args.channels) <= grid.blocks <= layout.blocks
            fill_jobs(args, layout, jobs, pairs=True, on_gpu=True)
            assert args.channels == args.most, "the largest is not known"


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("one_gpu", [True, False])
def test_messages_that_are_not_long_leave_one_channel_to_each_block(ranks, one_gpu):
    layout = PeerLayout(ranks, 12, one_gpu)
    jobs = [Job(0, 0, 200_000, 200_000, (k + 1) % ranks, -k % ranks) for k in range(ranks - 1)]
    args = MoveArgs(rank=0)
    fill_jobs(args, layout, jobs)
    assert args.jobs * args.channels <= layout.blocks
    for job in jobs:
        job.sends = 1 << 30
    fill_jobs(args, layout, jobs)
    assert args.jobs * args.channels >= layout.blocks
