"""Small changes to every algorithm: what breaks it, ``verify`` rejects."""

from __future__ import annotations

import pytest

from flagcx.algorithms import catalogue
from tests.algorithms.test_verified import names
from tests.mutants import survey


@pytest.mark.parametrize("entry", catalogue(), ids=names)
def test_verify_rejects_what_is_broken(entry):
    schedule = entry.make(6, 4 if entry.rooted else None, 2 if entry.pipelined else 1)
    found = survey(schedule, seed=3, limit=40, trials=3, uneven=entry.uneven)
    assert not found.survivors
    assert len(found.broken) >= 15, f"only {len(found.broken)} of the changes broke anything"
