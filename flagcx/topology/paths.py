"""Paths between devices: their class in nvidia-smi's words, the widest, the shortest, and that of data.

Classes, best first: ``NV#`` (# bonded NVLinks, or ``XGMI#``), ``NVB`` (NVLink through one GPU), ``PIX``
(one PCIe switch), ``PXB`` (several), ``PHB`` (through the CPU's PCIe root), ``NODE`` (between roots of one
NUMA node), ``SYS`` (between NUMA nodes), ``NET`` (between hosts), ``DIS`` (no path).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flagcx.errors import TopologyError
from flagcx.topology.graph import Device, DeviceKind, Graph, Link, LinkKind

#: Rank of a class; smaller is nearer.
CLASS_ORDER = ("X", "NV", "NVB", "PIX", "PXB", "PHB", "NODE", "SYS", "NET", "DIS")
_FORWARDS = (DeviceKind.PCIE_SWITCH, DeviceKind.HOST_BRIDGE, DeviceKind.CPU)


@dataclass(frozen=True, slots=True)
class Path:
    """A path through the graph.

    Attributes:
        devices: Ids from one end to the other.
        path_class: ``NV12``, ``PIX``, ``SYS``, ...
        bandwidth_gb_per_s: Of its narrowest link, in each direction.
        latency_us: Sum over its links, in one direction.
        narrowest: The link that sets the bandwidth; None for a path from a device to itself.
    """

    devices: tuple[str, ...]
    path_class: str
    bandwidth_gb_per_s: float
    latency_us: float
    narrowest: Link | None


def class_rank(path_class: str) -> int:
    """The rank of a class, from nearest (0) to farthest."""
    word = "NV" if path_class.startswith("XGMI") else path_class.rstrip("0123456789")
    return CLASS_ORDER.index(word)


def path_class(topology: Graph, a: str, b: str, *, through_gpus: bool = False) -> str:
    """The class of the connection of two devices, in nvidia-smi's words.

    Args:
        topology: The machine.
        a: Id of one device.
        b: Id of the other.
        through_gpus: Whether NVLink through one further GPU counts (``NVB``), as NCCL can use it; nvidia-smi
            never shows it.

    Raises:
        TopologyError: A device is not in the topology.

    Example:
        >>> from flagcx.topology import preset
        >>> machine = preset("dgx-1v")
        >>> path_class(machine, "gpu0", "gpu5"), path_class(machine, "gpu0", "gpu5", through_gpus=True)
        ('SYS', 'NVB')
    """
    first, second = topology.device(a), topology.device(b)
    if a == b:
        return "X"
    if fabric := fabric_links(topology, a, b):
        word = "XGMI" if fabric[0][0].kind is LinkKind.XGMI else "NV"
        return f"{word}{sum(min(link.count for link in path) for path in fabric)}"
    if through_gpus and _common_gpu(topology, a, b):
        return "NVB"
    if first.host != second.host or DeviceKind.NETWORK_SWITCH in (first.kind, second.kind):
        return "NET" if topology.connected(a, b) else "DIS"
    path = pcie_path(topology, a, b)
    return "DIS" if path is None else _pcie_class(topology, path)


def fabric_links(topology: Graph, a: str, b: str) -> list[tuple[Link, ...]]:
    """The NVLink (or xGMI) paths of two devices: the direct link, or those through the fewest NVSwitches.

    NVSwitches of a board join the GPUs of that board; the boards of a DGX-2 are joined switch by switch, so
    GPUs of different boards are two switches apart.
    """
    direct = topology.link(a, b)
    if direct is not None and direct.kind.is_gpu_fabric:
        return [(direct,)]
    near, far = topology.nvswitches_of(a), topology.nvswitches_of(b)
    through_one: list[tuple[Link, ...]] = [(link, far[id]) for id, link in near.items() if id in far]
    return through_one or [
        (link, between, far[id])
        for middle, link in near.items()
        for id, between in topology.nvswitches_of(middle).items()
        if id in far
    ]


def pcie_path(topology: Graph, a: str, b: str) -> list[str] | None:
    """The path of data between two devices of one host without NVLink: PCIe, its roots, the sockets."""
    return _search(
        topology,
        a,
        b,
        lambda link: None if link.kind.is_gpu_fabric or link.kind is LinkKind.NETWORK else (0.0, 1.0),
        lambda device: device.kind in _FORWARDS,
    )


def shortest(topology: Graph, a: str, b: str) -> Path:
    """The path of least latency through anything that forwards: switches, roots, sockets, NICs, the network.

    Raises:
        TopologyError: A device is unknown, or there is no path.
    """
    path = _search(topology, a, b, _latency, lambda device: device.kind is not DeviceKind.GPU)
    return _path(topology, a, b, path)


def widest(topology: Graph, a: str, b: str, *, through_gpus: bool = False) -> Path:
    """The path whose narrowest link is widest; among equals that of least latency.

    Args:
        topology: The machine.
        a: Id of one device.
        b: Id of the other.
        through_gpus: Whether other GPUs may pass data on.

    Raises:
        TopologyError: A device is unknown, or there is no path.
    """
    topology.device(a), topology.device(b)

    def wide(least: float) -> list[str] | None:
        return _search(
            topology,
            a,
            b,
            lambda link: _latency(link) if link.bandwidth_gb_per_s >= least else None,
            lambda device: through_gpus or device.kind is not DeviceKind.GPU,
        )

    widths = sorted({link.bandwidth_gb_per_s for link in topology.links}, reverse=True)
    found = (path for least in widths if (path := wide(least)) is not None)
    return _path(topology, a, b, [a] if a == b else next(found, None))


def peers(topology: Graph, *, fabric: bool) -> dict[int, list[int]]:
    """For each GPU the other GPUs of its host that it reaches by NVLink, or else by PCIe; nearest first.

    Args:
        topology: The machine.
        fabric: True for peers by NVLink (or xGMI), False for those that only PCIe reaches, be it
            within a switch or across sockets.
    """
    result: dict[int, list[int]] = {}
    for gpu in topology.gpus:
        found = []
        for other in topology.devices(DeviceKind.GPU, host=gpu.host):
            word = path_class(topology, gpu.id, other.id)
            rank = class_rank(word)
            if word not in ("X", "DIS") and (rank == class_rank("NV")) == fabric:
                count = int(word.lstrip("NVXGMI") or 0) if fabric else 0
                found.append((rank, -count, other.index))
        result[gpu.index] = [index for _, _, index in sorted(found)]
    return result


def nearest(topology: Graph, id: str, kind: DeviceKind) -> list[Device]:
    """The devices of a kind in the same host, nearest (by class, bandwidth, latency, index) first."""
    here = topology.device(id)
    found = []
    for other in topology.devices(kind, host=here.host):
        if other.id != id and (ids := pcie_path(topology, id, other.id)):
            path = _path(topology, id, other.id, ids)
            rank = class_rank(_pcie_class(topology, ids))
            found.append((rank, -path.bandwidth_gb_per_s, path.latency_us, other.index, other))
    return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:-1])]


def nearest_nic(topology: Graph, gpu: int) -> Device | None:
    """The NIC that a GPU should use, or None on a host without one.

    GPUs that are equally near to several NICs are spread over them by their order, so that they do not all
    take the first. NICs with a PCI place come before interfaces without one (bridges, tunnels).

    Args:
        topology: The machine.
        gpu: Index of the GPU.
    """
    here = topology.gpu(gpu)
    nics = nearest(topology, here.id, DeviceKind.NIC)
    nics = [nic for nic in nics if nic.pci_bus_id] or nics
    return shared_out(topology, here, nics) if nics else None


def shared_out(topology: Graph, gpu: Device, nics: Sequence[Device]) -> Device:
    """Of NICs in the order of ``nearest`` the one for a GPU; GPUs equally near to several share them out."""

    def rank(id: str, nic: Device) -> int:
        return class_rank(path_class(topology, id, nic.id))

    best = min(rank(gpu.id, nic) for nic in nics)
    alike = sorted((nic for nic in nics if rank(gpu.id, nic) == best), key=lambda nic: nic.index)
    gpus = sorted(topology.devices(DeviceKind.GPU, host=gpu.host), key=lambda other: other.index)
    sharing = [other for other in gpus if all(rank(other.id, nic) == best for nic in alike)]
    return alike[sharing.index(gpu) % len(alike)]


def numa_node(topology: Graph, gpu: int) -> Device | None:
    """The NUMA node a GPU hangs below, or None where it is unknown."""
    node = nearest_cpu(topology, gpu)
    return node if node is not None and node.index >= 0 else None


def nearest_cpu(topology: Graph, gpu: int) -> Device | None:
    """The CPU a GPU hangs below, whether its NUMA node is known or not; None where there is none."""
    found = nearest(topology, topology.gpu(gpu).id, DeviceKind.CPU)
    return found[0] if found else None


def matrix(topology: Graph) -> dict[str, dict[str, str]]:
    """The classes between all GPUs and NICs, as ``nvidia-smi topo -m`` has them.

    Returns:
        Class by row and column name: ``matrix["GPU0"]["NIC1"]``.
    """
    devices = [(f"GPU{device.index}", device.id) for device in topology.gpus]
    devices += [(f"NIC{device.index}", device.id) for device in topology.devices(DeviceKind.NIC)]
    table: dict[str, dict[str, str]] = {row: {} for row, _ in devices}
    for position, (row, a) in enumerate(devices):
        for column, b in devices[position:]:
            table[row][column] = table[column][row] = path_class(topology, a, b)
    return {row: {column: table[row][column] for column, _ in devices} for row, _ in devices}


def network_path(topology: Graph, a: str, b: str) -> list[str] | None:
    """The path between two NICs or switches of the network, over its switches alone."""
    return _search(
        topology,
        a,
        b,
        lambda link: (0.0, link.latency_us) if link.kind is LinkKind.NETWORK else None,
        lambda device: device.kind is DeviceKind.NETWORK_SWITCH,
    )


# -- inside


def _pcie_class(topology: Graph, path: Sequence[str]) -> str:
    kinds = [topology.device(id).kind for id in path]
    inner = kinds[1:-1]
    cpus = kinds.count(DeviceKind.CPU)
    if cpus > 1:
        return "SYS"
    roots = inner.count(DeviceKind.HOST_BRIDGE)
    if cpus == 1:
        return "NODE" if roots > 1 else "PHB"
    if roots:
        return "PHB"
    return "PIX" if inner.count(DeviceKind.PCIE_SWITCH) <= 1 else "PXB"


def _common_gpu(topology: Graph, a: str, b: str) -> bool:
    """Whether a GPU is joined to both by the fast fabric."""
    fabric = [
        {id for id, link in topology.links_of(end).items() if link.kind.is_gpu_fabric} for end in (a, b)
    ]
    return any(topology.device(id).kind is DeviceKind.GPU for id in fabric[0] & fabric[1])


def _path(topology: Graph, a: str, b: str, path: Sequence[str] | None) -> Path:
    if path is None:
        raise TopologyError(f"no path from {a} to {b} in {topology!r}")
    links = [topology.links_of(here)[there] for here, there in itertools.pairwise(path)]
    narrowest = min(links, key=lambda link: link.bandwidth_gb_per_s, default=None)
    bandwidth = float("inf") if narrowest is None else narrowest.bandwidth_gb_per_s
    return Path(
        tuple(path),
        path_class(topology, a, b, through_gpus=True),
        bandwidth,
        sum(link.latency_us for link in links),
        narrowest,
    )


def _latency(link: Link) -> tuple[float, float]:
    return (link.latency_us, 1.0)


def _search(
    topology: Graph,
    a: str,
    b: str,
    cost: Callable[[Link], tuple[float, float] | None],
    forwards: Callable[[Device], bool],
) -> list[str] | None:
    """Dijkstra with a two-part cost.

    Args:
        topology: The machine.
        a: Where the path begins.
        b: Where it ends.
        cost: Of a link; None forbids it.
        forwards: Whether a device may pass data on.
    """
    topology.device(a), topology.device(b)
    best = {a: (0.0, 0.0)}
    came: dict[str, str] = {}
    queue = [(0.0, 0.0, 0, a)]
    order = itertools.count(1)
    while queue:
        *cost_here, _, here = heapq.heappop(queue)
        if here == b:
            path = [b]
            while path[-1] != a:
                path.append(came[path[-1]])
            return path[::-1]
        if tuple(cost_here) > best[here]:
            continue
        for there, link in topology.links_of(here).items():
            step = cost(link)
            if step is None or (there != b and not forwards(topology.device(there))):
                continue
            total = (cost_here[0] + step[0], cost_here[1] + step[1])
            if there not in best or total < best[there]:
                best[there], came[there] = total, here
                heapq.heappush(queue, (*total, next(order), there))
    return None
