"""What carries the gradients of a training, and what codes them: hosts with a link between them, or GPUs.

Times on GPUs are those of ``flagcx.cost.model`` for schedules and ``flagcx.cost.nccl`` for NCCL's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flagcx.compression.auto import LinkProfile
from flagcx.topology import Topology, cluster, preset
from flagcx.topology.speeds import memory_gb_per_s

if TYPE_CHECKING:
    from flagcx.algorithms.candidate import Candidate
    from flagcx.cost.model import Model

#: Speed at which a core of a host moves and adds data through shared memory, and the time of a step there.
HOST_GB_PER_S, HOST_LATENCY_US = 7.0, 15.0
_PROBED_NBYTES = tuple(1 << power for power in range(12, 34, 3))
_MOST_ALGORITHMS = 3

TimeUs = Callable[[float], float]
"""Time in us, by bytes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What carries and what codes.

    Attributes:
        link: The link between the ranks.
        times: The times of algorithms, the fastest first.
        exchange: Time of an all-to-all and an all-gather of so many coded bytes.
        memory_gb_per_s: Bandwidth of the GPUs' memory; 0 where arrays are on hosts.
        where: Its name.
    """

    link: LinkProfile
    times: list[tuple[str, TimeUs]]
    exchange: TimeUs
    memory_gb_per_s: float
    where: str

    @property
    def on_device(self) -> bool:
        """Whether arrays are on GPUs."""
        return self.memory_gb_per_s > 0


def hosts(size: int, link_gb_per_s: float | None, latency_us: float) -> Machine:
    """Processes with NumPy arrays: over a link, or of one host if it has no speed."""
    if link_gb_per_s is None:
        link = LinkProfile(size, HOST_GB_PER_S, HOST_LATENCY_US, 1.0, 1.0, True)
        where = "of one host, through shared memory"
    else:
        link = LinkProfile(size, link_gb_per_s, latency_us, 0.0, 1.0, True)
        where = f"over a link of {link_gb_per_s:g} GB/s"
    speed, latency, share = link.bandwidth_gb_per_s, link.latency_us, 2 * (size - 1) / size
    times: list[tuple[str, TimeUs]] = [
        ("two_shot", lambda n: 2 * latency * (size > 1) + share * n / speed / 1e3)
    ]
    return Machine(link, times, lambda n: 4 * latency + share * n / speed / 1e3, 0.0, where)


def gpus(model_bytes: int, topology: Topology | str, ranks: int | None) -> Machine:
    """As many GPUs of a machine, or of a cluster of such machines, as there are ranks.

    Raises:
        TopologyError: There is no such preset, or it has no GPU.
    """
    from flagcx.cost.model import model_of

    machine = preset(topology) if isinstance(topology, str) else topology
    width = len(machine.gpus)
    size = ranks or width
    if size > width:
        machine = cluster(machine, -(-size // max(width, 1)))
    model = model_of(machine, size)
    times = _algorithms(model, model_bytes)
    best = times[0][1]
    share = 2 * (size - 1) / size
    slope = (best(model_bytes) - best(1)) / 1e-3
    bandwidth = share * model_bytes / slope if slope > 0 else 1e6
    link = LinkProfile(size, max(bandwidth, 1e-6), best(1) / 2, 0.0, 1.0, True)
    return Machine(link, times, _exchange(model, model_bytes), _memory(machine), f"on {machine.name}")


def _memory(machine: Topology) -> float:
    """The bandwidth of the slowest GPU's memory."""
    texts = [gpu.attribute("gpu.sm") for gpu in machine.gpus]
    return min(memory_gb_per_s(int(text) if text.isdecimal() and len(text) < 6 else None) for text in texts)


def _exchange(model: Model, model_bytes: int) -> TimeUs:
    """The two exchanges of a compressed all-reduce, by the fastest schedule of each."""
    from flagcx.selection.predicted import compare

    sizes = [0, *(nbytes for nbytes in _PROBED_NBYTES if nbytes < model_bytes), model_bytes]
    if model.size == 1:
        return lambda nbytes: 0.0
    best = [
        compare(model, collective, model_bytes // model.size)[0].candidate
        for collective in ("alltoall", "allgather")
    ]
    predicted = [
        sum(
            model.timing(collective, one, nbytes / model.size).time_us
            for collective, one in zip(("alltoall", "allgather"), best, strict=True)
        )
        for nbytes in sizes
    ]
    return _between(sizes, predicted)


def _algorithms(model: Model, model_bytes: int) -> list[tuple[str, TimeUs]]:
    """The best algorithms for buckets and for the whole, with NCCL's own."""
    from flagcx.cost.nccl import nccl_algorithms
    from flagcx.cost.nccl_law import FITTED, predict_us
    from flagcx.selection.predicted import compare

    if model.size == 1:
        return [("none", lambda nbytes: 0.0)]
    sizes = [nbytes for nbytes in _PROBED_NBYTES if nbytes < model_bytes] + [model_bytes]
    middle = sizes[len(sizes) // 2]
    found: dict[str, Candidate] = {}
    for nbytes in (model_bytes, middle):
        for one in compare(model, "allreduce", nbytes)[:_MOST_ALGORITHMS]:
            found.setdefault(one.candidate.name, one.candidate)
    times = []
    for name, candidate in found.items():
        predicted = [model.timing("allreduce", candidate, n).time_us for n in sizes]
        times.append((name, _between(sizes, predicted)))
    own = nccl_algorithms(model.topology, model.gpus)
    by_nccl = predict_us(own, np.array(sizes, float), FITTED, replayed=True)
    times.append(("native", _between(sizes, list(by_nccl))))
    return sorted(times, key=lambda one: one[1](model_bytes))


def _between(sizes: Sequence[int], times: Sequence[float]) -> TimeUs:
    """Times on straight lines between those at some sizes."""
    return lambda nbytes: float(np.interp(nbytes, sizes, times))
