"""Schedules along the links of the machine: rings, chains and trees whose neighbours are close."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from flagcx.algorithms import Algorithm, build
from flagcx.errors import ArgumentError, TopologyError
from flagcx.schedule.compose import beside, relabel
from flagcx.schedule.model import Schedule
from flagcx.selection.split_message import Mix, mix_of

if TYPE_CHECKING:
    from flagcx.topology import Topology

Order = tuple[int, ...]
FOLLOWS_ORDER = (
    Algorithm.RING,
    Algorithm.CHAIN,
    Algorithm.TREE,
    Algorithm.BINOMIAL,
    Algorithm.DOUBLE_BINARY_TREE,
)
"""The algorithms in which most messages go between neighbours in rank order."""


@lru_cache(maxsize=1024)
def build_along(
    order: Order | None, collective: str, algorithm: str, size: int, root: int | None, pieces: int
) -> Schedule:
    """Builds a schedule whose neighbours are neighbours in ``order``.

    Args:
        order: The ranks in the order that the topology plans, or None where all are equally close.
        collective: Name of the collective.
        algorithm: Name of the algorithm, or of a mix; see ``flagcx.selection.split_message``.
        size: Number of ranks.
        root: The root, or None.
        pieces: Pieces that each block is cut into.
    """
    mix = mix_of(collective, algorithm)
    if mix is not None:
        if pieces != 1:
            raise ArgumentError(f"algorithm={algorithm!r} is a mix, which has no pieces, got pieces={pieces}")
        return _beside(mix, order, collective, size, root)
    if order is None or str(algorithm) not in {str(a) for a in FOLLOWS_ORDER}:
        return build(collective, algorithm, size, root, pieces)
    place = None if root is None else order.index(root)
    return relabel(build(collective, algorithm, size, place, pieces), order, algorithm=str(algorithm))


def _beside(mix: Mix, order: Order | None, collective: str, size: int, root: int | None) -> Schedule:
    """Both algorithms of a mix; one beside itself goes the other way."""
    one = build_along(order, collective, mix.first, size, root, 1)
    back = order
    if mix.first == mix.second:
        back = (order or tuple(range(size)))[::-1]
    return beside(
        one, build_along(back, collective, mix.second, size, root, 1), mix.share, algorithm=mix.name
    )


def gpus_of(topology: Topology, bus_ids: Sequence[str]) -> list[int] | None:
    """The GPU of each rank in a topology; None where it does not know one, or ranks share one.

    Args:
        topology: The machine.
        bus_ids: The PCI bus id of each rank's GPU.
    """
    known = {_plain(g.pci_bus_id): g.index for g in topology.gpus}
    found = [known[_plain(bus_id)] for bus_id in bus_ids if _plain(bus_id) in known]
    return found if len(set(found)) == len(bus_ids) else None


def plan_order(topology: Topology, bus_ids: Sequence[str]) -> Order | None:
    """The ranks in the order of the planned ring over their GPUs, rank 0 first.

    Args:
        topology: The machine.
        bus_ids: The PCI bus id of each rank's GPU.

    Returns:
        None where the topology says nothing of the ranks: a GPU that it does not know, ranks that share
        one, or fewer than three ranks.
    """
    from flagcx.topology import best_order

    gpus = gpus_of(topology, bus_ids)
    if gpus is None or len(gpus) < 3:
        return None
    try:
        order = best_order(topology, gpus)
    except TopologyError:
        return None
    ranks = [gpus.index(gpu) for gpu in order]
    first = ranks.index(0)
    return tuple(ranks[first:] + ranks[:first])


def _plain(bus_id: str) -> str:
    """A bus id in one spelling: NVML writes eight digits of domain, CUDA four; cases differ."""
    return bus_id.lower()[-12:]
