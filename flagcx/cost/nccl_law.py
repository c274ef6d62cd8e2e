"""How long NCCL's own collectives take: protocols, kinds of links, and their fitted constants.

An algorithm takes a step for each hop of a message, over links of some kind, and its bytes go at the speed
that the narrowest kind allows. Each is run by one of three protocols, and the fastest counts, as in NCCL:

=======  ===================================================  ==========================================
LL       each 8 bytes bring a flag: quick, half the bytes    everywhere but in switches
LL128    each 128 bytes bring a flag                         in rings, by NVLink or xGMI within hosts
Simple   chunks in a pipeline, with flags of their own       everywhere
=======  ===================================================  ==========================================

With L us of steps and b us of bytes, Simple takes L + b + c sqrt(L b): a pipeline cut as well as can be,
which makes messages of middle size slow. A call costs ``base`` besides; replayed as part of a CUDA graph,
where nothing is launched from the host, ``replayed``. Where one thread drives several GPUs it launches for
one after the other, and a call takes no less than that; where threads of one process drive one GPU each, they
get into each other's way, and a call takes ``threads`` more for each.

The constants are of kinds of links, not of machines. ``bench/model_vs_measured.py`` fits them to published
tables (``bench/results/nccl_published.jsonl``), and says how far each machine is off that a fit has not seen.

Source: the form is that of NCCL's own tuning (``graph/tuning.cc``): latency by kind of link, protocol and
number of steps, bandwidth by the plan times an efficiency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

NETWORKS = ("network", "efa", "efa_1", "tcp")
"""What joins hosts: InfiniBand or RoCE, Amazon's EFA of the second generation on or of the first, and TCP."""
KINDS = ("nvlink", "xgmi", "pcie", "host", *NETWORKS)
"""What a step goes over: GPU fabrics; PCIe, straight or through the host's memory; networks between hosts."""
LIMITS = (*KINDS, "tcpxo", "socket", "host_old", "nvls", "nvls_100")
"""What limits bytes: links of these kinds, TCP whose bytes the NIC puts into the GPU's memory (``tcpxo``,
Google's FasTrak), a link between sockets, the memory of hosts with Intel's CPUs from before Sapphire Rapids,
or in-switch reduction (by NVSwitches of Hopper, or of Blackwell)."""
SENDS = "sends"
"""The algorithm of collectives that NCCL makes of sends and receives, which LL128 does not serve."""
FABRICS = ("nvlink", "xgmi")
"""The kinds of links that join the GPUs of a host better than PCIe."""

FITTED: Mapping[str, float] = MappingProxyType(
    {
        "base": 9.46,
        "replayed": 3.9,
        "launch": 5.41,
        "threads": 4.85,
        "latency_nvlink": 1.15,
        "latency_xgmi": 0.296,
        "latency_pcie": 0.679,
        "latency_host": 0.813,
        "latency_network": 11.7,
        "latency_efa": 15.8,
        "latency_efa_1": 78.6,
        "latency_tcp": 61.2,
        "slow_ll128": 2.5,
        "slow_simple": 6.11,
        "share_ll": 0.155,
        "share_ll128": 0.549,
        "efficiency_nvlink": 0.986,
        "efficiency_xgmi": 0.986,
        "efficiency_pcie": 1.08,
        "efficiency_host": 1.04,
        "efficiency_network": 0.927,
        "efficiency_efa": 0.95,
        "efficiency_efa_1": 0.422,
        "efficiency_tcp": 0.574,
        "efficiency_tcpxo": 0.982,
        "efficiency_socket": 0.95,
        "efficiency_host_old": 0.5,
        "efficiency_nvls": 0.83,
        "efficiency_nvls_100": 0.559,
        "pipeline": 0.427,
    }
)
"""The constants fitted on all published tables: ``python bench/model_vs_measured.py --fit``."""
SPREAD: Mapping[tuple[str, bool], tuple[float, float]] = MappingProxyType(
    {
        ("fabric", False): (0.816, 1.61),
        ("fabric", True): (0.745, 1.38),
        ("network", False): (0.625, 1.73),
        ("network", True): (0.763, 1.5),
        ("pcie", False): (0.59, 2.44),
        ("pcie", True): (0.73, 1.73),
    }
)
"""Measured over predicted, by ``kind_of`` machine and whether a message has a MiB or more: 80% of the times
of machines that the fit has not seen lie between (p10 and p90)."""


