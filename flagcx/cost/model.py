"""What each candidate costs: its schedule, timed on the topology.

The network's part is the topology's; the rest are a few constants of the transport (``Costs``), which a
measurement can replace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.channels import Channels
from flagcx.cost.network import Network, over
from flagcx.cost.simulate import Costs, Timed, Timing, lay
from flagcx.errors import TopologyError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.derived_traffic import grown, relabelled, staggered
from flagcx.schedule.traffic import Rounds, rounds_of
from flagcx.topology import Topology

#: Grouped send and receive through NCCL, and one kernel for a step's local work, replayed as a CUDA graph.
#: On two and four H200 behind NVSwitches a group took 5.8 us with the links' latency, and 0.2 us more for
#: each further peer; a channel copied 20 GB/s, and all of them 356 of a GPU's 371; a kernel cost 2.6 us and
#: then moved 3.6 TB/s of the memory's 4.8. ``python bench/model_vs_measured.py --part replays`` holds them
#: against what was measured there; the spread is of that, and says nothing of other machines.
DEVICE_COSTS = Costs(
    step_us=5.2,
    message_us=0.2,
    launch_us=2.6,
    memory_gb_per_s=3600.0,
    spread=(0.90, 1.15),
    channels=Channels(gb_per_s=20.0, reach=0.96),
)


#: The traffic of at least so many ranks is taken from that of few, where it grows evenly.
_MANY = 512
_FEW = (12, 13, 14)


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What goes over one link in one direction.

    Attributes:
        a: Id of the end it leaves.
        b: Id of the end it enters.
        kind: What link it is.
        bandwidth_gb_per_s: Its bandwidth.
        nbytes: Bytes that go over it.
        busy: The part of the time that it needs for them, 0 to 1.
    """

    a: str
    b: str
    kind: str
    bandwidth_gb_per_s: float
    nbytes: float
    busy: float

    def __str__(self) -> str:
        return f"{self.a} -> {self.b} ({self.kind}, {self.bandwidth_gb_per_s:g} GB/s)"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model says of a candidate.

    Attributes:
        candidate: The candidate.
        time_us: Time of a call.
        latency_us: Time of a call without bytes.
        steps: Steps in which messages are under way; 0 where that is not known.
        sent_nbytes: Bytes that the busiest rank sends.
        bottleneck: The link that is busy longest; None where nothing is sent or it is not known.
        spread: Measured over predicted time, between which 80% of what was measured lies (p10 and p90);
            None where that is not known.
        plain_us: Time of a call that the host launches, where ``time_us`` is of one that a CUDA graph
            replays; None where that is not known.
    """

    candidate: Candidate
    time_us: float
    latency_us: float
    steps: int
    sent_nbytes: float
    bottleneck: LinkLoad | None = None
    spread: tuple[float, float] | None = None
    plain_us: float | None = None


def predict(candidate: Candidate, laid: Timed, nbytes: float, costs: Costs) -> Prediction:
    """What a candidate costs whose schedule is laid over a network."""
    timing, network, bottleneck = laid.time(nbytes, costs), laid.network, None
    if timing.link_busy.any():
        bottleneck = link_load(network, timing, int(timing.link_busy.argmax()))  # the first of equals
    latency_us, sent = laid.time(0, costs).time_us, float(timing.sent_nbytes.max(initial=0))
    return Prediction(candidate, timing.time_us, latency_us, timing.steps, sent, bottleneck, costs.spread)


def link_load(network: Network, timing: Timing, link: int) -> LinkLoad:
    """What went over one link of a network, by its number."""
    ends, kind = network.links.name(link), network.links.kind(link)
    facts = (network.bandwidth_gb_per_s, timing.link_nbytes, timing.link_busy)
    return LinkLoad(*ends, kind, *(float(values[link]) for values in facts))


class Model:
    """Times candidates on one topology. It keeps what it found of each, so that further sizes are cheap.

    Args:
        topology: A machine or cluster.
        gpus: The GPU of each rank; all by index by default.
        costs: What a call costs at its ranks.
        network: The links between the ranks, if not those of the topology as it is.

    Raises:
        TopologyError: A GPU is unknown or named twice.

    Example:
        >>> from flagcx.topology import preset
        >>> model = Model(preset("dgx-a100"))
        >>> model.predict("allreduce", Candidate("ring"), 1 << 30).steps
        14
    """

    def __init__(
        self,
        topology: Topology,
        gpus: Sequence[int] | None = None,
        costs: Costs = DEVICE_COSTS,
        network: Network | None = None,
    ) -> None:
        self.topology = topology
        self.gpus = tuple(gpu.index for gpu in topology.gpus) if gpus is None else tuple(gpus)
        self.size = len(self.gpus)
        self.costs = costs_between(costs, len({topology.gpu(gpu).host for gpu in self.gpus}))
        self.network = over(topology, self.gpus) if network is None else network
        self._laid: dict[tuple[str, Candidate, int | None], Timed] = {}

    def timing(self, collective: str, candidate: Candidate, nbytes: float, root: int | None = None) -> Timing:
        """The time of a candidate with all that goes over each link.

        Args:
            collective: Name of the collective.
            candidate: The candidate.
            nbytes: Bytes of the message; of one block, where the collective has one a rank.
            root: The root of a rooted collective; 0 by default.
        """
        return self.laid(collective, candidate, root).time(nbytes, self.costs)

    def laid(self, collective: str, candidate: Candidate, root: int | None = None) -> Timed:
        """The candidate's schedule over the network, found once."""
        if root is None and COLLECTIVES[collective].rooted:
            root = 0
        found = self._laid.get((collective, candidate, root))
        if found is None:
            found = lay(rounds(collective, candidate, self.size, root), self.network)
            self._laid[collective, candidate, root] = found
        return found

    def predict(
        self, collective: str, candidate: Candidate, nbytes: float, root: int | None = None
    ) -> Prediction:
        """What the model says of a candidate, as it is."""
        return predict(candidate, self.laid(collective, candidate, root), nbytes, self.costs)


