"""Compressed all-reduces over hosts whose ranks share memory: coded between hosts alone."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.compression import Cast, Feedback, Quantized
from flagcx.compression.codec import Scratch
from flagcx.compression.over_hosts import OverHosts
from flagcx.dtypes import OPS, dtype_of, scaled_sum
from flagcx.transport.base import Call
from flagcx.transport.network import pieces
from flagcx.transport.network.hierarchy import HierarchicalCollective
from tests.compression.test_plans import gradient
from tests.transport.thread_hosts import GROUPS, thread_hosts

BOUNDS = {"bf16": 1e-2, "int8": 0.03, "int4": 0.4}


def peers_of(hosts, rank):
    """What ``OverHosts`` needs of ``Peers``."""
    size = sum(map(len, hosts.groups))

    def between_hosts(count, in_place, coder):
        schedule = build("allreduce", "hierarchical", size, None, 1, hosts.groups)
        call = Call(schedule, rank, count, dtype_of("float32"), OPS["sum"], in_place, coder=coder)
        assert hosts.serves(call)
        return HierarchicalCollective(hosts, call, call.describe())

    return SimpleNamespace(
        rank=rank, size=size, scratch=Scratch(), sent_nbytes=0, on_device=False, between_hosts=between_hosts
    )


def on_hosts(groups, function):
    """What ``function(peers)`` returns on each rank."""
    hosts = thread_hosts(groups)
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(lambda rank: function(peers_of(hosts[rank], rank)), range(len(hosts))))


@pytest.fixture(params=GROUPS, ids=str)
def groups(request, monkeypatch):
    """Ranks of hosts; pieces are so small that a message has many."""
    monkeypatch.setattr(pieces, "SHORT_NBYTES", 4096)
    monkeypatch.setattr(pieces, "_LEAST_NBYTES", 512)
    monkeypatch.setattr(pieces, "_MOST_NBYTES", 512)
    return request.param


def results(peers, codec, op, counts):
    """In place and not."""
    found = []
    for count in counts:
        reduce = OverHosts(peers, codec, count, op, Feedback(codec)["x"])
        reduce._slot.keeps = False
        for in_place in (False, True):
            x = gradient(peers.rank, 0, count)
            out = x if in_place else np.full_like(x, np.nan)
            reduce._slot.begin(x)
            reduce.run(x, out)
            if not in_place:
                np.testing.assert_array_equal(x, gradient(peers.rank, 0, count))
            found.append(out)
    return found


@pytest.mark.parametrize("codec", [Quantized("int8"), Quantized("int4", block=64), Cast("bf16")], ids=str)
def test_the_sum_over_all_ranks_with_the_same_bits(groups, codec):
    op, counts = scaled_sum(0.5), (1, 31, 1000, 20_011)
    everybodys = on_hosts(groups, lambda peers: results(peers, codec, op, counts))
    for number, outs in enumerate(zip(*everybodys, strict=True)):
        count = counts[number // 2]
        exact = 0.5 * np.sum([gradient(q, 0, count) for q in range(len(outs))], axis=0, dtype=np.float64)
        assert len({out.tobytes() for out in outs}) == 1
        error = np.linalg.norm(outs[0] - exact) / np.linalg.norm(exact)
        assert error < BOUNDS[codec.name], (count, error)


def test_what_is_lost_comes_with_a_later_step(groups):
    """The sum of all results, and what the ranks still keep, is the sum of all gradients."""
    count, steps, codec = 9_001, 4, Quantized("int4")

    def train(peers):
        slot = Feedback(codec)["x"]
        reduce = OverHosts(peers, codec, count, OPS["avg"], slot)
        total = np.zeros(count)
        for step in range(steps):
            x = gradient(peers.rank, step, count)
            slot.begin(x)
            reduce.run(x, x)
            slot.end(x, reduce.waits, reduce.spoilt)
            total += x
            if step == 1:  # as after a checkpoint of other ranks: there is something to send everywhere
                slot.residuals.now += 0.25
        return total, slot.residual.copy()

    everybodys = on_hosts(groups, train)
    size = len(everybodys)
    given = np.sum([gradient(q, step, count) for q in range(size) for step in range(steps)], axis=0) / size
    kept = sum(residual for _, residual in everybodys) / size
    np.testing.assert_allclose(everybodys[0][0] + kept, given + 0.25, atol=2e-5)
    assert np.linalg.norm(kept) < 0.2 * np.linalg.norm(given)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_on_every_rank_and_is_not_kept(bad):
    count, codec = 5_000, Quantized("int8")

    def step(peers):
        slot = Feedback(codec)["x"]
        reduce, kept = OverHosts(peers, codec, count, OPS["sum"], slot), []
        for spoil in (False, True):
            x = gradient(peers.rank, 0, count)
            if spoil and peers.rank == 2:
                x[3_333] = bad
            slot.begin(x)
            reduce.run(x, x)
            slot.end(x, reduce.waits, reduce.spoilt)
            kept.append(slot.residual.copy())
        return not np.isfinite(x[3_333]), slot.spoilt, np.array_equal(*kept)

    assert set(on_hosts(((0, 1), (2, 3)), step)) == {(True, True, True)}


def test_numbers_cross_the_network_once_and_coded():
    count = 1 << 20
    codec = Quantized("int8")

    def sent(peers):
        results(peers, codec, OPS["sum"], (count,))
        return peers.sent_nbytes / 2

    of_ranks = on_hosts(((0, 1), (2, 3)), sent)
    coded = codec.wire_nbytes(count)
    assert coded <= of_ranks[0] + of_ranks[1] == of_ranks[2] + of_ranks[3] < 1.05 * coded
