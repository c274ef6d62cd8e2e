"""A tiny executor of schedules on integers, as an oracle that shares no idea with ``verify``.

It knows nothing of matching, cycles or symbols: it moves real numbers between arrays, in a random one
of the orders that the steps allow, and looks at what comes out. A step begins when the one before has
ended; a transfer happens at a random time at which both its steps have begun; a step ends when all its
transfers have happened. Chunks differ in size, OUTPUT and SCRATCH begin with rubbish.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from flagcx.schedule.collectives import COLLECTIVES, chunk_layout
from flagcx.schedule.model import Buffer, Copy, Recv, RecvReduce, Schedule, Send, Span


class Broken(Exception):
    """The schedule hung, left its buffers or ended with a wrong result."""


def execute(schedule: Schedule, *, in_place: bool, seed: int, uneven: bool = False) -> None:
    """Runs ``schedule`` once, in an order that ``seed`` gives.

    Raises:
        Broken: It hangs, leaves its memory, or some OUTPUT is wrong or some INPUT was changed.
    """
    rng = random.Random(seed)
    kind = COLLECTIVES[schedule.collective]
    counts = _counts(schedule, rng, uneven)
    ranks = [_Rank(schedule, r, counts(r), in_place, rng) for r in range(schedule.size)]
    op = np.bitwise_or if kind.repeats else np.add
    given = [rank.given.copy() for rank in ranks]
    _run(ranks, op, rng)
    for r, rank in enumerate(ranks):
        wanted = _wanted(schedule, r, given, op, counts)
        if wanted is not None and not np.array_equal(rank.memory[Buffer.OUTPUT], wanted):
            raise Broken(f"rank {r} ends with a wrong OUTPUT")
        if not np.array_equal(rank.given[rank.keeps], given[r][rank.keeps]):
            raise Broken(f"INPUT of rank {r} was changed")


def outcome(schedule: Schedule, seed: int = 0, trials: int = 6, uneven: bool = False) -> str | None:
    """What goes wrong in some of ``trials`` runs in place and not, or None."""
    for trial in range(trials):
        for in_place in (False, True):
            try:
                execute(schedule, in_place=in_place, seed=seed + trial, uneven=uneven)
            except Broken as error:
                return str(error)
    return None


def _counts(schedule: Schedule, rng: random.Random, uneven: bool):
    kind = COLLECTIVES[schedule.collective]
    pieces = kind.per_block(schedule.size, schedule.chunks)

    def count() -> int:
        return 2 * pieces + rng.randrange(1, max(pieces, 2))

    n = schedule.size
    if not kind.blocks or not uneven:
        same = count()
        return lambda rank: same
    if kind.name != "alltoall":
        each = tuple(count() + rng.randrange(3) * pieces for _ in range(n))
        return lambda rank: each
    matrix = [[count() + rng.randrange(3) * pieces for _ in range(n)] for _ in range(n)]
    return lambda rank: (tuple(matrix[rank]), tuple(row[rank] for row in matrix))


class _Rank:
    """One rank's memory and how far it is."""

    def __init__(self, schedule: Schedule, rank: int, counts, in_place: bool, rng: random.Random) -> None:
        self.rank = rank
        self.program = schedule.program(rank)
        self.step = -1
        self.waiting: set[int] = set()
        self.arrived: dict[int, np.ndarray] = {}
        facts = (rank, schedule.size, schedule.chunks, schedule.root)
        self.place = chunk_layout(
            schedule.collective, rank, schedule.size, schedule.chunks, schedule.root, counts,
            self.program.scratch_used(),
        )  # fmt: skip
        kind = COLLECTIVES[schedule.collective]
        sizes = [self.place.count(buffer) for buffer in Buffer]
        noise = np.random.default_rng(rng.randrange(1 << 30))
        self.memory = [noise.integers(1, 1 << 60, size) for size in sizes]
        if kind.repeats:
            self.memory[Buffer.INPUT][:] = 1 << rank
        self.keeps = slice(None)
        shift = kind.in_place_shift(*facts) if in_place else None
        if shift is not None:
            self._overlay(*shift)
        self.given = self.memory[Buffer.INPUT]

    def _overlay(self, i: int, o: int) -> None:
        given, result = self.memory[:2]
        if len(given) < len(result):
            start = self.place.bounds[Buffer.OUTPUT][o]
            result[start : start + len(given)] = given
            self.memory[Buffer.INPUT] = result[start : start + len(given)]
        else:
            start = self.place.bounds[Buffer.INPUT][i]
            self.memory[Buffer.OUTPUT] = given[start : start + len(result)]
        kept = np.ones(len(given), bool)
        kept[slice(None) if len(given) <= len(result) else slice(start, start + len(result))] = False
        self.keeps = kept

    def view(self, span: Span) -> np.ndarray:
        chunks = len(self.place.bounds[span.buffer]) - 1
        if not 0 <= span.start < span.stop <= chunks:
            raise Broken(f"rank {self.rank} leaves its {span.buffer.name} with {span}")
        start, stop = self.place.slice(span)
        return self.memory[span.buffer][start:stop]


