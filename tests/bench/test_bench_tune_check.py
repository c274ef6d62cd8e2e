"""The verdicts of tune_check: what counts as good, as a tie, and as missed."""

from __future__ import annotations

import tune_check

US = 1e-6


def _judged(tuned: list[float], rule: list[float], other: list[float]) -> tune_check.Check:
    times = [[t * US for t in ts] for ts in (tuned, rule, other)]
    return tune_check._judge("allreduce", 2, 1024, ["a", "b", "c"], times, [0, 1])


def test_the_best_is_the_least_median():
    check = _judged([11.0, 10.5, 90.0], [12.4, 12.4, 12.4], [10.0, 10.0, 10.0])
    assert (check.best, check.tuned, check.rule) == ("c", "a", "b")
    assert check.best_us == 10.0 and check.tuned_us == 11.0
    assert check.tuned_good and check.rule_good


def test_too_slow_is_missed_unless_it_cannot_be_told_apart():
    missed = _judged([11.2] * 3, [12.6] * 3, [10.0] * 3)
    assert not missed.tuned_good and not missed.rule_good
    assert "MISSED" in tune_check.format_checks([missed])
    noisy = _judged([9.0, 11.5, 14.0, 9.5], [12.6] * 4, [9.0, 10.0, 10.1, 12.0])
    assert noisy.tuned_tie and noisy.tuned_good
    assert "ok~" in tune_check.format_checks([noisy])


def test_a_candidate_that_left_after_a_round_is_not_the_best():
    check = _judged([10.0] * 7, [11.0] * 7, [9.0])
    assert check.best == "a"


def test_names():
    choice = tune_check.Candidate("ring", 4, "slots")
    assert tune_check._name(choice) == "ring/4/slots"
    assert tune_check._name(tune_check.Candidate("tree")) == "tree"
    assert len(tune_check.SIZES) == 10 and tune_check.SIZES[0] == 256 and tune_check.SIZES[-1] == 256 << 20
