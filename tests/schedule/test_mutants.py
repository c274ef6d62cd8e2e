"""verify rejects every mutant that the oracle finds broken; and without one of its checks it does not."""

from __future__ import annotations

import pytest

from flagcx.schedule import verify as module
from flagcx.schedule.compose import beside, relabel
from tests.execute import Broken, execute, outcome
from tests.mutants import mutants, mutations, survey
from tests.schedule.samples import (
    all_samples,
    one_shot,
    relayed_broadcast,
    ring_allreduce,
    staged_alltoall,
    two_shot,
)
from tests.schedule.test_compose import then_pairs


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_no_broken_mutant_passes(n):
    broken = 0
    for schedule in all_samples(n):
        found = survey(schedule, seed=n, limit=40, trials=3)
        assert not found.survivors, (schedule, found.survivors)
        broken += found.broken
    assert broken > 300


def test_no_broken_mutant_of_a_composition_passes():
    wholes = [schedule for _, schedule in then_pairs(4)]
    wholes += [beside(ring_allreduce(4), two_shot(4), 0.3), relabel(two_shot(4), [2, 0, 3, 1])]
    wholes += [beside(wholes[2], relabel(wholes[2], [3, 2, 1, 0]))]
    for schedule in wholes:
        found = survey(schedule, seed=7, limit=50, trials=3)
        assert not found.survivors, (schedule, found.survivors)
        assert found.broken > 20


def test_messages_of_rejections_name_a_rank():
    found = survey(ring_allreduce(4), seed=3, limit=80, trials=1)
    assert all("rank " in message for message in found.messages.values())
    kinds = [
        "deadlock",
        "without its match",
        "ends wrong",
        "never written",
        "lands in it at any time",
        "leaves its",
    ]
    for kind in kinds:
        assert any(kind in message for message in found.messages.values()), kind


def test_mutations_are_different_and_follow_from_the_seed():
    def keys(seed: int) -> list:
        return [(d, tuple(m.programs())) for d, m in mutations(two_shot(3), seed, 50)]

    assert keys(1) == keys(1)
    assert keys(1) != keys(2)
    assert len({programs for _, programs in keys(1)}) == 50
    assert tuple(two_shot(3).programs()) not in {programs for _, programs in keys(1)}


def test_mutants_are_the_broken_ones():
    original = one_shot(3)
    broken = dict(mutants(original, seed=5, limit=40))
    assert 20 < len(broken) < 40
    assert all(outcome(m, seed=5) is not None for m in broken.values())


@pytest.mark.parametrize("check", ["_check_program", "_check_sizes", "check_hazards", "run"])
def test_each_check_is_needed(check, monkeypatch):
    """With one of its checks taken out, verify lets broken mutants through (or falls over them)."""
    monkeypatch.setattr(module, check, lambda *args: None)
    passed = 0
    schedules = [ring_allreduce(3), staged_alltoall(3), relayed_broadcast(3)]
    for schedule in schedules + [s for _, s in then_pairs(3)]:
        for _, mutant in mutants(schedule, seed=1, limit=60, trials=2):
            try:
                module.verify(mutant)
                passed += 1
            except Exception:
                continue
    assert passed > 0


def test_executor_shows_what_is_wrong():
    found = {outcome(m, seed=1) for _, m in mutants(ring_allreduce(3), seed=1, limit=80)}
    for words in ("hang", "wrong OUTPUT", "leaves its", "no peer", "elements"):
        assert any(words in f for f in found), words
    with pytest.raises(Broken, match="wrong OUTPUT"):
        execute(
            next(m for d, m in mutants(one_shot(2), 3, 60) if "doubled Reduce" in d), in_place=False, seed=0
        )
