"""Which of two ways is quicker, and that an all-reduce has the same bits whichever way it takes."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import numpy as np
import pytest

import flagcx as fc
from flagcx.transport.shared_memory.quicker import QuickerOfTwo
from tests.ranks import run_ranks


def ways(one: QuickerOfTwo, took: tuple[float, float], calls: int) -> list[int]:
    """The ways of so many calls, each of which takes what its way takes."""
    chosen = []
    for _ in range(calls):
        way = one.next()
        chosen.append(way)
        one.note(way, took[way])
    return chosen


@pytest.mark.parametrize("better", [0, 1])
def test_both_ways_are_tried_and_the_quicker_one_stays(better):
    one = QuickerOfTwo()
    took = (100.0, 200.0) if better == 0 else (200.0, 100.0)
    first = ways(one, took, 12)
    assert first.count(0) == first.count(1) == 6
    after = ways(one, took, 320)
    assert after.count(1 - better) == 10, "one call in 32 tries the other way"


def test_a_way_that_became_slower_is_left():
    one = QuickerOfTwo()
    ways(one, (100.0, 150.0), 12)
    assert ways(one, (300.0, 150.0), 320)[-31:].count(1) >= 30
    assert ways(one, (100.0, 150.0), 320)[-31:].count(0) >= 30


def test_one_slow_call_is_an_accident():
    one = QuickerOfTwo()
    ways(one, (100.0, 200.0), 12)
    one.note(0, 5_000.0)
    assert one.next() == 0


def reduced_by_turns(counts: list[int]) -> list[str]:
    """All-reduces while all ranks prefer one way, or one rank the other, with arrays of several kinds."""
    comm, wrong = fc.init(), []
    for count, (turn, way) in product(counts, enumerate([0, 1, int(comm.rank == 1), 0, 1, 0])):
        with patch.object(QuickerOfTwo, "next", lambda self, way=way: way):
            mine = [(np.arange(count) * (q + 3) + turn) % 1013 for q in range(comm.size)]
            expected = np.sum(mine, 0).astype(np.float32)
            private, shared = mine[comm.rank].astype(np.float32), comm.empty(count, np.float32)
            shared[:] = private
            mixed = shared.copy() if comm.rank == 0 else comm.empty(count, np.float32)
            mixed[:] = private
            for name, x in (("private", private), ("shared", shared), ("mixed", mixed)):
                out = np.empty_like(private)
                comm.allreduce(x, out=out)
                comm.allreduce(x)
                wrong += [f"{name}, {count}, {way}"] * (not (x == expected).all())
                wrong += [f"{name}, {count}, {way}, out"] * (not (out == expected).all())
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("attach", ["1", "0"])
def test_all_reduces_are_right_while_the_way_changes(ranks, attach, monkeypatch):
    monkeypatch.setenv("FLAGCX_CROSS_MEMORY", attach)
    counts = [40_001, 65_536, 131_072, (1 << 20) + 5]  # one piece, several, and a last one that is shorter
    assert run_ranks(reduced_by_turns, ranks, counts) == [[]] * ranks
