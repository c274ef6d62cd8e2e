"""A rank of very many makes its own program alone, and it fits those of its peers."""

from __future__ import annotations

from collections import defaultdict

import pytest

from flagcx.algorithms import catalogue
from flagcx.schedule.model import Send
from tests.algorithms.test_verified import names
from tests.ranges import exhaustive


def lengths(program, peer: int, sends: bool) -> list[tuple[int, int]]:
    """(step, chunks) of the messages to (or from) ``peer``, in order."""
    return [
        (number, len(t.src) if sends else len(t.dst))
        for number, step in enumerate(program.steps)
        for t in step.transfers
        if t.peer == peer and isinstance(t, Send) == sends
    ]


@pytest.mark.parametrize("size", [257, *exhaustive([1031])])
@pytest.mark.parametrize("entry", catalogue(), ids=names)
def test_messages_of_many_ranks_match(entry, size):
    schedule = entry.make(size, 77 if entry.rooted else None)
    for rank in (0, size // 2, size - 1):
        program = schedule.program(rank)
        assert len(program.steps) == len(schedule.program(77).steps)
        peers = defaultdict(int)
        for step in program.steps:
            for transfer in step.transfers:
                peers[transfer.peer] += 1
        for peer in sorted(peers)[:: max(1, len(peers) // 4)]:
            other = schedule.program(peer)
            assert lengths(program, peer, sends=True) == lengths(other, rank, sends=False)
            assert lengths(program, peer, sends=False) == lengths(other, rank, sends=True)


@pytest.mark.parametrize("algorithm", ["bruck", "double_binary_tree", "hierarchical", "recursive_doubling"])
def test_logarithmic_programs_of_16384_ranks_are_short(algorithm):
    (entry,) = (e for e in catalogue() if (e.collective, e.algorithm) == ("allreduce", algorithm))
    program = entry.make(16_384).program(9_999)
    assert entry.steps(16_384, 1) <= len(program.steps) <= 1 + entry.steps(16_384, 1) <= 29
