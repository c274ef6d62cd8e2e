"""The order of the ranks along the links of the machine, so that neighbours are close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flagcx.algorithms.candidate import Order
from flagcx.errors import TopologyError

if TYPE_CHECKING:
    from flagcx.topology import Topology


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
