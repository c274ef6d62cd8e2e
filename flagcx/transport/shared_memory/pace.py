"""What it costs this rank to write memory that another core has read, which decides how messages travel.

Cores that share a cache pass lines on at some 40 GB/s; between two dies or sockets a core that writes lines
which the other holds waits for each of them, at 2 GB/s. Slots are written by one rank and read by another
all the time; by cross-memory attach each rank writes little but its own arrays. The cores of a virtual
machine move about, within seconds, so this is measured while the job runs and kept nowhere; by the
processor's time, since another process may take the core in the middle of a write.
"""

from __future__ import annotations

from time import thread_time_ns as now

import numpy as np

_SLOW_GB_PER_S = 5.0
_SURELY = 2
"""So many slow writes one after the other are no accident; a quick one never is."""
_OFTEN, _SELDOM = 4, 32
"""The first calls probe, then one in so many."""
PROBE_NBYTES = 64 << 10
"""What a probe writes, where slots are no smaller."""


class Pace:
    """The pace of one rank's writes.

    Args:
        mine: Memory of this rank that a neighbour reads.
        theirs: Memory of a neighbour that this rank reads.

    Attributes:
        slow: Whether writes are slow; supposed until one was quick.
    """

    def __init__(self, mine: np.ndarray, theirs: np.ndarray) -> None:
        self._mine, self._theirs, self._own = mine, theirs, np.zeros(len(mine), mine.dtype)
        self._slow_writes = _SURELY
        self._calls, self.slow = 0, True

    def note(self, nbytes: int, elapsed_ns: int) -> None:
        """Takes down a write of ``nbytes`` bytes into slots."""
        self._slow_writes = self._slow_writes + 1 if nbytes < _SLOW_GB_PER_S * elapsed_ns else 0
        self.slow = self._slow_writes >= _SURELY

    def is_due(self) -> bool:
        """Whether to probe in the next call; all ranks count the same calls."""
        self._calls = calls = self._calls + 1
        return calls <= _OFTEN or not calls % _SELDOM

    def write(self) -> None:
        """Writes what the neighbour has read in the probe before."""
        begin = now()
        self._mine[...] = self._own
        self.note(len(self._own), now() - begin)

    def read(self) -> None:
        """Reads what the neighbour has written."""
        self._own[...] = self._theirs

    def close(self) -> None:
        """Lets go of the memory."""
        self._mine = self._theirs = self._own
