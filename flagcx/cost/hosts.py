"""The time of collectives over hosts: messages on the hosts' links, and copies through memory inside hosts.

Each host has a link of its own, as fast in either direction, that its ranks share. What a message takes on
it, and inside a host, is measured by length (``HostLinks``). Any schedule is laid over these links, step by
step. A hierarchy whose inner level goes through shared memory is no sequence of steps: its pieces are between
hosts while others are inside them, so it takes as long as the slower level, and the way of one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcx.algorithms import Algorithm
from flagcx.algorithms.candidate import Candidate, Groups
from flagcx.cost.links import Flows, Links
from flagcx.cost.model import LinkLoad, Prediction, predict, rounds
from flagcx.cost.network import Network
from flagcx.cost.simulate import Costs, lay, message_nbytes
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.network import CROSSED
from flagcx.transport.network.crossing import goes_straight
from flagcx.transport.network.pieces import SHORT_NBYTES, stripe_nbytes

_WAITS = 0.5
"""The part of a message's latency that is not hidden behind the data of the piece before."""

Times = tuple[tuple[int, float], ...]
"""Lengths of a message in bytes, rising, and how long one takes in us."""


@dataclass(frozen=True, slots=True)
class HostLinks:
    """What messages between two ranks take, and the speed of a core.

    Attributes:
        between: Of ranks on different hosts.
        inside: Of ranks on one host; those between hosts where each has one rank.
        copy_gb_per_s: Bytes that a core copies a second.
        add_gb_per_s: Bytes that a core adds to others a second.
        cores: Cores of a host.
        signal_us: Until a rank has seen what another one of its host has written, and has begun to work on
            it.
        step_us: What a step of a schedule takes besides its messages.

    Example:
        >>> links = HostLinks.of(0.125, 50.0)
        >>> links.law(links.between, 1 << 20)
        (50.0, 0.125)
    """

    between: Times
    inside: Times
    copy_gb_per_s: float = 5.0
    add_gb_per_s: float = 3.0
    cores: int = 64
    signal_us: float = 15.0
    step_us: float = 0.0

    @classmethod
    def of(cls, bandwidth_gb_per_s: float, latency_us: float) -> HostLinks:
        """Links that are not measured, with one latency and bandwidth for messages of all lengths."""

        def times(latency_us: float, gb_per_s: float) -> Times:
            return tuple((n, latency_us + n / gb_per_s / 1e3) for n in (1 << 10, 1 << 20))

        return cls(times(latency_us, bandwidth_gb_per_s), times(min(latency_us, 20.0), 2.0))

    @staticmethod
    def law(times: Times, nbytes: float) -> tuple[float, float]:
        """The latency in us and the bandwidth in GB/s of messages of about this length.

        The bandwidth is no more than that of the longest messages: some links let short ones pass at once.
        """
        at = next((i for i, (length, _) in enumerate(times) if length >= nbytes), len(times) - 1)
        latency, slope = _line(*times[max(at - 1, 0) : max(at - 1, 0) + 2])
        _, lasting = _line(*times[-2:])
        if slope < lasting:
            slope, latency = lasting, _line(*times[:2])[0]
        return round(latency, 3), round(1e-3 / slope, 6)


def _line(short: tuple[int, float], long: tuple[int, float]) -> tuple[float, float]:
    """The latency in us of messages between two lengths, and their us a byte."""
    slope = max((long[1] - short[1]) / (long[0] - short[0]), 1e-9)
    return max(long[1] - slope * long[0], 0.0), slope


def predict_over_hosts(
    collective: str,
    candidate: Candidate,
    nbytes: int,
    groups: Groups,
    links: HostLinks,
    *,
    shared: bool = True,
    root: int | None = None,
) -> Prediction:
    """What one candidate costs.

    Args:
        collective: Name of the collective.
        candidate: The candidate, placed along the hosts.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        groups: The ranks of each host.
        links: What messages take.
        shared: Whether the ranks of a host share memory.
        root: The root of a rooted collective; 0 by default.
    """
    if root is None and COLLECTIVES[collective].rooted:
        root = 0
    nbytes = 0 if collective == "barrier" else nbytes
    crowd = max(1.0, max(map(len, groups)) / links.cores)
    through_memory = shared and collective in CROSSED and candidate.algorithm == Algorithm.HIERARCHICAL
    if through_memory and candidate.other is None:
        return _pipelined(collective, candidate, nbytes, groups, links, crowd)
    size = sum(map(len, groups))
    traffic = rounds(collective, candidate, size, root)
    piece = message_nbytes(collective, size, nbytes) / max(traffic.chunks, 1)
    costs = Costs(
        reduce_gb_per_s=links.add_gb_per_s / crowd,
        copy_gb_per_s=links.copy_gb_per_s / crowd,
    )
    return predict(candidate, lay(traffic, _network(groups, links, piece)), nbytes, costs)


