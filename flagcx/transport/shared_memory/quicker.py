"""Which of two ways is quicker on the cores that the ranks have: measured while the job runs.

Cores that share a cache pass lines on at some 40 GB/s; between two dies or sockets a core that writes lines
which the other holds waits for each of them, at 2 GB/s. Slots are written by one rank and read by another
all the time; by cross-memory attach each rank writes little but its own arrays, and calls the system instead.
The cores of a virtual machine move about, within seconds, so what was measured is forgotten soon.
"""

from __future__ import annotations

_IN_TURNS, _SELDOM = 12, 32
"""So many calls take the two ways in turns; then one in so many takes the other way."""
_FORGOTTEN = 1.05
"""The least time that a way took grows by so much with each further call that takes it."""


class QuickerOfTwo:
    """The quicker of two ways for the calls of one plan, 0 or 1."""

    def __init__(self) -> None:
        self._calls = self._best = 0
        self._least_ns: list[float] = [0.0, 0.0]

    def next(self) -> int:
        """The way of the call after this one."""
        self._calls = calls = self._calls + 1
        if calls <= _IN_TURNS:
            return calls & 1
        return self._best if calls % _SELDOM else 1 - self._best

    def note(self, way: int, elapsed_ns: float) -> None:
        """Takes down what a call took. The least counts: first calls take pages, and peers come late."""
        least = self._least_ns
        least[way] = min(elapsed_ns, least[way] * _FORGOTTEN or elapsed_ns)
        self._best = int(0 < least[1] < least[0])
