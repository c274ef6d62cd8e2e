"""How long a process waits, as it ends, for the ranks whose store it runs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from flagcx.bootstrap.serving import Serving


class _Server:
    def __init__(self, ended: bool = False) -> None:
        self.ended, self.did = ended, list[object]()

    def close_when_idle(self) -> None:
        self.did.append("goes on")

    def linger(self, longest_s: float) -> None:
        self.did.append(longest_s)


@pytest.mark.parametrize(
    ("failed", "raised", "hurries", "waits_s"),
    [
        (False, False, False, 300.0),
        (True, False, False, 1.0),
        (False, True, False, 1.0),
        (False, False, True, 1.0),
    ],
)
def test_the_others_are_waited_for_long_only_after_a_good_end(monkeypatch, failed, raised, hurries, waits_s):
    """They may be in calls that need nothing of this rank; after a failure they are only told."""
    if raised:
        monkeypatch.setattr(sys, "last_value", ValueError("mine"), raising=False)
    else:
        monkeypatch.delattr(sys, "last_value", raising=False)
    serving, server, short = Serving(), _Server(), _Server()
    serving.go_on(server, 300.0, failed)
    serving.go_on(short, 0.5, False)
    serving.go_on(None, 300.0)
    if hurries:
        serving.hurry()
    serving.wait()
    serving.wait()
    assert server.did == ["goes on", waits_s]
    assert short.did == ["goes on", 1.0 if raised else 0.5]


def test_stores_that_have_ended_are_forgotten():
    serving, first, second = Serving(), _Server(), _Server()
    serving.go_on(first, 300.0)
    first.ended = True
    serving.go_on(second, 300.0)
    serving.wait()
    assert (first.did, second.did) == (["goes on"], ["goes on", 300.0])


def test_the_wait_comes_after_what_tells_the_others(monkeypatch):
    registered: list[object] = []
    monkeypatch.setattr("flagcx.bootstrap.serving.atexit", SimpleNamespace(register=registered.append))
    serving = Serving()
    serving.arm()
    registered.append("leaves the job")
    serving.arm()
    assert registered == [serving.wait, "leaves the job"]
