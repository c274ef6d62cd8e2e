"""A machine by the name of its preset, or from a file."""

from __future__ import annotations

from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology.clusters import cluster
from flagcx.topology.files import read
from flagcx.topology.presets import preset, preset_names
from flagcx.topology.topology import Topology


def machine_for(machine: Topology | str, ranks: int | None = None) -> Topology:
    """A machine, as a cluster of several where that is needed for a GPU for each of the ``ranks``.

    Args:
        machine: A topology, the name of a preset, or the path of a file: NCCL's XML or the output of
            ``nvidia-smi topo -m``.
        ranks: Number of ranks; None for one machine.

    Raises:
        TopologyError: There is no such preset or file, it has no GPU, or it cannot make a cluster.

    Example:
        >>> len(machine_for("dgx-a100", ranks=9).gpus)
        16
    """
    if isinstance(machine, str):
        machine = _named(machine)
    width = len(machine.gpus)
    if not width:
        raise TopologyError(f"{machine!r} has no GPU, so no place for a rank")
    return machine if ranks is None or ranks <= width else cluster(machine, -(-ranks // width))


def _named(name: str) -> Topology:
    if name in preset_names():
        return preset(name)
    if Path(name).exists():
        return read(Path(name))
    raise TopologyError(
        f"topology {name!r} is neither a file nor a preset; presets are {', '.join(preset_names())}"
    )
