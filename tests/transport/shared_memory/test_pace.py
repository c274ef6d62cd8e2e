"""What a rank's writes cost, and that an all-reduce has the same bits whichever way it takes."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.transport.shared_memory.pace import Pace
from tests.ranks import run_ranks


def pace() -> Pace:
    return Pace(np.zeros(1 << 16, np.uint8), np.arange(1 << 16).astype(np.uint8))


def test_one_quick_write_is_believed_and_one_slow_write_is_not():
    one = pace()
    assert one.slow, "until a write was quick"
    one.note(1 << 16, 2_000)
    assert not one.slow
    one.note(1 << 16, 28_000)
    assert not one.slow, "a slow write may be an accident"
    one.note(1 << 16, 28_000)
    assert one.slow
    one.note(1 << 16, 2_000)
    assert not one.slow


def test_the_first_calls_probe_and_then_few():
    one = pace()
    due = [number for number in range(1, 101) if one.is_due()]
    assert due == [1, 2, 3, 4, 32, 64, 96]


def test_a_probe_passes_memory_on_and_close_lets_go_of_it():
    mine, theirs = np.zeros(4096, np.uint8), np.arange(4096).astype(np.uint8)
    one = Pace(mine, theirs)
    one.read()
    one.write()
    assert (mine == theirs).all()
    one.close()
    theirs[:] = 0
    one.read()
    assert one._own.any(), "reads its own memory now"


def reduced_by_turns(counts: list[int]) -> list[str]:
    """All-reduces while the ranks' writes are slow, quick, or slow on one rank alone."""
    comm, wrong = fc.init(), []
    here = comm._host.transport._arena.pace
    for count in counts:
        for turn, slow in enumerate([True, False, comm.rank == 1, False, True, False]):
            here.slow, here._slow_writes = slow, 2 * slow
            mine = [(np.arange(count) * (q + 3) + turn) % 1013 for q in range(comm.size)]
            expected = np.sum(mine, 0).astype(np.float32)
            private, shared = mine[comm.rank].astype(np.float32), comm.empty(count, np.float32)
            shared[:] = private
            mixed = shared.copy() if comm.rank == 0 else comm.empty(count, np.float32)
            mixed[:] = private
            for name, x in (("private", private), ("shared", shared), ("mixed", mixed)):
                out = np.empty_like(private)
                here.slow, here._slow_writes = slow, 2 * slow
                comm.allreduce(x, out=out)
                comm.allreduce(x)
                wrong += [f"{name}, {count}, {slow}"] * (not (x == expected).all())
                wrong += [f"{name}, {count}, {slow}, out"] * (not (out == expected).all())
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduces_are_right_while_the_way_changes(ranks):
    counts = [40_001, 65_536, 131_072, (1 << 20) + 5]  # one piece, several, and a last one that is shorter
    assert run_ranks(reduced_by_turns, ranks, counts) == [[]] * ranks