def rounds(collective: str, candidate: Candidate, size: int, root: int | None = None) -> Rounds:
    """The traffic of a candidate's schedule; that of many pieces from that of one, where this can be."""
    if candidate.order is not None and candidate.other is None and not COLLECTIVES[collective].blocks:
        place = None if root is None else candidate.order.index(root)
        plain = rounds(collective, replace(candidate, order=None), size, place)
        return relabelled(plain, candidate.order)
    schedule = candidate.build(collective, size, root)
    if size >= _MANY and candidate.other is None and candidate.groups is None and root is None:
        few = (rounds_of(candidate.build(collective, ranks)) for ranks in _FEW)
        if (found := grown(few, schedule)) is not None:
            return found
    if candidate.pieces > 1 and candidate.other is None and candidate.algorithm != "ring":
        one = rounds(collective, replace(candidate, pieces=1), size, root)
        found = staggered(one, schedule)
        if found is not None:
            return found
    return rounds_of(schedule)


def costs_between(costs: Costs, hosts: int) -> Costs:
    """The costs of ranks on so many hosts: between several, messages are cut into shorter parts."""
    if hosts < 2 or costs.channels is None:
        return costs
    return replace(costs, channels=costs.channels.between_hosts())


def model_of(
    topology: Topology,
    size: int | None = None,
    gpus: Sequence[int] | None = None,
    costs: Costs = DEVICE_COSTS,
) -> Model:
    """The model for some ranks of a topology.

    Args:
        topology: A machine or cluster.
        size: Number of ranks; the first so many GPUs are theirs. All by default.
        gpus: The GPU of each rank instead.
        costs: What a call costs at its ranks.

    Raises:
        TopologyError: There are fewer GPUs than ranks, or ``gpus`` are not as many as ``size``.
    """
    chosen = tuple(gpu.index for gpu in topology.gpus[:size]) if gpus is None else tuple(gpus)
    if size is not None and len(chosen) != size:
        raise TopologyError(f"{size} ranks on {len(chosen)} GPUs of {topology!r}; expected one GPU for each")
    return Model(topology, chosen, costs)
