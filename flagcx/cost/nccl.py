"""The time of NCCL's (or RCCL's) own all-reduce: closed forms over a topology, with fitted constants.

NCCL chooses among its algorithms itself; the model takes the least of

* a ring over all ranks, 2(n-1) steps;
* two levels, 2(g-1) steps in a host of g ranks and 2 log2 h between h hosts;
* in-switch reduction (NVLS) within a host of H100 or newer behind NVSwitches, 4 steps, where each GPU sends
  the message and a share of the result.

With L us of steps and b us of bytes, a pipeline cut as well as can be takes L + b + 2 sqrt(L b): that is
(s + k - 1)(a + b/k) at its best k. The last term is what makes messages of middle size slow, and its factor
is fitted. Constants are of the kinds of links, not of machines. A call costs ``base`` besides; replayed as
part of a CUDA graph, where nothing is launched from the host, ``replayed``.

Source: the form is that of NCCL's own tuning (``graph/tuning.cc``): latency by kind of link and number of
steps, bandwidth by the plan times an efficiency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log2
from types import MappingProxyType

import numpy as np

from flagcx.cost import peer_memory
from flagcx.cost.model import Prediction
from flagcx.cost.peer_memory import NATIVE, GpuLinks
from flagcx.topology import DeviceKind, LinkKind, Topology, best_order
from flagcx.topology.nccl_bandwidth import nccl_bandwidth
from flagcx.topology.routes import Routes

#: The constants fitted on all published tables: ``python bench/model_vs_measured.py --fit``.
FITTED: Mapping[str, float] = MappingProxyType(
    {
        "base": 22.2,
        "replayed": 4.0,
        "driven": 2.16,
        "latency_nvlink": 0.896,
        "latency_xgmi": 0.0960,
        "latency_pcie": 1.57,
        "latency_network": 5.00,
        "latency_tcp": 52.7,
        "efficiency_nvlink": 1.03,
        "efficiency_xgmi": 1.06,
        "efficiency_pcie": 0.929,
        "efficiency_network": 1.05,
        "efficiency_nvls": 0.85,
        "pipeline": 2.55,
    }
)
MOST_RANKS = 64
"""Up to so many ranks NCCL's plan is made."""
_NVLS_FROM_SM = 90
_NVLS_STEPS = 4


@dataclass(frozen=True, slots=True)
class NcclAlgorithm:
    """One algorithm of NCCL's on a topology.

    Attributes:
        name: ``ring``, ``levels``, ``nvls``.
        steps: How many steps over links of each kind.
        bounds: Algorithm bandwidth in GB/s that the links of a kind allow: the efficiency's key, the value.
    """

    name: str
    steps: tuple[tuple[str, float], ...]
    bounds: tuple[tuple[str, float], ...]

    def time_us(
        self, nbytes: np.ndarray, constants: Mapping[str, float], replayed: bool = False
    ) -> np.ndarray:
        """Time of messages of ``nbytes``, float64 of its shape; see ``predict_us``."""
        latency = sum(count * constants[f"latency_{kind}"] for kind, count in self.steps)
        speed = min(bound * constants[f"efficiency_{kind}"] for kind, bound in self.bounds)
        moving = np.asarray(nbytes, np.float64) / (speed * 1000)
        once = constants["replayed" if replayed else "base"]
        return once + latency + moving + constants["pipeline"] * np.sqrt(latency * moving)


def nccl_algorithms(
    topology: Topology, gpus: Sequence[int] | None = None, *, nvls: bool = True, rdma: bool = True
) -> tuple[NcclAlgorithm, ...]:
    """The algorithms that NCCL can choose from for an all-reduce.

    Args:
        topology: The machine or cluster.
        gpus: The GPUs that take part; all by default.
        nvls: Whether in-switch reduction is switched on, where the machine has it.
        rdma: Whether NICs reach each other's memory (InfiniBand, RoCE); else through a stack of TCP.

    Raises:
        TopologyError: There is no GPU, or two cannot reach each other.
    """
    chosen = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
    size = len(chosen)
    if size == 1:
        return (NcclAlgorithm("alone", (), (("nvlink", 1e6),)),)
    hosts: dict[int, list[int]] = {}
    for gpu in chosen:
        hosts.setdefault(topology.gpu(gpu).host, []).append(gpu)
    first = next(iter(hosts.values()))
    kind = _kind(topology, first) if len(first) > 1 else ("network" if rdma else "tcp")
    reached = nccl_bandwidth(topology, chosen)
    narrowest = _key(reached.rings_limit) if reached.rings_limit else kind
    far = len(hosts) if len(hosts) > 1 else 0
    hop = "network" if rdma else "tcp"
    in_ring = ((kind, 2.0 * (size - 1 - far)), (hop, 2.0 * far)) if far else ((kind, 2.0 * (size - 1)),)
    found = [NcclAlgorithm("ring", in_ring, ((narrowest, reached.rings_gb_per_s),))]
    if not far:
        port = _port(topology, first) if nvls else 0.0
        if port and size > 4:
            found.append(
                NcclAlgorithm("nvls", (("nvlink", _NVLS_STEPS),), (("nvls", port / (1 + 1 / size)),))
            )
        return tuple(found)
    if reached.levels_limit is None:
        return tuple(found)
    across = (hop, 2.0 * ceil(log2(far)))
    within = ((kind, 2.0 * (len(first) - 1)), across)
    found.append(NcclAlgorithm("levels", within, ((_key(reached.levels_limit), reached.levels_gb_per_s),)))
    port = _port(topology, first) if nvls else 0.0
    if port:
        network = _nics_gb_per_s(topology, first) * far / (2 * (far - 1))
        bounds = (("nvls", port / (1 + 1 / len(first))), ("network", network))
        found.append(NcclAlgorithm("nvls levels", (("nvlink", _NVLS_STEPS), across), bounds))
    return tuple(found)


