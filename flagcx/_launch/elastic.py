"""A job that outlives its ranks: the launcher starts lost ranks again, or lets the others go on without them.

::

    rank 2 is killed      the launcher tells the store that rank 2 will be back, and starts it
    ranks 0 1 3           their calls raise PeerDiedError or AbortedError; they call fc.init() again
    ranks 0 1 2 3         fc.init() returns on all of them, when the last has come: a new generation

After ``max_restarts`` a lost rank stays away: fc.init() gives those that are left a communicator of their
own, as long as there are ``min_ranks`` of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from flagcx._launch.failure import Exit
from flagcx._launch.interrupts import held_back
from flagcx._launch.output import RankOutput, Tail
from flagcx._launch.ranks import Ranks
from flagcx.bootstrap.store_server import StoreServer


class ElasticRanks(Ranks):
    """The processes of a job's ranks on this host, of which lost ones are started again; see ``Ranks``.

    Args:
        arguments: Those of ``Ranks``.
        min_ranks: With how many ranks the job may go on.
        max_restarts: How many times ranks are started again, all together.
        options: Those of ``Ranks``.
    """

    def __init__(self, *arguments: Any, min_ranks: int, max_restarts: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._min_ranks, self._max_restarts = min_ranks, max_restarts
        self._restarts = [0] * self.size
        self._failed = False

    def _make_server(self) -> StoreServer:
        return StoreServer(self.size, elastic=True)

    def _react(self, ended: Exit) -> None:
        """Starts a rank that failed again, lets the others go on without it, or ends the job."""
        rank, how = ended.rank, ended.describe()
        if ended.code == 0 or self._planned:
            super()._react(ended)
        elif (done := sum(self._restarts)) < self._max_restarts:
            which = f"restart {done + 1} of {self._max_restarts}"
            self._output.say(f"rank {rank} is started again ({how}; {which})")
            self._restart(rank, f"its process ended: {how}")
        elif len(self.running()) >= max(self._min_ranks, 1):
            left = len(self.running())
            self._output.say(f"rank {rank} is lost ({how}), and the other {left} go on: no restart is left")
            if self._server is not None:
                self._server.rank_ended(rank, f"its process ended: {how}")
        else:
            self._failed = True
            super()._react(ended)
            self._plan(signal.SIGTERM, 0.0)  # too few are left to go on

    def _react_to_failure(self, rank: int) -> None:
        """The others wait for this rank: its process ends, so that it is started again."""
        self.signal_rank(rank, signal.SIGKILL)

    def _restart(self, rank: int, how: str) -> None:
        if self._server is not None:
            self._server.rank_restarts(rank, how)
        with contextlib.suppress(ProcessLookupError):  # what the lost process had started goes with it
            os.killpg(self._processes[rank].pid, signal.SIGKILL)
        self._drain(rank)
        with held_back():
            os.close(self._guards[rank])
            if (pidfd := self._pidfds[rank]) is not None:
                os.close(pidfd)
            self._restarts[rank] += 1
            self.tails[rank] = Tail()
            del self.exits[rank]
            # Not the terminal itself, which rank 0 may have had.
            streams = RankOutput.streams(self._output, rank)
            self._start_rank(rank, streams, FLAGCX_RESTARTS=str(self._restarts[rank]))

    def first_failure(self) -> Exit | None:
        """The exit to blame, if the job failed; it did not if it went on without the ranks that failed."""
        return super().first_failure() if self._failed else None
