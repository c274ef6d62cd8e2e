"""How long a call takes in the peers' memory, and by NCCL's own collective: what the choice on GPUs rests on.

Each algorithm and protocol has a law of a few constants:

    time = latency + step (n - 1) + fill b / (b + ramp) + b / bandwidth

``b`` is what the narrowest part has to carry. Between GPUs that is the link of one of them: the bytes that a
rank pushes, all together n - 1 messages for one-shot and 2 (n - 1)/n of one for two-shot; packets with flags
weigh twice. Where all ranks use one GPU it is that GPU's memory: all that the ranks together read and write.
The fill is what a pipeline of chunks needs until all its stages are at work.

NCCL's collectives follow the lesser of two laws: few bytes take a latency and go at a low bandwidth; many go
through a pipeline cut as well as can be, which takes (sqrt(pipe) + sqrt(b / bandwidth))^2.

The constants are fitted by ``bench/peer_fit.py`` to ``bench/results/gpu_peer_memory_*.jsonl`` (peer memory)
and ``bench/results/gpu_replays_*.jsonl`` (NCCL 2.28.9), medians of graph replays on H200; those of NCCL for
ranks that share a GPU to ``gpu_allreduce_nccl230_shared_gpu.jsonl``, which has plain calls. Bandwidths
between GPUs are parts of what the links of the machine at hand give; latencies are those of NVLink
everywhere. What was not measured (more than four GPUs, flags, other collectives than all-reduce) follows
from the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from flagcx.algorithms import Algorithm
from flagcx.algorithms.candidate import Candidate
from flagcx.cost.model import Prediction
from flagcx.errors import TopologyError
from flagcx.kernels.peer import PEER_MEMORY, PEER_PACKETS
from flagcx.transport.device import DeviceIdentity, most_on_one_gpu

if TYPE_CHECKING:
    from flagcx.topology import Topology

NATIVE = Candidate(Algorithm.NATIVE)
"""NCCL's own collective."""
H200_GB_PER_S = 370.8
"""What the NVLinks of an H200 carry each way, as NCCL counts: where nothing is known of the links."""
FLAGGED = 2
"""How many bytes a packet with flags has for each byte that it carries."""


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """How the ranks' GPUs reach each other. The same on every rank.

    Attributes:
        one_gpu: Whether all ranks use one GPU.
        sharing: Ranks that use one GPU, the most on any.
        push_gb_per_s: What each GPU sends if all send to all others at once.
        ring_gb_per_s: What passes each GPU if data goes round the machine's rings, as NCCL's does.
    """

    one_gpu: bool = False
    sharing: int = 1
    push_gb_per_s: float = H200_GB_PER_S
    ring_gb_per_s: float = H200_GB_PER_S


SPREAD = (0.94, 1.12)
"""Measured over predicted times of ``bench/peer_fit.py``, on H200: 80% lie between (p10 and p90)."""
NVLINK = GpuLinks()
"""GPUs of H200 with all their NVLinks."""


@dataclass(frozen=True, slots=True)
class LatencyBandwidth:
    """The time of one algorithm and protocol; see the module.

    Attributes:
        latency_us: Of the smallest message, without what each peer costs.
        step_us: What each peer adds.
        speed: Bandwidth as a part of the links'; on one GPU in GB/s.
        crowd: The same with more than one peer, where it differs.
        fill_us: What filling the pipeline takes at most.
        ramp_nbytes: At so many bytes half of that.
    """

    latency_us: float
    step_us: float
    speed: float
    crowd: float = 0.0
    fill_us: float = 0.0
    ramp_nbytes: float = 1.0

    def time_us(self, carried: float, size: int, unit_gb_per_s: float) -> float:
        """The time in us of ``carried`` bytes over the narrowest part, where a speed of 1 is the unit."""
        speed = self.crowd if self.crowd and size > 2 else self.speed
        filling = self.fill_us * carried / (carried + self.ramp_nbytes)
        return self.latency_us + self.step_us * (size - 1) + filling + carried / (speed * unit_gb_per_s * 1e3)


@dataclass(frozen=True, slots=True)
class NcclLaw:
    """The time of NCCL's own collectives; see the module.

    Attributes:
        latency_us: Of the smallest message, without what doubling the ranks costs.
        level_us: What each doubling of the ranks adds.
        quick: Bandwidth of few bytes, as a part of the links'; on one GPU in GB/s.
        pipe_us: What the pipeline of many bytes takes for one step.
        speed: Bandwidth of many bytes.
    """

    latency_us: float
    level_us: float
    quick: float
    pipe_us: float
    speed: float

    def time_us(self, carried: float, size: int, unit_gb_per_s: float) -> float:
        """The time in us of ``carried`` bytes over the narrowest part, where a speed of 1 is the unit."""
        unit = unit_gb_per_s * 1e3
        levels = (size - 1).bit_length()
        few = self.latency_us + self.level_us * levels + carried / (self.quick * unit)
        many = self.level_us * levels + (sqrt(self.pipe_us) + sqrt(carried / (self.speed * unit))) ** 2
        return min(few, many)


