"""The candidates for a collective on a topology, with the orders and groups that its links suggest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isqrt

from flagcx.algorithms import AlgorithmEntry, entries, entry
from flagcx.algorithms.candidate import MOST_PIECES, Candidate
from flagcx.topology.graph import Topology
from flagcx.topology.plan import best_order

#: Up to so many ranks an algorithm in which a rank talks to all others at once is a candidate.
MOST_DIRECT = 512
#: Up to so many ranks orders of the ranks are planned, and mixes of two algorithms tried.
MOST_PLANNED = 64
#: No piece is cut smaller: its time would be latency alone.
LEAST_PIECE_NBYTES = 4 << 10
_ALONG_LINKS = ("ring", "chain")
_TO_ALL = ("one_shot", "two_shot", "direct", "pairwise")


def candidates(
    collective: str, size: int, topology: Topology | None = None, gpus: Sequence[int] | None = None
) -> tuple[Candidate, ...]:
    """The candidates for a collective, each with one piece, without mixes.

    Left out are algorithms that do not serve so many ranks, and above ``MOST_DIRECT`` ranks those in which
    each rank talks to all others.

    Args:
        collective: Name of the collective.
        size: Number of ranks.
        topology: Where they run: gives orders and groups. None for ranks that are all alike.
        gpus: The GPU of each rank; the first ones by index by default.

    Raises:
        ArgumentError: There is no such collective.

    Example:
        >>> [str(c.algorithm) for c in candidates("scatter", 4)]
        ['binomial', 'direct']
    """
    chosen = _gpus(topology, size, gpus)
    order = _planned_order(topology, chosen)
    groups = _groups(topology, chosen)
    found: list[Candidate] = []
    for one in entries(collective):
        if one.allows(size) and not (size > MOST_DIRECT and one.algorithm in _TO_ALL):
            found += _forms(one, size, order, groups)
    return tuple(found)


def _forms(one: AlgorithmEntry, size: int, order, groups) -> Iterator[Candidate]:
    plain = Candidate(one.algorithm)
    if not one.grouped:
        yield plain
        if order is not None and one.algorithm in _ALONG_LINKS:
            yield replace(plain, order=order)
    elif groups is not None:
        yield replace(plain, groups=groups)
    elif isqrt(size) > 1:
        yield plain


def _gpus(topology: Topology | None, size: int, gpus: Sequence[int] | None) -> tuple[int, ...]:
    if topology is None:
        return ()
    return tuple(gpu.index for gpu in topology.gpus[:size]) if gpus is None else tuple(gpus)


def _planned_order(topology: Topology | None, gpus: tuple[int, ...]) -> tuple[int, ...] | None:
    """Places of the ranks along the best ring, where it is another than by rank."""
    if topology is None or not 2 < len(gpus) <= MOST_PLANNED:
        return None
    ranks = {gpu: rank for rank, gpu in enumerate(gpus)}
    order = tuple(ranks[gpu] for gpu in best_order(topology, gpus))
    return None if order == tuple(range(len(gpus))) else order


def _groups(topology: Topology | None, gpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Ranks of one host together; on a single host, those that NVLink joins. None if that tells nothing."""
    if topology is None:
        return None
    hosts: dict[int, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        hosts.setdefault(topology.gpu(gpu).host, []).append(rank)
    found = list(hosts.values()) if len(hosts) > 1 else _islands(topology, gpus)
    return tuple(map(tuple, found)) if 1 < len(found) < len(gpus) else None


def _islands(topology: Topology, gpus: tuple[int, ...]) -> list[list[int]]:
    """Ranks whose GPUs the fast fabric joins, directly or over others."""
    ranks = {topology.gpu(gpu).id: rank for rank, gpu in enumerate(gpus)}
    islands: list[list[int]] = []
    left = dict(ranks)
    while left:
        first = next(iter(left))
        seen, front = {first}, [first]
        while front:
            for id, link in topology.links_of(front.pop()).items():
                if link.kind.is_gpu_fabric and id not in seen:
                    seen.add(id)
                    front.append(id)
        islands.append(sorted(left.pop(id) for id in seen & left.keys()))
    return islands


def best_pieces(
    collective: str, candidate: Candidate, steps: int, latency_us: float, time_us: float, nbytes: float
) -> int:
    """How many pieces a pipelined algorithm does best with, a power of two.

    With s steps of a us and b us of bytes each, k pieces take (s + k - 1)(a + b / k), which is least for
    k = sqrt((s - 1) b / a).

    Args:
        collective: Name of the collective.
        candidate: With one piece.
        steps: Its steps.
        latency_us: Its time for no bytes.
        time_us: Its time for the message.
        nbytes: Bytes of the message.

    Example:
        >>> best_pieces("broadcast", Candidate("chain"), 7, 7.0, 1007.0, 1 << 20)
        32
    """
    if not entry(collective, candidate.algorithm).pipelined or candidate.algorithm == "ring":
        return 1
    most = min(MOST_PIECES, int(nbytes // LEAST_PIECE_NBYTES))
    if steps < 2 or most < 2 or latency_us <= 0:
        return 1 if steps < 2 or most < 2 else 1 << (most.bit_length() - 1)
    wanted = ((steps - 1) * (time_us - latency_us) / latency_us) ** 0.5
    pieces = 1
    while pieces * 2 <= most and pieces * 2**0.5 < wanted:
        pieces *= 2
    return pieces
