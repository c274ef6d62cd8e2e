"""The jobs of this user on this host, whatever started them: their ranks have pages in memory.

Only processes of this user are looked at, and the system lets nobody else (but root) look at their pages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcx.bootstrap.observe import observe
from flagcx.bootstrap.rank_page import NAME, read_page
from flagcx.diagnosis.processes import (
    ancestors,
    cpu_ticks,
    descriptors_called,
    doing,
    number_inside,
    own_processes,
)
from flagcx.diagnosis.recorder import REFRESH, tell
from flagcx.diagnosis.state import RankState, noted_state, state_of

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Shown:
    """A rank's page, and the process that shows it.

    Attributes:
        process: The process, as this one numbers it.
        descriptor: The page, as the process numbers its files.
        page: What the page says.
    """

    process: int
    descriptor: int
    page: Mapping[str, Any]

    def again(self) -> Shown:
        """The same page, read again."""
        page = read_page(f"/proc/{self.process}/fd/{self.descriptor}")
        return self if page is None else Shown(self.process, self.descriptor, page)

    def state(self, activity: str) -> RankState:
        """Where the rank is now; ``activity``: what its process does, in words."""
        return state_of(self.page, self.process, activity)


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one job that are on this host.

    Attributes:
        name: What it is called.
        size: How many ranks it has, on all hosts.
        script: What it runs.
        launcher: What started it: "flagcx", "torchrun", "openmpi", "mpich", "slurm", "threads" or "alone".
        began: When its first rank here called ``fc.init()``, in seconds since 1970.
        ranks: Their pages, in rank order.
        elsewhere: The ranks on other hosts that have no page here.
    """

    name: str
    size: int
    script: str
    launcher: str
    began: float
    ranks: tuple[Shown, ...]
    elsewhere: tuple[int, ...] = ()

    def states(self) -> list[RankState]:
        """Where the ranks are now. Takes a moment, to tell a process that computes from one that sleeps."""
        for shown in self.ranks:
            pipe, inode = shown.page.get("pipe", (-1, 0))
            tell(shown.process, pipe, inode, REFRESH)
        before = {shown.process: cpu_ticks(shown.process) for shown in self.ranks}
        begin = time.monotonic()
        time.sleep(_LOOK_S)
        looked_s = time.monotonic() - begin
        activities = {process: doing(process, ticks, looked_s) for process, ticks in before.items()}
        return [shown.again().state(activities[shown.process]) for shown in self.ranks]

    def states_elsewhere(self) -> list[RankState]:
        """Where ranks on other hosts are, as far as the store knows: ranks that wait long note it there.

        Raises:
            BootstrapError: The store does not answer.
        """
        page = self.ranks[0].page
        if not self.elsewhere:
            return []
        address, key = page["place"]
        found = observe(address, bytes.fromhex(key))
        return [noted_state(rank, page["hosts"][str(rank)], found) for rank in self.elsewhere]

    def is_called(self, text: str) -> bool:
        """Whether ``text`` means this job: the begin of its name, or a process of it or above it."""
        if self.name.startswith(text):
            return True
        if not text.isdecimal():
            return False
        processes = {shown.process for shown in self.ranks}
        above = {number for process in processes for number in ancestors(process) if number > 1}
        return int(text) in processes | above


def find_jobs() -> list[Job]:
    """Finds all jobs, the oldest first."""
    found: dict[str, list[Shown]] = {}
    for process in own_processes():
        for shown in pages_of(process):
            found.setdefault(shown.page["store"], []).append(shown)
    jobs = [_job(ranks) for ranks in found.values()]
    return sorted(jobs, key=lambda job: job.began)


def pages_of(process: int) -> list[Shown]:
    """The pages of a process: its own, not those that it inherited by a fork."""
    inside, pages, seen = number_inside(process), [], set()
    for number in descriptors_called(process, NAME):
        page = read_page(f"/proc/{process}/fd/{number}")
        if page is None or page.get("pid") != inside or "store" not in page:
            continue
        whose = page["store"], page["rank"]
        if whose not in seen:  # a rank that is a thread has the page of its neighbour open too
            seen.add(whose)
            pages.append(Shown(process, number, page))
    return pages


def _job(ranks: Sequence[Shown]) -> Job:
    ranks = sorted(ranks, key=lambda shown: shown.page["rank"])
    pages = [shown.page for shown in ranks]
    name = next((page["job"] for page in pages if page.get("job")), pages[0]["store"])
    first = pages[0]
    began = min(page["began"] for page in pages)
    hosts: Mapping[str, str] = next((page["hosts"] for page in pages if page.get("hosts")), {})
    here = {page["rank"] for page in pages}
    elsewhere = tuple(q for q in map(int, hosts) if hosts[str(q)] != first["host"] and q not in here)
    return Job(name, first["size"], first["script"], first["launcher"], began, tuple(ranks), elsewhere)
