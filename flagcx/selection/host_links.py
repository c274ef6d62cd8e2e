"""Measures, in a tenth of a second, what messages take between hosts and inside them; see ``cost.hosts``.

One rank of each of two hosts send each other messages, longer ones as long as these are quick; then two ranks
of one host. Then all make short calls: what these take beyond their messages is what a step takes, and what
ranks of one host need to see each other's signals. All ranks get the same table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from flagcx.algorithms.candidate import Candidate, Groups
from flagcx.cost.hosts import HostLinks, Times, predict_over_hosts
from flagcx.cost.shared_memory import count_cores
from flagcx.dtypes import OPS, dtype_of
from flagcx.selection.table import machine_here
from flagcx.transport.base import Call, Transport

_NBYTES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 2 << 20)
_LEAST, _ROUNDS, _COUNT = 2, 8, 1 << 18
_SHORT_NBYTES, _SHORT_ROUNDS = 8 << 10, 40
"""Short messages cost little, and on a busy host most of them wait for a core."""
_ENOUGH_US, _LONG_US = 60_000.0, 30_000.0
"""No round begins after so long with messages of one length, and no longer ones follow any that take so long.

Shorter times may be those of a rank that waited for a core, or of a burst that a limit on the link lets pass.
"""
_FEW, _WARM, _CALLS = 64, 2, 5


def measure_host_links(
    transport: Transport, groups: Groups, exchange: Callable[[str, bytes], Sequence[bytes]]
) -> HostLinks:
    """What messages take between the ranks of a communicator. All ranks call it together.

    Args:
        transport: Carries them.
        groups: The ranks of each host, several.
        exchange: Sends bytes to all ranks and returns every rank's, in rank order; takes a name first.
    """
    here = next((group for group in groups if len(group) > 1), None)
    pairs = [(groups[0][0], groups[1][0])] + ([] if here is None else [(here[0], here[1])])
    measured = [_ping(transport, *pair) if transport.rank in pair else () for pair in pairs]
    links = HostLinks(measured[0], measured[-1], _speed(np.copyto), _speed(np.add), count_cores())
    told = [json.loads(raw) for raw in exchange("links", json.dumps(astuple(links)).encode())]
    between, inside = (told[first][number] for number, first in enumerate((pairs[0][0], pairs[-1][0])))
    links = HostLinks(_times(between), _times(inside), *told[0][2:5])
    tried = ("recursive_doubling", *(["hierarchical"] if transport.shares_memory else []))
    mine = [_beyond_us(name, transport, groups, links) for name in tried]
    told = [json.loads(raw) for raw in exchange("calls", json.dumps(mine).encode())]
    steps, *signals = np.max(told, axis=0).tolist()
    return replace(links, step_us=steps, signal_us=signals[0] if signals else links.signal_us)


def describe_hosts(
    groups: Groups, links: HostLinks, exchange: Callable[[str, bytes], Sequence[bytes]]
) -> dict[str, Any]:
    """What a table of measured times must fit on these hosts; see ``Fit.hosts``. All ranks call it together.

    Args:
        groups: The ranks of each host.
        links: What messages take.
        exchange: As for ``measure_host_links``.
    """
    told = exchange("machines", json.dumps(machine_here()).encode())
    latency_us, bandwidth = links.between[0][1], links.law(links.between, links.between[-1][0])[1]
    return {
        "groups": [[*group] for group in groups],
        "machines": [json.loads(told[group[0]]) for group in groups],
        "latency_us": latency_us,
        "bandwidth_gb_per_s": bandwidth,
    }


def _beyond_us(algorithm: str, transport: Transport, groups: Groups, links: HostLinks) -> float:
    """What a short all-reduce takes beyond its messages, for each of its steps or signals; on this rank."""
    order = tuple(rank for group in groups for rank in group)
    candidate = Candidate(algorithm).along(order, groups)
    schedule = candidate.build("allreduce", len(order), None)
    x = np.zeros(_FEW, np.float32)
    call = Call(schedule, transport.rank, x.size, dtype_of(x.dtype), OPS["sum"], True)
    plan, took = transport.compile(call), list[float]()
    for _ in range(_WARM + _CALLS):
        start = perf_counter()
        plan.run(x, x)
        took.append((perf_counter() - start) * 1e6)
    alone = replace(links, signal_us=0.0)
    shared = transport.shares_memory
    model = predict_over_hosts("allreduce", candidate, x.nbytes, groups, alone, shared=shared)
    crowd = max(1.0, max(map(len, groups)) / links.cores) if algorithm == "hierarchical" else 1.0
    parts = 2 * crowd if algorithm == "hierarchical" else max(model.steps, 1)
    return round(max(median(took[_WARM:]) - model.time_us, 0.0) / parts, 1)


def _times(rows: Sequence[Sequence[float]]) -> Times:
    return tuple((int(nbytes), time_us) for nbytes, time_us in rows)


def _ping(transport: Transport, first: int, second: int) -> Times:
    """Times of messages between two ranks, which both call this; the second one gets no times."""
    leads = transport.rank == first
    peer, found = second if leads else first, list[tuple[int, float]]()
    for nbytes in (_NBYTES[0], *_NBYTES):  # the first messages connect the ranks
        x, least_us, spent_us, rounds, going = np.zeros(nbytes, np.uint8), np.inf, 0.0, 0, True
        most = _SHORT_ROUNDS if nbytes <= _SHORT_NBYTES else _ROUNDS
        while going:
            start, rounds = perf_counter(), rounds + 1
            for sends in (leads, not leads):
                transport.transfer([(x, peer)] if sends else [], [] if sends else [(x, peer)])
            took_us = (perf_counter() - start) * 1e6
            least_us, spent_us = min(least_us, took_us / 2), spent_us + took_us
            going = _told(transport, leads, peer, rounds < most and spent_us < _ENOUGH_US)
        found.append((nbytes, round(least_us, 1)))
        if len(found) > _LEAST and not _told(transport, leads, peer, least_us < _LONG_US):
            break
    return tuple(found[1:])


def _told(transport: Transport, leads: bool, peer: int, value: bool) -> bool:
    """What the first rank says."""
    word = np.array([value])
    transport.transfer([(word, peer)] if leads else [], [] if leads else [(word, peer)])
    return bool(word[0])


def _speed(work: np.ufunc | Callable) -> float:
    """GB/s at which this core copies, or adds up, 1 MiB."""
    x, y, least = np.ones(_COUNT, np.float32), np.ones(_COUNT, np.float32), np.inf
    for _ in range(_ROUNDS):
        start = perf_counter()
        work(x, y, y) if isinstance(work, np.ufunc) else work(y, x)
        least = min(least, perf_counter() - start)
    return round(x.nbytes / least / 1e9, 3)
