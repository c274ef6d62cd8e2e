"""NCCL's (or RCCL's) own collectives over a topology: which algorithms it has there, and what they cost.

NCCL chooses among its algorithms itself; the model of the all-reduce takes the least of

* a ring over all ranks, 2(n-1) steps;
* two levels, 2(g-1) steps in a host of g ranks and 2 log2 h between h hosts;
* in-switch reduction (NVLS) among GPUs of Hopper or newer behind the same NVSwitches, 4 steps, where each GPU
  sends the message and a share of the result; and between hosts, in place of the steps within each.

GPUs that the same NVSwitches join count as one host here, as those of an NVL72 do. The time of each
algorithm follows from ``flagcx.cost.nccl_law``. The other collectives have the same links and constants:

==========================  ==============================================================================
allgather, reduce_scatter   a ring of half the steps of the all-reduce's, with half of its bytes
broadcast, reduce           a chain in one direction: the message once over each hop
alltoall, gather, scatter   sends to all others, or of the root to all others, at once: the busiest link
==========================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from math import ceil, log2

import numpy as np

from flagcx.cost import peer_memory
from flagcx.cost.model import Prediction
from flagcx.cost.nccl_law import FITTED, SENDS, SPREAD, NcclAlgorithm, kind_of, predict_us, stack
from flagcx.cost.peer_memory import NATIVE, GpuLinks
from flagcx.cost.simulate import message_nbytes
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.topology import Device, DeviceKind, LinkKind, Topology, best_order
from flagcx.topology.bounds import nvls_bound
from flagcx.topology.loads import add_loads, bottleneck, ring_hops
from flagcx.topology.nccl_bandwidth import nccl_bandwidth
from flagcx.topology.orders import hop_factor
from flagcx.topology.routes import Edge, Routes

_NVLS_STEPS = 4
_NVLS_FROM_RANKS = 5
#: GPUs by compute capability (times ten) most of which do not reach each other's memory over PCIe (GeForce).
_NO_PEERS = (75, 86, 89, 120, 121)
_RINGS = ("allgather", "reduce_scatter", "broadcast", "reduce")
_AMAZON = "0x1d0f"
#: Instances of Amazon's with older GPUs have the first generation of EFA.
_EFA_2_FROM_SM = 90
#: The least model of Intel's CPUs (family 6) that pass data between PCIe devices through memory at full rate.
_NEW_INTEL = 0x8F


def nccl_algorithms(
    topology: Topology,
    gpus: Sequence[int] | None = None,
    *,
    nvls: bool = True,
    fabric: str | None = None,
    peers: bool | None = None,
) -> tuple[NcclAlgorithm, ...]:
    """The algorithms that NCCL can choose from for an all-reduce.

    Args:
        topology: The machine or cluster.
        gpus: The GPUs that take part; all by default.
        nvls: Whether in-switch reduction is switched on, where the machine has it.
        fabric: What joins the hosts: ``network`` (InfiniBand, RoCE), ``efa``, ``tcp`` (sockets), or ``tcpxo``
            (TCP by the NIC, as on Google's a3-mega); by the names of the NICs where it is not given.
        peers: Whether GPUs reach each other's memory over PCIe; by their kind where it is not given.

    Raises:
        TopologyError: There is no GPU, or two cannot reach each other.
    """
    chosen = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
    size = len(chosen)
    if size == 1:
        return (NcclAlgorithm("alone", (), (("nvlink", 1e6),)),)
    hosts = _hosts(topology, chosen)
    first, count = hosts[0], len(hosts)
    limited, hop = _network(topology, first, fabric)
    kind = _kind(topology, first, peers) if len(first) > 1 else hop
    port = (nvls_bound(topology, first) or 0.0) if nvls else 0.0
    limit = "nvls" if _sm(topology, first) < 100 else "nvls_100"
    inside = 2.0 * (size - 1 if count == 1 else size - count)
    over = ((kind, inside), *(((hop, 2.0 * count),) if count > 1 else ()))
    reached = None if count == 1 and _port_of(topology, chosen) else nccl_bandwidth(topology, chosen)
    if reached is None:
        ring = ("nvlink", _port_of(topology, chosen) * hop_factor(size))
    else:
        ring = (_limit(topology, reached.rings_limit, kind, limited), reached.rings_gb_per_s)
    found = [NcclAlgorithm("ring", over, (ring,))]
    if count == 1:
        if port and size >= _NVLS_FROM_RANKS:
            in_switch = ((limit, port / (1 + 1 / size)),)
            found.append(NcclAlgorithm("nvls", (("nvlink", _NVLS_STEPS),), in_switch))
        return tuple(found)
    across = (hop, 2.0 * ceil(log2(count)))
    if reached is not None and reached.levels_limit is not None:
        levels = (_limit(topology, reached.levels_limit, kind, limited), reached.levels_gb_per_s)
        found.append(NcclAlgorithm("levels", ((kind, 2.0 * (len(first) - 1)), across), (levels,)))
    if port and len(first) > 1:
        network = _nics_gb_per_s(topology, first) * count / (2 * (count - 1))
        bounds = ((limit, port / (1 + 1 / len(first))), (limited, network))
        found.append(NcclAlgorithm("nvls levels", (("nvlink", _NVLS_STEPS), across), bounds))
    return tuple(found)


def collective_algorithms(
    collective: str,
    topology: Topology,
    gpus: Sequence[int] | None = None,
    *,
    root: int = 0,
    fabric: str | None = None,
    peers: bool | None = None,
) -> tuple[NcclAlgorithm, ...]:
    """The algorithms that NCCL can choose from for any collective; bandwidths are of the whole message.

    No constant is fitted to those other than the all-reduce's: ``bench/model_vs_measured.py --part
    collectives`` holds them against published tables.

    Args:
        collective: Name of the collective, or ``sendrecv``: each rank sends the message to the next.
        topology: The machine or cluster.
        gpus: The GPU of each rank; all by default.
        root: The root, where a gather or scatter has one.
        fabric: See ``nccl_algorithms``.
        peers: See there.

    Raises:
        TopologyError: There is no GPU, or two cannot reach each other.
    """
    if collective in ("allreduce", "barrier"):
        return nccl_algorithms(topology, gpus, fabric=fabric, peers=peers)
    chosen = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
    ring = nccl_algorithms(topology, chosen, fabric=fabric, peers=peers, nvls=False)[0]
    if len(chosen) == 1:
        return (ring,)
    if collective in _RINGS:
        steps = tuple((kind, count / 2) for kind, count in ring.steps)
        ((limit, speed),) = ring.bounds
        # A chain carries half of all bytes of an all-reduce, which counts where hops share the memory; where
        # each has a link, that has the message to carry.
        shared = COLLECTIVES[collective].blocks or limit == "host_old"
        speed *= 2.0 if shared else 1 / hop_factor(len(chosen))
        return (NcclAlgorithm("ring", steps, ((limit, speed),)),)
    hosts = _hosts(topology, chosen)
    limited, hop = _network(topology, hosts[0], fabric)
    kind = ring.steps[0][0]
    link = bottleneck(topology, _sent_loads(collective, topology, chosen, hosts, root))
    bound = (_limit(topology, link.kind, kind, limited), link.rate_gb_per_s)
    return (NcclAlgorithm(SENDS, ((hop if len(hosts) > 1 else kind, 1.0),), (bound,)),)


def _sent_loads(
    collective: str, topology: Topology, gpus: Sequence[int], hosts: Sequence[Sequence[int]], root: int
) -> dict[Edge, float]:
    """How many times the whole message goes over each link of a collective made of sends and receives.

    Of an alltoall between hosts these are the links of the first host, for which all stand alike.
    """
    routes, size, loads = Routes(topology), len(gpus), dict[Edge, float]()
    if collective == "sendrecv":
        add_loads(loads, routes, ring_hops(gpus))
    elif collective == "alltoall":
        add_loads(loads, routes, permutations(hosts[0], 2), 1 / size)
        leaving = (size - len(hosts[0])) / size
        for gpu in hosts[0] if leaving else ():
            path = routes.to_nic(gpu)
            outside = [(path[-1], id) for id in topology.network_links_of(path[-1])]
            for edge, part in [
                *((edge, 1.0) for edge in pairwise(path)),
                *((e, 1 / len(outside)) for e in outside),
            ]:
                loads[edge] = loads.get(edge, 0.0) + leaving * part
    else:
        hops = [(gpus[root], gpu) for gpu in gpus if gpu != gpus[root]]
        add_loads(loads, routes, hops if collective == "scatter" else [hop[::-1] for hop in hops], 1 / size)
    return loads


def _sent(collective: str, name: str, nbytes: float, size: int) -> float:
    """Bytes that the busiest rank sends, or a root receives, of a message or of blocks of ``nbytes``."""
    if COLLECTIVES[collective].blocks:
        return (size - 1) * nbytes
    return 2 * (size - 1) / size * nbytes if collective == "allreduce" and name == "ring" else nbytes


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
    Elsewhere it is that of the forms over the topology. Steps and bytes are the forms' in both cases.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where there is one a rank.
        size: Number of ranks.
        topology: The machine or cluster, or None where it is not known.
        gpus: The GPU of each rank; the first ones by index by default.
        links: How the GPUs of one host reach each other; None where NCCL has no competitor.
    """
    law = None if links is None else peer_memory.predict(NATIVE, collective, nbytes, size, links)
    if topology is None or size < 2:
        return None if law is None else replace(law, sent_nbytes=0.0)
    chosen = [gpu.index for gpu in topology.gpus[:size]] if gpus is None else gpus
    found = collective_algorithms(collective, topology, chosen)
    whole = message_nbytes(collective, size, nbytes)
    at = np.array([0.0, whole])
    latency_us, time_us = predict_us(found, at, FITTED, replayed=True).tolist()
    plain_us = float(predict_us(found, at, FITTED)[1])
    best = found[int(stack(found).time_us(at[1:], FITTED, True).argmin())]
    steps = int(sum(count for _, count in best.steps))
    if law is not None:
        plain_us += law.time_us - time_us
        latency_us, time_us = law.latency_us, law.time_us
    spread, sent = SPREAD[kind_of(found), whole >= 1 << 20], _sent(collective, best.name, nbytes, size)
    return Prediction(NATIVE, time_us, latency_us, steps, sent, spread=spread, plain_us=plain_us)


def fabric_of(topology: Topology) -> str:
    """What joins hosts, by their NICs: ``efa`` where these are Amazon's, else ``network``."""
    return "efa" if any(map(_is_amazon, topology.devices(DeviceKind.NIC))) else "network"


def _is_amazon(nic: Device) -> bool:
    names = [nic.name, *(port.name for port in nic.ports)]
    named = any(name.startswith(("rdmap", "efa")) for name in names)
    return named or nic.attribute("vendor").lower() == _AMAZON


def _hosts(topology: Topology, gpus: Sequence[int]) -> list[list[int]]:
    """The GPUs that are near each other: of one host, or of hosts that NVSwitches join."""
    routes = Routes(topology)
    hosts: dict[int, list[int]] = {}
    for gpu in gpus:
        hosts.setdefault(routes.domain(gpu), []).append(gpu)
    return list(hosts.values())


def _kind(topology: Topology, gpus: Sequence[int], peers: bool | None) -> str:
    """What the slowest hop between neighbours of the planned order goes over."""
    if _port_of(topology, gpus):
        return "nvlink"
    order = best_order(topology, gpus)
    routes = Routes(topology)
    kinds, roots = set(), False
    for a, b in zip(order, [*order[1:], order[0]], strict=True):
        route = routes.route(a, b)
        kinds |= {topology.links_of(u)[v].kind for (u, v), _ in route}
        roots = roots or any(topology.device(v).kind is DeviceKind.CPU for (_, v), _ in route)
    for fabric in (LinkKind.XGMI, LinkKind.NVLINK):
        if kinds == {fabric}:
            return fabric.value
    if peers is None:
        direct = not roots or _cpu(topology).attribute("vendor") == "AuthenticAMD"
        peers = direct and _sm(topology, gpus) not in _NO_PEERS
    return "pcie" if peers else "host"


def _network(topology: Topology, gpus: Sequence[int], fabric: str | None) -> tuple[str, str]:
    """What limits bytes between hosts, and what a step there goes over."""
    limit = fabric or fabric_of(topology)
    if limit == "efa" and _sm(topology, gpus) < _EFA_2_FROM_SM:
        limit = "efa_1"
    return limit, "tcp" if limit == "tcpxo" else limit


def _limit(topology: Topology, found: LinkKind | None, kind: str, network: str) -> str:
    """The key of the efficiency of links of a kind, where GPUs of a host meet over ``kind``."""
    if found is None or found is LinkKind.NETWORK:
        return network
    if found is LinkKind.C2C:
        found = LinkKind.PCIE
    if kind == "host" and found in (LinkKind.PCIE, LinkKind.SOCKET):
        cpu = _cpu(topology)
        model = cpu.attribute("modelid")
        old = cpu.attribute("vendor") == "GenuineIntel" and model.isdecimal() and int(model) < _NEW_INTEL
        return "host_old" if old else "host"
    return found.value


def _cpu(topology: Topology) -> Device:
    return next(iter(topology.devices(DeviceKind.CPU)), Device("", DeviceKind.CPU, 0))


def _sm(topology: Topology, gpus: Sequence[int]) -> int:
    return int(topology.gpu(gpus[0]).attribute("gpu.sm", "0") or 0)


def _port_of(topology: Topology, gpus: Sequence[int]) -> float:
    """GB/s between each of the GPUs and the NVSwitches that join them all; 0 where there are none."""
    links = [topology.nvswitches_of(topology.gpu(gpu).id) for gpu in gpus]
    if any(own.keys() != links[0].keys() for own in links):
        return 0.0
    return min(sum(link.bandwidth_gb_per_s for link in own.values()) for own in links)


def _nics_gb_per_s(topology: Topology, gpus: Sequence[int]) -> float:
    """GB/s of the NICs that the GPUs of a host use, as far as their PCIe carries it."""
    routes = Routes(topology)
    speeds: dict[str, float] = {}
    for gpu in gpus:
        path = routes.to_nic(gpu)
        inside = [topology.links_of(a)[b].bandwidth_gb_per_s for a, b in pairwise(path)]
        outside = [link.bandwidth_gb_per_s for link in topology.network_links_of(path[-1]).values()]
        speeds[path[-1]] = min([*inside, sum(outside)])
    return sum(speeds.values())
