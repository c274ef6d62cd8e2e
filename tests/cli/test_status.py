"""``flagcx status`` of a job that is not there; of jobs that are, see ``tests/diagnosis``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flagcx.cli.status import status
from flagcx.diagnosis import jobs
from flagcx.errors import ArgumentError


def _job(name):
    return SimpleNamespace(name=name, is_called=lambda begin: name.startswith(begin))


@pytest.mark.parametrize(
    ("running", "message"),
    [
        ((), "no job is called 'nojob'; none of this user runs on this host"),
        (("1130-a", "1130-b"), "no job is called 'nojob'; those that run are 1130-a, 1130-b"),
        (("nojob-a", "nojob-b"), "'nojob' is the begin of the names of 2 jobs: nojob-a, nojob-b; give more"),
    ],
)
def test_a_name_that_is_no_job(running, message, monkeypatch):
    monkeypatch.setattr(jobs, "find_jobs", lambda: [_job(name) for name in running])
    with pytest.raises(ArgumentError, match=message):
        status("nojob", as_json=False)