def _network(groups: Groups, links: HostLinks, piece: float) -> Network:
    """For each host its link in both directions and its memory, as messages of about one length find them."""
    (far_us, far_speed), (near_us, near_speed) = (
        links.law(times, piece) for times in (links.between, links.inside)
    )
    count = len(groups)
    host_of = np.empty(sum(map(len, groups)), np.int64)
    for number, group in enumerate(groups):
        host_of[list(group)] = number
    found = Links()
    found.add(count, "network", lambda host: (f"host{host}", "switch"), far_speed)
    found.add(count, "network", lambda host: ("switch", f"host{host}"), far_speed)
    found.add(count, "memory", lambda host: (f"host{host}", f"host{host}"), near_speed)

    def find(source: np.ndarray, target: np.ndarray) -> Flows:
        here, there = host_of[source], host_of[target]
        inside = here == there
        ends = np.cumsum(np.where(inside, 1, 2))
        link = np.concatenate(
            [[2 * count + a] if a == b else [a, count + b] for a, b in zip(here, there, strict=True)] or [[]]
        ).astype(np.int64)
        latency = np.where(inside, near_us, far_us) + links.step_us
        return Flows(np.concatenate([[0], ends]), link, np.ones(len(link)), latency)

    return Network(len(host_of), find, found)


def _pipelined(
    collective: str, candidate: Candidate, nbytes: int, groups: Groups, links: HostLinks, crowd: float
) -> Prediction:
    """A hierarchy whose inner level goes through memory: see ``flagcx.transport.network.hierarchy``."""
    kind, size, hosts = COLLECTIVES[collective], sum(map(len, groups)), len(groups)
    whole = message_nbytes(collective, size, nbytes)
    short = whole <= SHORT_NBYTES
    lanes, largest = 1 if short else min(map(len, groups)), max(map(len, groups))
    runs = lanes * (hosts if kind.blocks else 1)
    pieces = max(-(-int(whole) // (runs * stripe_nbytes(int(whole), runs))), 1)
    message = whole / pieces / runs
    latency_us, speed = links.law(links.between, message)
    crossing, steps = _crossing(collective, groups, short)
    carried_us = crossing * whole / speed / 1e3
    inside_us = _inside_us(collective, whole, size, largest, lanes, links) * crowd
    signals_us = 2 * links.signal_us * crowd * (largest > 1)
    least_us = steps * links.law(links.between, 0)[0] + signals_us
    filling_us = inside_us / pieces + steps * latency_us + signals_us
    longer_us = max(carried_us + (pieces - 1) * latency_us * _WAITS, inside_us)
    time_us = longer_us + filling_us if whole else least_us
    busy = min(carried_us / max(time_us, 1e-9), 1.0)
    load = LinkLoad("host0", "switch", "network", speed, crossing * whole, busy)
    return Prediction(candidate, time_us, least_us, steps + 2 * (largest > 1), crossing * whole / lanes, load)


def _crossing(collective: str, groups: Sequence[Sequence[int]], short: bool) -> tuple[float, int]:
    """The part of the message that the busiest link carries in one direction, and the steps between hosts."""
    hosts, size = len(groups), sum(map(len, groups))
    if collective in ("allgather", "reduce_scatter"):
        parts = [len(group) / size for group in groups]
        return max(max((hosts - 1) * part, 1 - part) for part in parts), 1
    straight = goes_straight(hosts, short)
    if collective == "allreduce":
        return (float(hosts - 1), 1) if straight else (2 * (hosts - 1) / hosts, 2 * (hosts - 1).bit_length())
    return (float(hosts - 1), 1) if short else (1.0, hosts - 1)


def _inside_us(collective: str, whole: float, size: int, largest: int, lanes: int, links: HostLinks) -> float:
    """What one rank copies and adds up of the message."""
    kind = COLLECTIVES[collective]
    given = 1 / size if kind.before == "each" else 1.0
    taken = 1 / size if kind.after == "each" else 1.0
    added = 0.0
    if kind.reduces:
        given *= 1 - 1 / lanes
        added = largest / lanes if largest > 1 or collective != "broadcast" else 0.0
    if largest == 1:
        given = taken = 0.0
    return whole * ((given + taken) / links.copy_gb_per_s + added / links.add_gb_per_s) / 1e3
