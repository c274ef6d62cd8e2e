"""``fc.simulate``: how long a schedule of anybody's takes on a machine that need not be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flagcx.arguments import format_nbytes
from flagcx.cost.model import DEVICE_COSTS, LinkLoad, costs_between, link_load
from flagcx.cost.network import Network, over
from flagcx.cost.simulate import Costs, Timing, lay
from flagcx.errors import ArgumentError
from flagcx.report import Report, Reported
from flagcx.schedule.collectives import bus_share
from flagcx.schedule.model import Schedule, check_schedule
from flagcx.topology import Topology, machine_for

_MOST_LINKS = 16
_COLUMNS = ("link", "kind", "GB/s", "sent", "busy")


@dataclass(frozen=True, slots=True, repr=False)
class Simulation(Reported):
    """The time of a schedule on a machine. Shows itself as a table of the busiest links.

    Attributes:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        size: Number of ranks.
        nbytes: Bytes of the message: of all blocks, where the collective has one a rank.
        topology: Name of the machine.
        steps: Steps in which messages are under way.
        time_us: When the last rank is done, in us.
        sent_nbytes: Bytes that the busiest rank sends.
        links: The links that are used, the busiest first.
    """

    collective: str
    algorithm: str
    size: int
    nbytes: float
    topology: str
    steps: int
    time_us: float
    sent_nbytes: float
    links: tuple[LinkLoad, ...]

    @property
    def algbw_gb_per_s(self) -> float:
        """Bytes of the message over time, in 10^9 bytes a second."""
        return self.nbytes / self.time_us / 1000 if self.time_us else 0.0

    @property
    def busbw_gb_per_s(self) -> float:
        """The bus bandwidth as nccl-tests has it, in 10^9 bytes a second."""
        return self.algbw_gb_per_s * bus_share(self.collective, self.size)

    def report(self) -> Report:
        """The simulation as a table."""
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        what = f"{self.collective} of {format_nbytes(self.nbytes)} by {self.algorithm}"
        title = f"{what}, {ranks} on {self.topology}: {self.time_us:.1f} us in {self.steps} steps"
        rows = [
            (
                f"{link.a} -> {link.b}",
                link.kind,
                f"{link.bandwidth_gb_per_s:.1f}",
                format_nbytes(link.nbytes),
                f"{link.busy:.1%}",
            )
            for link in self.links[:_MOST_LINKS]
        ]
        notes = [
            f"algbw {self.algbw_gb_per_s:.2f} GB/s, busbw {self.busbw_gb_per_s:.2f} GB/s; the busiest rank "
            f"sends {format_nbytes(self.sent_nbytes)}."
        ]
        if len(self.links) > _MOST_LINKS:
            notes.append(f"{len(self.links) - _MOST_LINKS} less busy links are not shown.")
        return Report(title, _COLUMNS, rows, (0, 1), notes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        names = [name for name in self.__slots__ if name != "links"]
        return {
            **{name: getattr(self, name) for name in names},
            "algbw_gb_per_s": self.algbw_gb_per_s,
            "busbw_gb_per_s": self.busbw_gb_per_s,
            "links": [{name: getattr(link, name) for name in link.__slots__} for link in self.links],
        }


def simulate(
    schedule: Schedule, topology: Topology | str, nbytes: int = 64 << 20, costs: Costs = DEVICE_COSTS
) -> Simulation:
    """The time of a schedule on a machine, by the model that ``flagcx simulate`` and ``explain`` use.

    Args:
        schedule: Of any algorithm, such as one of your own.
        topology: A ``Topology``, the name of a preset such as "dgx-a100" (``flagcx topo --help`` lists them),
            or the path of a topology file. Of a machine with fewer GPUs than the schedule has ranks, as many
            are joined to a cluster as are needed.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        costs: What a call costs at its ranks; by default, that of sends and receives through NCCL.
            ``flagcx.cost.simulate.Costs()`` leaves the network's time alone.

    Returns:
        A table where it is shown, with ``time_us``, ``busbw_gb_per_s``, ``links`` and ``to_dict()``.

    Raises:
        ArgumentError: This is no schedule, or ``nbytes`` is negative.
        ScheduleError: The schedule has unmatched messages, or a deadlock; see ``fc.verify``.
        TopologyError: There is no such machine, or it has no GPU.

    Example:
        >>> from flagcx.algorithms import build
        >>> simulate(build("allreduce", "ring", 8), "dgx-a100", 64 << 20).steps
        14
    """
    check_schedule(schedule)
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ArgumentError(f"nbytes={nbytes!r}; expected an integer from 0 up")
    if not isinstance(topology, (str, Topology)):
        raise ArgumentError(
            f"topology={topology!r} is a {type(topology).__name__}; expected a Topology, the name of a "
            f"preset or the path of a topology file"
        )
    machine = machine_for(topology, schedule.size)
    gpus = [gpu.index for gpu in machine.gpus[: schedule.size]]
    hosts = len({machine.gpu(gpu).host for gpu in gpus})
    laid = lay(schedule, over(machine, gpus))
    timing = laid.time(nbytes, costs_between(costs, hosts))
    links = tuple(loads(laid.network, timing))
    facts = schedule.collective, str(schedule.algorithm), schedule.size, timing.nbytes, machine.name
    return Simulation(*facts, timing.steps, timing.time_us, float(timing.sent_nbytes.max(initial=0)), links)


def loads(network: Network, timing: Timing) -> list[LinkLoad]:
    """What goes over each link of a network that is used, the busiest first."""
    busiest = sorted(range(len(timing.link_busy)), key=lambda link: -timing.link_busy[link])
    return [link_load(network, timing, link) for link in busiest if timing.link_nbytes[link] > 0]