def _run(ranks: list[_Rank], op, rng: random.Random) -> None:
    sends: dict[tuple[int, int], deque] = {}
    receives: dict[tuple[int, int], deque] = {}

    def begin(rank: _Rank) -> None:
        rank.step += 1
        if rank.step == len(rank.program.steps):
            return
        transfers = rank.program.steps[rank.step].transfers
        rank.waiting = set(range(len(transfers)))
        for index, t in enumerate(transfers):
            if not 0 <= t.peer < len(ranks) or t.peer == rank.rank:
                raise Broken(f"rank {rank.rank} has no peer {t.peer}")
            if isinstance(t, Send):
                sends.setdefault((rank.rank, t.peer), deque()).append((rank, index, t))
            else:
                receives.setdefault((t.peer, rank.rank), deque()).append((rank, index, t))

    def end(rank: _Rank) -> None:
        step = rank.program.steps[rank.step]
        for index, t in enumerate(step.transfers):
            if isinstance(t, RecvReduce):
                _apply(rank.view(t.dst), rank.arrived.pop(index), op)
        for work in step.local:
            src = rank.view(work.src)
            _apply(rank.view(work.dst), src, None if isinstance(work, Copy) else op)

    for rank in ranks:
        begin(rank)
    while True:
        done = [r for r in ranks if r.step < len(r.program.steps) and not r.waiting]
        ready = [pair for pair, queue in sends.items() if queue and receives.get(pair)]
        if not done and not ready:
            break
        if done and (not ready or rng.random() < 0.5):
            rank = rng.choice(done)
            end(rank)
            begin(rank)
            continue
        pair = rng.choice(ready)
        # Transfers of one pair are matched in order, but any of those that are matched may be the next.
        depth = min(len(sends[pair]), len(receives[pair]))
        at = rng.randrange(depth)
        source, i, send = sends[pair][at]
        target, j, receive = receives[pair][at]
        del sends[pair][at], receives[pair][at]
        data = source.view(send.src).copy()
        if len(data) != len(target.view(receive.dst)):
            raise Broken(
                f"rank {source.rank} sends {len(data)} elements to rank {target.rank}, which takes others"
            )
        if isinstance(receive, Recv):
            target.view(receive.dst)[:] = data
        else:
            target.arrived[j] = data
        source.waiting.discard(i)
        target.waiting.discard(j)
    stuck = [r.rank for r in ranks if r.step < len(r.program.steps)]
    if stuck:
        raise Broken(f"ranks {stuck} hang")


def _apply(dst: np.ndarray, src: np.ndarray, op) -> None:
    if len(dst) != len(src):
        raise Broken(f"{len(src)} elements are put into {len(dst)}")
    dst[:] = src if op is None else op(dst, src)


def _wanted(schedule: Schedule, r: int, given: list[np.ndarray], op, counts) -> np.ndarray | None:
    """What the OUTPUT of rank ``r`` must be, said in NumPy."""
    n, root = schedule.size, schedule.root

    def block(of: int, index: int) -> np.ndarray:
        sizes = counts(of)
        if isinstance(sizes, int):
            return given[of][index * sizes : (index + 1) * sizes]
        sizes = sizes[0] if isinstance(sizes[0], tuple) else sizes
        start = sum(sizes[:index])
        return given[of][start : start + sizes[index]]

    match schedule.collective:
        case "allreduce" | "barrier":
            return op.reduce(np.array(given), axis=0)
        case "reduce":
            return op.reduce(np.array(given), axis=0) if r == root else None
        case "broadcast":
            return given[root]
        case "allgather":
            return np.concatenate(given)
        case "gather":
            return np.concatenate(given) if r == root else None
        case "reduce_scatter":
            return op.reduce(np.array([block(q, r) for q in range(n)]), axis=0)
        case "scatter":
            return block(root, r)
        case "alltoall":
            return np.concatenate([block(q, r) for q in range(n)])
    raise AssertionError(schedule.collective)