@dataclass(frozen=True, slots=True)
class PeerCosts:
    """The laws of one kind of place: GPUs of their own, or one GPU.

    Attributes:
        packets: One hop of packets.
        packets_twice: Two hops of packets: two-shot.
        chunks: One hop of chunks.
        chunks_twice: Two hops of chunks: two-shot, broadcast.
        nccl_pair: NCCL between two ranks.
        nccl: NCCL between more.
    """

    packets: LatencyBandwidth
    packets_twice: LatencyBandwidth
    chunks: LatencyBandwidth
    chunks_twice: LatencyBandwidth
    nccl_pair: NcclLaw
    nccl: NcclLaw

    def law(self, candidate: Candidate, collective: str, size: int) -> LatencyBandwidth | NcclLaw:
        """The law of a candidate."""
        algorithm = candidate.algorithm
        if algorithm == Algorithm.NATIVE:
            return self.nccl if size > 2 else self.nccl_pair
        twice = _is_twice(candidate, collective)
        if candidate.protocol == PEER_PACKETS:
            return self.packets_twice if twice else self.packets
        return self.chunks_twice if twice else self.chunks


APART = PeerCosts(
    packets=LatencyBandwidth(2.37, 0.102, 0.847, crowd=0.877, fill_us=0.568, ramp_nbytes=2620),
    packets_twice=LatencyBandwidth(3.0, 0.411, 0.924, crowd=0.906, fill_us=0.502, ramp_nbytes=5380),
    chunks=LatencyBandwidth(5.2, 0.553, 0.946, fill_us=7.51, ramp_nbytes=902e3),
    chunks_twice=LatencyBandwidth(8.0, 0.465, 0.95, crowd=0.924, fill_us=4.12, ramp_nbytes=3.66e6),
    nccl_pair=NcclLaw(2.97, 3.42, 0.391, 3.55, 0.948),
    nccl=NcclLaw(3.76, 3.25, 0.601, 2.35, 1.0),
)
"""Each rank has a GPU of its own."""

TOGETHER = PeerCosts(
    packets=LatencyBandwidth(2.35, 0.441, 5460.0),
    packets_twice=LatencyBandwidth(2.4, 1.08, 4760.0, crowd=5250.0),
    chunks=LatencyBandwidth(3.75, 0.503, 3480.0, crowd=3850.0, fill_us=1.13, ramp_nbytes=16e3),
    chunks_twice=LatencyBandwidth(6.66, 1.11, 5340.0),
    nccl_pair=NcclLaw(12.1, 6.1, 2680.0, 25.0, 2680.0),
    nccl=NcclLaw(1.4, 7.8, 3300.0, 25.0, 3300.0),
)
"""All ranks use one GPU, whose memory carries everything. NCCL before 2.30 goes through sockets there."""

COSTS: Mapping[bool, PeerCosts] = MappingProxyType({False: APART, True: TOGETHER})
"""The laws by ``GpuLinks.one_gpu``."""


class Load(NamedTuple):
    """What a call loads.

    Attributes:
        steps: Hops that a message makes, one after the other; 0 where that is not known.
        pushed: Bytes that a rank sends.
        touched: Bytes that all ranks together read and write.
    """

    steps: int
    pushed: float
    touched: float


def load_of(candidate: Candidate, collective: str, nbytes: int, size: int) -> Load:
    """What a call loads, without flags; see ``predict_us`` for the arguments.

    Example:
        >>> load_of(Candidate("two_shot", 1, "peer_memory"), "allreduce", 1024, 4).pushed
        1536.0
    """
    steps = 0 if candidate == NATIVE else 2 if _is_twice(candidate, collective) else 1
    return Load(
        steps, _pushed(candidate, collective, size) * nbytes, _touched(candidate, collective, size) * nbytes
    )


def _is_twice(candidate: Candidate, collective: str) -> bool:
    """Whether data makes two hops. In chunks a broadcast scatters first, and a reduction gathers last."""
    parts = collective in ("broadcast", "reduce") and candidate.protocol == PEER_MEMORY
    return parts or candidate.algorithm == Algorithm.TWO_SHOT


def _pushed(candidate: Candidate, collective: str, n: int) -> float:
    """Messages or blocks that the busiest of n ranks sends, or a root receives."""
    if collective in ("broadcast", "reduce") and candidate.protocol != PEER_PACKETS:
        return 1.0 if candidate == NATIVE else (n - 1) / n * (1 if collective == "broadcast" else 2)
    if candidate.algorithm == Algorithm.TWO_SHOT or (candidate == NATIVE and collective == "allreduce"):
        return 2 * (n - 1) / n
    return n - 1.0


