"""What each candidate costs: its schedule, timed on the topology.

The network's part is the topology's; the rest are a few constants of the transport (``Costs``), which a
measurement can replace. ``compare`` times all candidates of a call, chooses pieces, and tries two algorithms
beside each other where one leaves links idle that the other would use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations

import numpy as np

from flagcx.cost.channels import Channels
from flagcx.cost.network import Network, over
from flagcx.cost.simulate import Costs, Timed, Timing, lay
from flagcx.errors import TopologyError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import MOST_PLANNED, Candidate, best_pieces, candidates
from flagcx.topology.graph import Topology

#: Grouped send and receive through NCCL, and one kernel for a step's local work, replayed as a CUDA graph.
#: On two and four H200 behind NVSwitches a group took 5.8 us with the links' latency, and 0.2 us more for
#: each further peer; a channel copied 20 GB/s, and all of them 356 of a GPU's 371; a kernel cost 2.6 us and
#: then moved 3.6 TB/s of the memory's 4.8. ``python bench/model_vs_measured.py --part replays`` holds them
#: against what was measured there.
DEVICE_COSTS = Costs(
    step_us=5.2,
    message_us=0.2,
    launch_us=2.6,
    memory_gb_per_s=3600.0,
    channels=Channels(gb_per_s=20.0, reach=0.96),
)
_WORTH_A_MIX = 0.95
_MOST_MIXED = 6
_SHARES = 16


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The link that is busy longest.

    Attributes:
        a: Id of the end it leaves.
        b: Id of the end it enters.
        kind: What link it is.
        bandwidth_gb_per_s: Its bandwidth.
        nbytes: What goes over it.
        busy: The part of the time that it needs for that.
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
    """What the model says of a candidate.

    Attributes:
        candidate: Which.
        time_us: Of a call.
        latency_us: Of a call without bytes.
        steps: Steps in which messages are under way.
        sent_nbytes: Bytes that the busiest rank sends.
        bottleneck: The link that is busy longest; None for a single rank.
    """

    candidate: Candidate
    time_us: float
    latency_us: float
    steps: int
    sent_nbytes: float
    bottleneck: Bottleneck | None


class Model:
    """Times candidates on one topology. It keeps what it found of each, so that further sizes are cheap.

    Args:
        topology: A machine or cluster.
        gpus: The GPU of each rank; all by index by default.
        costs: What a call costs at its ranks.
        network: The ways between the ranks, if not those of the topology as it is.

    Raises:
        TopologyError: A GPU is unknown or named twice.

    Example:
        >>> from flagcx.topology import preset
        >>> model = Model(preset("dgx-a100"))
        >>> model.compare("allreduce", 1 << 30)[0].steps < 16
        True
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
        self.costs = _spread(costs, len({topology.gpu(gpu).host for gpu in self.gpus}))
        self.network = over(topology, self.gpus) if network is None else network
        self._laid: dict[tuple[Candidate, int | None], Timed] = {}

    def timing(self, candidate: Candidate, nbytes: float, root: int | None = None) -> Timing:
        """The time of a candidate with all that goes over each link.

        Args:
            candidate: Any.
            nbytes: Bytes of the message; of one block, where the collective has one a rank.
            root: The root of a rooted collective.
        """
        return self.laid(candidate, root).time(nbytes, self.costs)

    def laid(self, candidate: Candidate, root: int | None = None) -> Timed:
        """The candidate's schedule over the network, found once."""
        found = self._laid.get((candidate, root))
        if found is None:
            found = lay(candidate.rounds(self.size, root), self.network)
            self._laid[candidate, root] = found
        return found

    def predict(self, candidate: Candidate, nbytes: float, root: int | None = None) -> Prediction:
        """What the model says of a candidate, as it is."""
        timing = self.timing(candidate, nbytes, root)
        return Prediction(
            candidate,
            timing.time_us,
            self.timing(candidate, 0, root).time_us,
            timing.steps,
            float(timing.sent_nbytes.max(initial=0)),
            self.bottleneck(timing),
        )

    def bottleneck(self, timing: Timing) -> Bottleneck | None:
        """The link that is busy longest; the first of equals."""
        if not timing.link_busy.any():
            return None
        worst = int(timing.link_busy.argmax())
        network = self.network
        return Bottleneck(
            *network.names[worst],
            network.kinds[worst],
            float(network.bandwidth_gb_per_s[worst]),
            float(timing.link_nbytes[worst]),
            float(timing.link_busy[worst]),
        )

    def in_pieces(self, candidate: Candidate, nbytes: float, root: int | None = None) -> Prediction:
        """What the model says of a candidate with the pieces that serve it best."""
        one = self.predict(candidate, nbytes, root)
        pieces = best_pieces(candidate, one.steps, one.latency_us, one.time_us, nbytes)
        if pieces == 1:
            return one
        cut = self.predict(replace(candidate, pieces=pieces), nbytes, root)
        return min(one, cut, key=lambda prediction: prediction.time_us)

    def compare(self, collective: str, nbytes: float, root: int | None = None) -> tuple[Prediction, ...]:
        """All candidates, mixes included where they gain, the fastest first.

        Ties keep the order of the catalogue, so that all ranks find the same.

        Args:
            collective: Name of the collective.
            nbytes: Bytes of the message; of one block, where the collective has one a rank.
            root: The root of a rooted collective; 0 by default.

        Raises:
            ArgumentError: There is no such collective.
        """
        found = candidates(collective, self.size, self.topology, self.gpus)
        root = 0 if COLLECTIVES[collective].rooted and root is None else root
        nbytes = 0 if collective == "barrier" else nbytes
        simple = [self.in_pieces(candidate, nbytes, root) for candidate in found]
        ranked = sorted(simple, key=lambda prediction: prediction.time_us)
        mixes = list(self._mixes(ranked, nbytes, root)) if 2 < self.size <= MOST_PLANNED else []
        return tuple(sorted([*ranked, *mixes], key=lambda prediction: prediction.time_us))

    def _mixes(self, ranked: list[Prediction], nbytes: float, root: int | None) -> Iterator[Prediction]:
        """Two beside each other, where together they would keep every link less busy than either alone."""
        parts = [prediction.candidate for prediction in ranked[:_MOST_MIXED]]
        for part in list(parts):
            if part.algorithm in ("ring", "chain") and root is None:
                order = part.order or tuple(range(self.size))
                parts.append(replace(part, order=order[::-1]))
        best = ranked[0].time_us
        gains: list[tuple[float, int, Candidate]] = []
        for a, b in combinations(parts, 2):
            share, gain = self._share(a, b, nbytes, root)
            if gain < _WORTH_A_MIX:
                gains.append((gain, len(gains), replace(a, other=b, share=share)))
        for _, _, mix in sorted(gains)[:_MOST_MIXED]:
            prediction = self.predict(mix, nbytes, root)
            if prediction.time_us < best:
                yield prediction

    def _share(self, a: Candidate, b: Candidate, nbytes: float, root: int | None) -> tuple[Fraction, float]:
        """The share of ``a`` with which the busiest link has least to do, and that over the better alone."""
        speed = self.network.bandwidth_gb_per_s * 1000
        alone = [self.timing(candidate, nbytes, root).link_nbytes for candidate in (a, b)]
        busy = [np.pad(load, (0, len(speed) - len(load))) / speed for load in alone]
        least = min(load.max() for load in busy)
        if not least:
            return Fraction(1, 2), 1.0
        shares = [Fraction(part, _SHARES) for part in range(1, _SHARES)]
        worst = [float((busy[0] * float(x) + busy[1] * float(1 - x)).max()) for x in shares]
        chosen = int(np.argmin(worst))
        return shares[chosen], worst[chosen] / float(least)


def _spread(costs: Costs, hosts: int) -> Costs:
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
