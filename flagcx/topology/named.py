"""A machine by the name of its preset, or from a file."""

from __future__ import annotations

from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology.clusters import cluster
from flagcx.topology.files import read
from flagcx.topology.presets import preset, preset_names
from flagcx.topology.topology import Topology


def machine_for(
    machine: Topology | str,
    ranks: int | None = None,
    *,
    sm: int | None = None,
    network_gb_per_s: float | None = None,
) -> Topology:
    """A machine, as a cluster of several where that is needed for a GPU for each of the ``ranks``.

    Args:
        machine: A topology, the name of a preset, or the path of a file: NCCL's XML or the output of
            ``nvidia-smi topo -m``.
        ranks: Number of ranks; None for one machine.
        sm: Compute capability times ten of the GPUs, where a file does not name it.
        network_gb_per_s: GB/s of each NIC in one direction, between several hosts.

    Raises:
        TopologyError: There is no such preset or file, it has no GPU, or it cannot make a cluster; or what is
            said of it does not concern it.

    Example:
        >>> len(machine_for("dgx-a100", ranks=9).gpus)
        16
    """
    if isinstance(machine, str):
        machine = _named(machine, sm)
    width = len(machine.gpus)
    if not width:
        raise TopologyError(f"{machine!r} has no GPU, so no place for a rank")
    return joined(machine, 1 if ranks is None else -(-ranks // width), network_gb_per_s)


def _named(name: str, sm: int | None) -> Topology:
    if name in preset_names():
        return known(name, sm)
    if Path(name).exists():
        return read(Path(name), sm=sm)
    raise TopologyError(
        f"topology {name!r} is neither a file nor a preset; presets are {', '.join(preset_names())}"
    )


def known(name: str, sm: int | None = None) -> Topology:
    """The preset of a name.

    Raises:
        TopologyError: There is none, or it is asked for with a compute capability, which it has.
    """
    if sm is not None:
        raise TopologyError(
            f"--sm and --gpu-model are about a file that does not name its GPUs, and {name} does"
        )
    return preset(name)


def joined(machine: Topology, hosts: int, network_gb_per_s: float | None) -> Topology:
    """So many of a machine as a cluster; the machine itself where it is one.

    Raises:
        TopologyError: It cannot make a cluster, or has a network and one host.
    """
    if hosts != 1 and not machine.gpus:
        raise TopologyError(
            f"--hosts {hosts} is about machines with GPUs, and {machine!r} has none; name one by --preset or "
            f"--file"
        )
    if hosts == 1 and network_gb_per_s is not None:
        raise TopologyError(
            f"--network-gb-per-s {network_gb_per_s:g} is about the network between hosts, and this is one "
            f"host: {machine!r}; name more hosts, or more ranks than it has GPUs"
        )
    return machine if hosts == 1 else cluster(machine, hosts, network_gb_per_s=network_gb_per_s)
