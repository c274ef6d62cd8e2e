"""Collectives over hosts whose ranks share memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.dtypes import OPS, dtype_of
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call
from flagcx.transport.network import CROSSED, pieces
from flagcx.transport.network.hierarchy import HierarchicalCollective
from tests.transport.thread_hosts import GROUPS, thread_hosts

INTS = dtype_of("int32")


@pytest.fixture(params=GROUPS, ids=str)
def hosts(request):
    """What each rank has of the hosts."""
    return thread_hosts(request.param)


def arrays(collective, size, counts, rank, root):
    """The INPUT of a rank, and the OUTPUT that it must get."""
    kind = COLLECTIVES[collective]
    each = counts if isinstance(counts, tuple) else (counts,) * (size if kind.blocks else 1)
    ends = np.cumsum([0, *each])
    whole = [np.arange(ends[-1], dtype=np.int32) * (q + 3) + 1000 * q for q in range(size)]
    own = slice(ends[rank], ends[rank + 1]) if kind.blocks else slice(None)
    message = sum(whole) if kind.reduces else whole[root or 0]
    if kind.before == "each":
        message = np.concatenate([whole[q][ends[q] : ends[q + 1]] for q in range(size)])
    given = whole[rank][own] if kind.before == "each" else whole[rank]
    wanted = message[own] if kind.after == "each" else message
    return given if kind.has_input(rank, root) else None, wanted if kind.has_output(rank, root) else None


def calls(size):
    """Collectives with their roots and counts, in place and not: of one piece and of many, in one order."""
    for number, count in enumerate((3, 0, 600)):
        for at, collective in enumerate(CROSSED):
            kind = COLLECTIVES[collective]
            root = (number + at) % size if kind.rooted else None
            for in_place in (False, True):
                yield collective, root, count, in_place
                if kind.blocks:
                    yield (
                        collective,
                        root,
                        tuple((q * 5 + at) % 7 * count // 4 for q in range(size)),
                        in_place,
                    )


def make_calls(hosts, rank):
    """All calls of one rank, twice."""
    groups, size = hosts.groups, sum(map(len, hosts.groups))
    done = 0
    for collective, root, counts, in_place in calls(size):
        kind = COLLECTIVES[collective]
        schedule = build(collective, "hierarchical", size, root, 1, groups)
        op = OPS["sum"] if kind.reduces else None
        call = Call(schedule, rank, counts, INTS, op, in_place)
        assert hosts.serves(call)
        plan = HierarchicalCollective(hosts, call, call.describe())
        for _ in range(2):
            given, wanted = arrays(collective, size, counts, rank, root)
            sendbuf, recvbuf = placed(call, given, wanted, in_place)
            plan.run(sendbuf, recvbuf)
            if wanted is not None:
                assert np.array_equal(recvbuf, wanted), (call.describe(), rank, in_place)
            if given is not None and not (in_place and wanted is not None):
                assert np.array_equal(sendbuf, given), (call.describe(), rank)
            done += 1
    return done


def placed(call, given, wanted, in_place):
    """INPUT and OUTPUT, over each other where the call is in place."""
    sendbuf = None if given is None else given.copy()
    recvbuf = None if wanted is None else np.full_like(wanted, -1)
    if in_place and given is not None and wanted is not None:
        schedule = call.schedule
        shift = COLLECTIVES[schedule.collective].in_place_shift(call.rank, schedule.size, schedule.size, None)
        if given.size >= wanted.size:
            start = int(np.cumsum([0, *_blocks(call)])[shift[0]]) if wanted.size < given.size else 0
            recvbuf = sendbuf[start : start + wanted.size]
        else:
            start = int(np.cumsum([0, *_blocks(call)])[shift[1]])
            recvbuf[start : start + given.size] = given
            sendbuf = recvbuf[start : start + given.size]
    return sendbuf, recvbuf


def _blocks(call):
    return call.counts if isinstance(call.counts, tuple) else (call.counts,) * call.schedule.size


def test_every_collective_in_pieces_that_follow_each_other(hosts, monkeypatch):
    """Pieces are so small that slots are written again many times within a call."""
    monkeypatch.setattr(pieces, "SHORT_NBYTES", 256)
    monkeypatch.setattr(pieces, "_LEAST_NBYTES", 128)
    monkeypatch.setattr(pieces, "_MOST_NBYTES", 128)
    with ThreadPoolExecutor(len(hosts)) as pool:
        done = list(pool.map(make_calls, hosts, range(len(hosts))))
    assert set(done) == {2 * len(list(calls(len(hosts))))}
