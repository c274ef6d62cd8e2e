"""Schedules along the links of the machine: rings, chains and trees whose neighbours are close."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from flagcx.algorithms import Algorithm, build
from flagcx.bootstrap.store import Store
from flagcx.errors import FlagcxError, TopologyError
from flagcx.schedule.compose import relabel
from flagcx.schedule.model import Schedule

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
        algorithm: Name of the algorithm.
        size: Number of ranks.
        root: The root, or None.
        pieces: Pieces that each block is cut into.
    """
    if order is None or str(algorithm) not in {str(a) for a in FOLLOWS_ORDER}:
        return build(collective, algorithm, size, root, pieces)
    place = None if root is None else order.index(root)
    return relabel(build(collective, algorithm, size, place, pieces), order, algorithm=str(algorithm))


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

    gpus = {_plain(g.pci_bus_id): g.index for g in topology.gpus}
    numbers = [gpus.get(_plain(bus_id)) for bus_id in bus_ids]
    known = [gpu for gpu in numbers if gpu is not None]
    if len(known) < 3 or len(set(known)) < len(numbers):
        return None
    try:
        order = best_order(topology, known)
    except TopologyError:
        return None
    ranks = [known.index(gpu) for gpu in order]
    first = ranks.index(0)
    return tuple(ranks[first:] + ranks[:first])


def agree_on_order(
    store: Store, detect: Callable[[], Topology], bus_ids: Sequence[str], timeout_s: float
) -> Order | None:
    """Rank 0 looks at the machine and plans; all ranks take its order, so that they run one schedule."""
    order = None
    if store.rank == 0:
        with contextlib.suppress(FlagcxError):  # a machine that cannot be read has no order
            order = plan_order(detect(), bus_ids)
    told = store.exchange("planned order", json.dumps(order).encode(), timeout_s)[0]
    agreed = json.loads(told)
    return None if agreed is None else tuple(agreed)


def _plain(bus_id: str) -> str:
    """A bus id in one spelling: NVML writes eight digits of domain, CUDA four; cases differ."""
    return bus_id.lower()[-12:]
