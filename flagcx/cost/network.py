"""Networks: links with a latency and a bandwidth, shared by the messages that go over them at once.

A network numbers its directed links as messages come to need them, and finds for many messages at once which
links each takes. ``uniform`` joins every pair of ranks alike; ``over`` follows a topology.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flagcx.cost.links import Flows, Links
from flagcx.cost.routed import TopologyRoutes
from flagcx.errors import ArgumentError, TopologyError
from flagcx.topology import Topology
from flagcx.topology.routes import Edge


class Network:
    """Links between ranks.

    Args:
        size: Number of ranks.
        find: (source, target) -> Flows, for arrays of ranks. It adds the links that it meets first.
        links: The links.
    """

    def __init__(self, size: int, find: Callable[[np.ndarray, np.ndarray], Flows], links: Links) -> None:
        self.size, self.find, self.links = size, find, links

    @property
    def bandwidth_gb_per_s(self) -> np.ndarray:
        """Of each link, float64 of shape (links,)."""
        return self.links.bandwidth_gb_per_s


def uniform(size: int, latency_us: float, bandwidth_gb_per_s: float, *, ports: bool = False) -> Network:
    """Every rank joined to every other alike.

    Args:
        size: Number of ranks.
        latency_us: One way.
        bandwidth_gb_per_s: In each direction.
        ports: Whether all that a rank sends shares one link, and all that it receives another, as below a
            switch; otherwise each pair of ranks has links of its own, and nothing is shared.

    Raises:
        ArgumentError: A number is out of range.
    """
    if size < 1 or latency_us < 0 or not bandwidth_gb_per_s > 0:
        raise ArgumentError(
            f"a network of {size} ranks with {latency_us} us and {bandwidth_gb_per_s} GB/s; expected at "
            "least one rank, no negative latency and a bandwidth above 0"
        )
    links = Links()
    known: dict[int, int] = {}

    def number(codes: np.ndarray, name: Callable[[int], Edge]) -> np.ndarray:
        found, inverse = np.unique(codes, return_inverse=True)
        fresh = [code for code in found.tolist() if code not in known]
        if fresh:
            first = links.add(len(fresh), "link", lambda n: name(fresh[n]), bandwidth_gb_per_s)
            known.update(zip(fresh, range(first, first + len(fresh)), strict=True))
        return np.array([known[code] for code in found.tolist()], np.int64)[inverse.ravel()]

    def find(source: np.ndarray, target: np.ndarray) -> Flows:
        count = len(source)
        if ports:
            out = number(source, lambda r: (f"rank{r}", "switch"))
            back = number(target + size, lambda r: ("switch", f"rank{r - size}"))
            link = np.stack([out, back], axis=1).ravel()
        else:
            link = number(source * size + target, lambda c: (f"rank{c // size}", f"rank{c % size}"))
        width = 2 if ports else 1
        return Flows(
            np.arange(count + 1) * width, link, np.ones(len(link)), np.full(count, float(latency_us))
        )

    return Network(size, find, links)


def over(topology: Topology, gpus: Sequence[int] | None = None) -> Network:
    """The routes of messages in a topology; see ``flagcx.topology.routes``.

    Args:
        topology: A machine or cluster.
        gpus: The GPU of each rank; all by index by default.

    Raises:
        TopologyError: A GPU is unknown or named twice.
    """
    chosen = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
    if not chosen or len(set(chosen)) < len(chosen):
        raise TopologyError(f"{len(chosen)} ranks on the GPUs {chosen[:16]}; expected one GPU for each rank")
    routes = TopologyRoutes(topology, chosen)
    return Network(len(chosen), routes.find, routes.links)
