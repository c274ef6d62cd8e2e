"""verify rejects every mutant that the oracle finds broken; and without one of its checks it does not."""

from __future__ import annotations

import pytest

from flagcx.schedule import verify as module
from flagcx.schedule.compose import beside, relabel
from tests.mutants import mutations, survey
from tests.ranges import exhaustive
from tests.schedule.samples import (
    all_samples,
    pairwise_alltoall,
    relayed_broadcast,
    ring_allreduce,
    staged_alltoall,
    two_shot,
)
from tests.schedule.test_compose import then_pairs


@pytest.mark.parametrize("n", [3, 5, *exhaustive([2])])
def test_no_broken_mutant_passes(n):
    broken = 0
    for schedule in all_samples(n):
        found = survey(schedule, seed=n, limit=40, trials=3)
        assert not found.survivors, (schedule, found.survivors)
        broken += len(found.broken)
    assert broken > 300


def test_no_broken_mutant_of_a_composition_passes():
    wholes = [schedule for _, schedule in then_pairs(4)]
    wholes += [beside(ring_allreduce(4), two_shot(4), 0.3), relabel(two_shot(4), [2, 0, 3, 1])]
    wholes += [beside(wholes[2], relabel(wholes[2], [3, 2, 1, 0]))]
    for schedule in wholes:
        found = survey(schedule, seed=7, limit=50, trials=3)
        assert not found.survivors, (schedule, found.survivors)
        assert len(found.broken) > 20


RULES = [
    "leaves its buffer",
    "must be another rank",
    "INPUT must not be written",
    "without its match",
    "both must have the same length",
    "may differ by an element in size",
    "deadlock",
    "lands in it at any time",
    "never written",
    "ends wrong: it lacks",
    "counts chunk",
    "which do not belong there",
]


def test_every_rule_rejects_a_mutant_and_names_the_rank():
    schedules = (ring_allreduce(4), two_shot(4), pairwise_alltoall(4))
    found = [survey(schedule, seed=3, limit=100, trials=1) for schedule in schedules]
    messages = [message for one in found for message in one.messages.values()]
    assert all("rank " in message for message in messages)
    for rule in RULES:
        assert any(rule in message for message in messages), rule


def test_mutations_are_different_and_follow_from_the_seed():
    def keys(seed: int) -> list:
        return [(d, tuple(m.programs())) for d, m in mutations(two_shot(3), seed, 50)]

    assert keys(1) == keys(1)
    assert keys(1) != keys(2)
    assert len({programs for _, programs in keys(1)}) == 50
    assert tuple(two_shot(3).programs()) not in {programs for _, programs in keys(1)}


@pytest.mark.parametrize("check", ["_check_program", "_check_sizes", "check_hazards", "run"])
def test_each_check_is_needed(check, monkeypatch):
    """With one of its checks taken out, verify lets broken mutants through (or falls over them)."""
    schedules = [ring_allreduce(3), staged_alltoall(3), relayed_broadcast(3)]
    schedules += [s for _, s in then_pairs(3)]
    broken = [mutant for s in schedules for mutant in survey(s, seed=1, limit=60, trials=2).broken]
    monkeypatch.setattr(module, check, lambda *args: None)
    passed = 0
    for mutant in broken:
        try:
            module.verify(mutant)
            passed += 1
        except Exception:
            continue
    assert passed > 0


def test_the_oracle_shows_what_is_wrong():
    found = survey(ring_allreduce(3), seed=1, limit=80).outcomes
    for words in (
        "wait for each other",
        "Arrays are not equal",
        "leaves the buffer",
        "elements",
        "is written to",
    ):
        assert any(words in f for f in found), words
