"""Limits on CPU time that hold on slow and busy machines too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_ADDITIONS, _SECONDS = 200_000, 0.010
"""What a loop of so many additions takes on a machine for which limits are given."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails where what is inside takes more CPU time than so many seconds of a machine that is not slow."""
    begin = time.process_time()
    yield
    took = time.process_time() - begin
    assert took < seconds * slowness(), f"{took:.2f} s of CPU"


def slowness() -> float:
    """How many times as long as a machine for which limits are given this one takes by now; at least 1."""
    times = []
    for _ in range(5):
        begin, total = time.process_time(), 0
        for number in range(_ADDITIONS):
            total += number
        times.append(time.process_time() - begin)
    return max(1.0, min(times) / _SECONDS)