@dataclass(frozen=True, slots=True)
class NcclAlgorithm:
    """One algorithm of NCCL's on a topology.

    Attributes:
        name: ``ring``, ``levels``, ``nvls``; ``sends`` of collectives that are made of sends and receives.
        steps: How many steps over links of each kind of ``KINDS``.
        bounds: Algorithm bandwidth in GB/s that links of a kind allow: the key in ``LIMITS``, the value.
    """

    name: str
    steps: tuple[tuple[str, float], ...]
    bounds: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Algorithms as arrays, to be timed together.

    Attributes:
        steps: Steps over each of ``KINDS``, float64 of shape (..., algorithms, kinds).
        per_byte: us for each byte over each of ``LIMITS`` at an efficiency of 1, of shape (..., algorithms,
            limits).
        flagged: Whether LL is possible, of shape (..., algorithms).
        quick: Whether LL128 is, of the same shape.
        exists: Whether there is such an algorithm at all, of the same shape.
    """

    steps: np.ndarray
    per_byte: np.ndarray
    flagged: np.ndarray
    quick: np.ndarray
    exists: np.ndarray

    def time_us(
        self, nbytes: np.ndarray, constants: Mapping[str, float], replayed: bool | np.ndarray = False
    ) -> np.ndarray:
        """Time of each algorithm by its fastest protocol; infinite where there is none.

        Args:
            nbytes: Bytes of each message, of a shape that goes with (..., algorithms).
            constants: As ``FITTED`` names them.
            replayed: Whether calls are replayed in a CUDA graph.
        """
        hop = np.array([constants[f"latency_{kind}"] for kind in KINDS])
        reached = np.array([constants[f"efficiency_{kind}"] for kind in LIMITS])
        latency = self.steps @ hop
        moving = nbytes * (self.per_byte / reached).max(axis=-1)
        few = latency + moving / constants["share_ll"]
        between = latency * constants["slow_ll128"] + moving / constants["share_ll128"]
        latency = latency * constants["slow_simple"]
        many = latency + moving + constants["pipeline"] * np.sqrt(latency * moving)
        best = np.minimum(many, np.where(self.flagged, few, np.inf))
        best = np.minimum(best, np.where(self.quick, between, np.inf))
        once = np.where(replayed, constants["replayed"], constants["base"])
        return np.where(self.exists, once + best, np.inf)


def stack(algorithms: Sequence[NcclAlgorithm], room: int = 0) -> Stack:
    """Puts algorithms into arrays.

    Args:
        algorithms: At least one.
        room: The least number of places, of which those beyond the algorithms do not exist.
    """
    places = max(room, len(algorithms))
    steps, per_byte = np.zeros((places, len(KINDS))), np.zeros((places, len(LIMITS)))
    flagged, quick, exists = (np.zeros(places, bool) for _ in range(3))
    for place, one in enumerate(algorithms):
        for kind, count in one.steps:
            steps[place, KINDS.index(kind)] += count
        for kind, gb_per_s in one.bounds:
            per_byte[place, LIMITS.index(kind)] = 1 / (gb_per_s * 1000)
        flagged[place] = not one.name.startswith("nvls")
        quick[place] = one.name != SENDS and flagged[place] and any(kind in FABRICS for kind, _ in one.steps)
        exists[place] = True
    return Stack(steps, per_byte, flagged, quick, exists)


def kind_of(found: Sequence[NcclAlgorithm]) -> str:
    """The kind of machine that intervals are of: ``fabric`` or ``pcie`` of one host, or ``network``."""
    kinds = {kind for one in found for kind, count in one.steps if count}
    if kinds & set(NETWORKS):
        return "network"
    return "pcie" if kinds & {"pcie", "host"} else "fabric"


def launched(
    times: np.ndarray,
    constants: Mapping[str, float],
    driven: int | np.ndarray = 1,
    threads: int | np.ndarray = 0,
) -> np.ndarray:
    """Times of calls in us with what it takes to launch them from the host; see ``predict_us``."""
    return np.maximum(times, constants["launch"] * driven) + constants["threads"] * threads


def predict_us(
    found: Sequence[NcclAlgorithm],
    nbytes: np.ndarray,
    constants: Mapping[str, float],
    driven: int = 1,
    replayed: bool = False,
    threads: int = 0,
) -> np.ndarray:
    """The least time over NCCL's algorithms.

    Args:
        found: What NCCL can choose from.
        nbytes: Bytes of each message.
        constants: As ``FITTED`` names them.
        driven: How many GPUs one thread drives: it launches for one after the other.
        replayed: Whether calls are replayed in a CUDA graph, as schedules are; then nothing is launched.
        threads: How many threads of one process drive a GPU each, where there are several.

    Returns:
        Time in us, float64 of the shape of ``nbytes``.
    """
    sizes = np.asarray(nbytes, np.float64)
    times = stack(found).time_us(sizes[..., None], constants, replayed).min(axis=-1)
    return times if replayed else launched(times, constants, driven, threads)
