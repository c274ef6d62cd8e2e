"""The steps and bytes that an entry states, against counts from all programs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from flagcx.algorithms import build, catalogue, entry
from flagcx.schedule.model import Program, Step
from flagcx.schedule.traffic import rounds_of, sent_chunks
from tests.algorithms.test_verified import names
from tests.ranges import exhaustive


def counted(schedule):
    """Steps, and what the busiest rank sends as a share of the message."""
    rounds = rounds_of(schedule)
    return rounds.steps, Fraction(int(rounds.sent_chunks().max()), schedule.chunks)


@pytest.mark.parametrize("sizes", [(*range(1, 10), 17), *exhaustive([(*range(10, 17), 31, 32, 33)])])
@pytest.mark.parametrize("entry", catalogue(), ids=names)
def test_what_an_entry_states(entry, sizes):
    root = 0 if entry.rooted else None
    for size in sizes:
        for pieces in (1, 2, 3, 7) if entry.pipelined and size <= 12 else (1,):
            schedule = entry.make(size, root, pieces)
            assert (entry.steps(size, pieces), entry.sent(size, pieces)) == counted(schedule), (size, pieces)


def test_known_figures():
    """Spelt out once, so that formula and count cannot be wrong alike."""
    assert entry("allreduce", "ring").steps(8, 1) == 14
    assert entry("allreduce", "ring").sent(8, 1) == Fraction(14, 8)
    assert entry("allreduce", "bruck").steps(9, 1) == 8
    assert entry("allreduce", "bruck").sent(9, 1) == Fraction(16, 9)
    assert entry("allreduce", "halving_doubling").steps(8, 1) == 6
    assert entry("allreduce", "double_binary_tree").steps(8, 4) == 2 * 3 + 3
    assert entry("broadcast", "chain").steps(8, 10) == 7 + 9
    assert entry("broadcast", "double_binary_tree").sent(16, 4) == 1
    assert entry("broadcast", "binomial").sent(16, 1) == 4
    assert entry("alltoall", "bruck").sent(8, 1) == Fraction(12, 8)
    assert entry("barrier", "dissemination").steps(9, 1) == 4


def test_counts_see_a_step_more_and_a_chunk_more():
    schedule = build("allreduce", "ring", 4)
    programs = [Program(p.rank, (*p.steps, Step(p.steps[1].transfers))) for p in schedule.programs()]
    longer = replace(schedule, make=programs.__getitem__)
    (steps, sent), (more_steps, more_sent) = counted(schedule), counted(longer)
    assert (more_steps, more_sent) == (steps + 1, sent + Fraction(1, 4))


@pytest.mark.parametrize(
    "sizes", [(17, 24, 31, 32, 33, 100), *exhaustive([(18, 19, 21, 25, 28, 36, 39, 65, 127, 128)])]
)
@pytest.mark.parametrize("entry", [e for e in catalogue() if "direct" not in str(e.algorithm)], ids=names)
def test_a_few_of_many_ranks_show_the_busiest(entry, sizes):
    for size in sizes:
        schedule = entry.make(size, 0 if entry.rooted else None)
        busiest = max(sent_chunks(schedule, rank) for rank in range(size))
        assert entry.sent(size) == Fraction(busiest, schedule.chunks), size
