"""Where ranks are: their GPUs in a topology, and the orders and groups in which neighbours are close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flagcx.algorithms.candidate import Groups, Order
from flagcx.errors import TopologyError

if TYPE_CHECKING:
    from flagcx.topology import Topology

MOST_PLANNED = 64
"""Up to so many ranks two algorithms at once are tried."""
_MOST_ORDERED = 4096
"""Up to so many ranks orders of the ranks are planned."""


def gpus_of(topology: Topology, bus_ids: Sequence[str]) -> list[int] | None:
    """The GPU of each rank, by PCI bus id; None where the topology does not know one, or ranks share one."""
    known = {_plain(g.pci_bus_id): g.index for g in topology.gpus}
    found = [known[_plain(bus_id)] for bus_id in bus_ids if _plain(bus_id) in known]
    return found if len(set(found)) == len(bus_ids) else None


def _plain(bus_id: str) -> str:
    """A bus id in one spelling: NVML writes eight digits of domain, CUDA four; cases differ."""
    return bus_id.lower()[-12:]


def plan_order(topology: Topology, bus_ids: Sequence[str]) -> Order | None:
    """The ranks in the order of the planned ring over their GPUs, which have PCI bus ids, rank 0 first.

    None where the topology says nothing of the ranks: a GPU that it does not know, ranks that share one, or
    fewer than three ranks.
    """
    gpus = gpus_of(topology, bus_ids)
    if gpus is None or len(gpus) < 3:
        return None
    try:
        ranks = _ring(topology, gpus)
    except TopologyError:
        return None
    first = ranks.index(0)
    return ranks[first:] + ranks[:first]


def best_ring(topology: Topology | None, gpus: Sequence[int]) -> Order | None:
    """The ranks along the best ring over their GPUs, where that is another order than by rank."""
    if topology is None or not 2 < len(gpus) <= _MOST_ORDERED:
        return None
    order = _ring(topology, gpus)
    return None if order == tuple(range(len(gpus))) else order


def _ring(topology: Topology, gpus: Sequence[int]) -> Order:
    from flagcx.topology import best_order

    ranks = {gpu: rank for rank, gpu in enumerate(gpus)}
    return tuple(ranks[gpu] for gpu in best_order(topology, gpus))


def best_groups(topology: Topology | None, gpus: Sequence[int]) -> Groups | None:
    """The ranks of each host; on a single host, those that NVLink joins. None if that tells nothing."""
    if topology is None:
        return None
    hosts: dict[int, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        hosts.setdefault(topology.gpu(gpu).host, []).append(rank)
    found = list(hosts.values()) if len(hosts) > 1 else _islands(topology, gpus)
    return tuple(map(tuple, found)) if 1 < len(found) < len(gpus) else None


def _islands(topology: Topology, gpus: Sequence[int]) -> list[list[int]]:
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