def _touched(candidate: Candidate, collective: str, n: int) -> float:
    """Messages or blocks that n ranks read and write in the memory of one GPU.

    A packet's place is written, read and emptied; a chunk's is written and read. Of NCCL's it is assumed that
    what is sent is read, goes through a buffer, and is written. Where there are blocks, each rank copies one.
    """
    packets = candidate.protocol == PEER_PACKETS
    if collective in ("gather", "scatter"):
        return 4 * (n - 1) + 2
    if collective in ("broadcast", "reduce") and packets:
        return 3 * n - 2
    if candidate == NATIVE:
        copied = 0 if collective in ("allreduce", "broadcast", "reduce") else 2 * n
        return 4 * n * _pushed(candidate, collective, n) + copied
    if collective in ("broadcast", "reduce"):
        return 3 * n + 2
    if candidate.algorithm == Algorithm.TWO_SHOT:
        return 8 * n - 5 if packets else 5 * n + 1
    return n * (2 * n + 1) if not packets and collective == "allreduce" else 3 * n * n


def predict_us(
    candidate: Candidate,
    collective: str,
    nbytes: int,
    size: int,
    links: GpuLinks = NVLINK,
    flagged: bool = False,
    costs: Mapping[bool, PeerCosts] = COSTS,
) -> float:
    """The time of a call in us, as a graph that is replayed takes it.

    Args:
        candidate: An algorithm with a protocol for the peers' memory, or ``NATIVE``.
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where there is one a rank.
        size: Number of ranks.
        links: How the GPUs reach each other.
        flagged: Whether packets have flags, as they do for all but sums of floating-point numbers.
        costs: The laws.

    Example:
        >>> shot, halves = (predict_us(Candidate(name, 1, "peer_packets"), "allreduce", 1 << 20, 8)
        ...                 for name in ("one_shot", "two_shot"))
        >>> halves < shot
        True
    """
    load = load_of(candidate, collective, nbytes, size)
    law = costs[links.one_gpu].law(candidate, collective, size)
    weight = _weight(candidate, flagged)
    if links.one_gpu:
        return law.time_us(weight * load.touched, size, 1.0)
    unit = links.ring_gb_per_s if candidate == NATIVE else links.push_gb_per_s
    return law.time_us(weight * load.pushed * links.sharing, size, unit)


def predict(
    candidate: Candidate,
    collective: str,
    nbytes: int,
    size: int,
    links: GpuLinks = NVLINK,
    flagged: bool = False,
) -> Prediction:
    """What the laws say of a call; see ``predict_us`` for the arguments."""
    load = load_of(candidate, collective, nbytes, size)
    latency_us, time_us = (predict_us(candidate, collective, n, size, links, flagged) for n in (0, nbytes))
    pushed = _weight(candidate, flagged) * load.pushed
    return Prediction(candidate, time_us, latency_us, load.steps, pushed, spread=SPREAD)


def _weight(candidate: Candidate, flagged: bool) -> int:
    """How many bytes are sent for each byte of the message's."""
    return FLAGGED if flagged and candidate.protocol == PEER_PACKETS else 1


def links_of(
    identities: Sequence[DeviceIdentity],
    topology: Topology | None = None,
    gpus: Sequence[int] | None = None,
) -> GpuLinks:
    """How the ranks' GPUs reach each other.

    Args:
        identities: Every rank's GPU.
        topology: The machine, or None where it is not known: then links as those of an H200 are assumed.
        gpus: The GPUs that they use, in the topology; None where it does not know them.
    """
    sharing = most_on_one_gpu(identities)
    if sharing == len(identities):
        return GpuLinks(True, sharing)
    if topology is None or gpus is None:
        return GpuLinks(False, sharing)
    return links_over(topology, gpus, sharing)


def links_over(topology: Topology, gpus: Sequence[int], sharing: int = 1) -> GpuLinks:
    """How GPUs of a machine reach each other.

    Args:
        topology: The machine.
        gpus: Indices of the GPUs, two or more.
        sharing: Ranks that use one GPU, the most on any.

    Example:
        >>> from flagcx.topology import preset
        >>> round(links_over(preset("dgx-a100"), range(8)).push_gb_per_s)
        240
    """
    from flagcx.topology.loads import pair_loads
    from flagcx.topology.nccl_bandwidth import nccl_bandwidth
    from flagcx.topology.routes import Routes

    others = len(gpus) - 1
    try:
        pairs = pair_loads(topology, gpus, Routes(topology))
        rings = nccl_bandwidth(topology, gpus).rings_gb_per_s
    except TopologyError:
        return GpuLinks(False, sharing)
    push = others / float((pairs.load.sum(axis=(0, 1)) / pairs.capacity).max())
    return GpuLinks(False, sharing, push, rings * 2 * others / len(gpus))
