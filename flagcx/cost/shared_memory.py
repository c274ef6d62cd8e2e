"""The time of collectives between processes of one host: copies through shared memory, by cores.

A message in slots is written by one core and read by another, so its bytes cross the memory twice; with
cross-memory attach one core copies them once. Ranks that outnumber the cores take turns: then they share the
cores' speed, and a step takes longer, since a rank that others wait for may have to wait for a core.

The constants are fitted to what ``flagcx tune`` measured on one machine (``python bench/host_fit.py``). They
rank candidates and show what a call is made of; for the times of another machine, measure there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flagcx.algorithms import build
from flagcx.algorithms.candidate import Candidate
from flagcx.cost.links import Flows, Links
from flagcx.cost.model import Prediction, predict
from flagcx.cost.network import Network
from flagcx.cost.simulate import Costs, lay, message_nbytes
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Schedule
from flagcx.schedule.traffic import Rounds, rounds_of

MOST_RANKS = 64
"""Up to so many ranks the model is asked: a host has no more."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What a call costs between processes of one host.

    Attributes:
        call_us: Once a call.
        step_us: A step: a flag is written, seen and waited for.
        shot_us: A step of an all-reduce by one_shot or two_shot, which have code of their own.
        message_us: Each peer that a rank sends to in a step beyond the first.
        attach_us: A message by cross-memory attach: a call into the system.
        crowded_us: More for a step where ranks outnumber the cores, for each rank more than one a core.
        copy_gb_per_s: Bytes a core copies a second, from memory to memory.
        cached_gb_per_s: Likewise in its cache.
        cache_nbytes: Messages up to this length stay in the cache.
        add_gb_per_s: Bytes a core adds to others a second.
        memory_gb_per_s: Bytes that all cores together copy a second.
    """

    call_us: float
    step_us: float
    shot_us: float
    message_us: float
    attach_us: float
    crowded_us: float
    copy_gb_per_s: float
    cached_gb_per_s: float
    cache_nbytes: float
    add_gb_per_s: float
    memory_gb_per_s: float


#: Fitted on 2 cores of a virtual Xeon with 2 MiB of level-2 cache each, with 2 and 4 ranks.
HOST_COSTS = HostCosts(
    call_us=0.5,
    step_us=13.6,
    shot_us=2.03,
    message_us=23.3,
    attach_us=17.3,
    crowded_us=28.6,
    copy_gb_per_s=9.53,
    cached_gb_per_s=13.4,
    cache_nbytes=259_000,
    add_gb_per_s=19.2,
    memory_gb_per_s=11.3,
)


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def predict_on_host(
    collective: str,
    candidate: Candidate,
    nbytes: int,
    size: int,
    *,
    cores: int | None = None,
    attached: bool = True,
    root: int | None = None,
    costs: HostCosts = HOST_COSTS,
) -> Prediction:
    """What one candidate costs.

    Args:
        collective: Name of the collective.
        candidate: The candidate.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        size: Number of ranks.
        cores: Cores that the ranks share; those of this process by default.
        attached: Whether ranks may read each other's private memory.
        root: The root of a rooted collective; 0 by default.
        costs: What a call costs.
    """
    if root is None and COLLECTIVES[collective].rooted:
        root = 0
    rounds = _rounds(build(collective, candidate.algorithm, size, root, candidate.pieces_at(nbytes)))
    cores = cores or count_cores()
    once = attached and candidate.protocol == "cross_memory"
    cached = message_nbytes(collective, size, nbytes) <= costs.cache_nbytes
    network = _host_network(size, cores, once, cached, costs)
    crowd = max(1.0, size / cores)
    shot = collective == "allreduce" and candidate.algorithm in ("one_shot", "two_shot")
    laid = lay(rounds, network)
    costs_of_call = Costs(
        call_us=costs.call_us,
        step_us=(costs.shot_us if shot else costs.step_us) + costs.crowded_us * (crowd - 1),
        message_us=0.0 if shot else costs.message_us,
        reduce_gb_per_s=costs.add_gb_per_s / crowd,
        copy_gb_per_s=(costs.cached_gb_per_s if cached else costs.copy_gb_per_s) / crowd,
    )
    return predict(candidate, laid, nbytes, costs_of_call)


@lru_cache(maxsize=256)
def _rounds(schedule: Schedule) -> Rounds:
    return rounds_of(schedule)


def _host_network(size: int, cores: int, once: bool, cached: bool, costs: HostCosts) -> Network:
    """A link for each rank's core, one for all cores where ranks share them, and one for the memory."""
    copy = costs.cached_gb_per_s if cached else costs.copy_gb_per_s
    links = Links()
    links.add(size, "core", lambda rank: (f"rank{rank}", "memory"), copy)
    links.add(1, "cores", lambda _: ("ranks", "cores"), copy * min(cores, size))
    links.add(1, "memory", lambda _: ("cores", "memory"), np.inf if cached else costs.memory_gb_per_s)
    latency = costs.attach_us if once else 0.0

    def find(source: np.ndarray, target: np.ndarray) -> Flows:
        count, copies = len(source), 1 if once else 2
        columns = [target] if once else [source, target]
        columns += [np.full(count, size), np.full(count, size + 1)]
        shares = [1.0] * copies + [float(copies), float(copies)]
        width = len(columns)
        return Flows(
            np.arange(count + 1) * width,
            np.stack(columns, axis=1).ravel(),
            np.tile(shares, count),
            np.full(count, latency),
        )

    return Network(size, find, links)