def predict_us(
    found: Sequence[NcclAlgorithm],
    nbytes: np.ndarray,
    constants: Mapping[str, float],
    driven: int = 1,
    replayed: bool = False,
) -> np.ndarray:
    """The least time over NCCL's algorithms.

    Args:
        found: What NCCL can choose from.
        nbytes: Bytes of each message.
        constants: As ``FITTED`` names them.
        driven: How many GPUs one process drives: it launches for one after the other.
        replayed: Whether calls are replayed in a CUDA graph, as schedules are.

    Returns:
        Time in us, float64 of the shape of ``nbytes``.
    """
    times = np.min([one.time_us(nbytes, constants, replayed) for one in found], axis=0)
    return times + constants["driven"] * (driven - 1)


def predict(
    collective: str,
    nbytes: int,
    size: int,
    topology: Topology | None = None,
    gpus: Sequence[int] | None = None,
    links: GpuLinks | None = None,
) -> Prediction | None:
    """What NCCL's own collective costs, replayed in a CUDA graph as all candidates are; None if not known.

    Where the ranks of one host reach each other's memory (``links``), its time is that of the law in
    ``flagcx.cost.peer_memory``: fitted to replays there, for every collective, beside what competes with it.
    Elsewhere it is that of the forms over the topology, which know the all-reduce alone. Steps and bytes are
    the forms' in both cases.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where there is one a rank.
        size: Number of ranks.
        topology: The machine or cluster, or None where it is not known.
        gpus: The GPU of each rank; the first ones by index by default.
        links: How the GPUs of one host reach each other; None where NCCL has no competitor.
    """
    law = None if links is None else peer_memory.predict(NATIVE, collective, nbytes, size, links)
    if topology is None or collective != "allreduce" or not 1 < size <= MOST_RANKS:
        return None if law is None else replace(law, sent_nbytes=0.0)
    found = nccl_algorithms(topology, [gpu.index for gpu in topology.gpus[:size]] if gpus is None else gpus)
    at = np.array([0.0, nbytes])
    latency_us, time_us = predict_us(found, at, FITTED, replayed=True).tolist()
    best = min(found, key=lambda one: float(one.time_us(at, FITTED, True)[1]))
    steps = int(sum(count for _, count in best.steps))
    sent = 2 * (size - 1) / size * nbytes if best.name == "ring" else float(nbytes)
    if law is not None:
        latency_us, time_us = law.latency_us, law.time_us
    return Prediction(NATIVE, time_us, latency_us, steps, sent)


def _kind(topology: Topology, gpus: Sequence[int]) -> str:
    """What the slowest hop between neighbours of the planned order goes over."""
    order = best_order(topology, gpus)
    routes = Routes(topology)
    kinds = set()
    for a, b in zip(order, [*order[1:], order[0]], strict=True):
        kinds |= {_key(topology.links_of(u)[v].kind) for (u, v), _ in routes.route(a, b)}
    return next(kind for kind in ("pcie", "xgmi", "nvlink") if kind in kinds)


def _key(kind: LinkKind) -> str:
    return "pcie" if kind in (LinkKind.SOCKET, LinkKind.C2C) else kind.value


def _port(topology: Topology, gpus: Sequence[int]) -> float:
    """GB/s between a GPU and its NVSwitches where these can add up; 0 where they cannot."""
    device = topology.gpu(gpus[0])
    if int(device.attribute("gpu.sm", "0") or 0) < _NVLS_FROM_SM:
        return 0.0
    return sum(
        link.bandwidth_gb_per_s
        for id, link in topology.links_of(device.id).items()
        if topology.device(id).kind is DeviceKind.NVSWITCH
    )


def _nics_gb_per_s(topology: Topology, gpus: Sequence[int]) -> float:
    """GB/s of the NICs that the GPUs of a host use, as far as their PCIe carries it."""
    routes = Routes(topology)
    speeds: dict[str, float] = {}
    for gpu in gpus:
        path = routes.to_nic(gpu)
        inside = [topology.links_of(a)[b].bandwidth_gb_per_s for a, b in pairwise(path)]
        outside = [
            link.bandwidth_gb_per_s
            for link in topology.links_of(path[-1]).values()
            if link.kind is LinkKind.NETWORK
        ]
        speeds[path[-1]] = min([*inside, sum(outside)])
    return sum(speeds.values())
