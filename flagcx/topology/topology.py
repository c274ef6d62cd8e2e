"""The user's ``Topology``: a graph of a machine that is also a mapping of facts by GPU, with tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from flagcx.errors import TopologyError
from flagcx.topology import paths, render
from flagcx.topology.graph import Device, DeviceKind, Graph, no_gpu


class UnknownGpuError(TopologyError, KeyError):
    """A topology was asked about a GPU that it lacks. It is a ``KeyError`` too, as a mapping raises."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class _ByGpu(dict):
    """Facts by GPU index. For a GPU that isn't there, the error lists the GPUs that are.

    Args:
        facts: The facts by index.
        machine: The topology, as it is shown.
    """

    def __init__(self, facts: Mapping[int, Any], machine: str) -> None:
        super().__init__(facts)
        self._machine = machine

    def __missing__(self, index: object) -> Any:
        raise UnknownGpuError(no_gpu(index, list(self), self._machine))


class Topology(Graph, Mapping):
    """A machine, or a cluster of machines: read-only, and a mapping.

    Keys: ``gpus``, ``nics``, ``numa_nodes`` (lists of ids or indices), ``nvlink_peers`` and ``pcie_peers``
    (GPU index to the GPUs of its host that it reaches by that link, nearest first), ``nearest_nic``,
    ``numa_node`` (GPU index to NIC name and NUMA node), ``links`` and ``matrix``. To ask about a GPU that
    isn't there, such as any on a machine without GPUs, is a ``TopologyError`` that is a ``KeyError`` too;
    ``topology["nvlink_peers"].get(0, [])`` takes that for a GPU without peers.

    Args:
        devices: All nodes; ids are unique.
        links: All edges; at most one between two devices.
        name: A short name for people: a preset's or a file's.
        notes: Facts that the source lacks, and the assumptions made in their place.

    Raises:
        TopologyError: The parts do not make a graph.

    Example:
        >>> import flagcx.topology as topology
        >>> machine = topology.preset("8xa100-pcie")
        >>> machine["nvlink_peers"][0]
        [1]
    """

    @cached_property
    def _views(self) -> dict[str, Callable[[], Any]]:
        return {
            "gpus": lambda: [device.index for device in self.gpus],
            "nics": lambda: [device.name or device.id for device in self.devices(DeviceKind.NIC)],
            "numa_nodes": lambda: [node.id for node in self.devices(DeviceKind.CPU) if node.index >= 0],
            "nvlink_peers": lambda: _ByGpu(paths.peers(self, fabric=True), repr(self)),
            "pcie_peers": lambda: _ByGpu(paths.peers(self, fabric=False), repr(self)),
            "nearest_nic": lambda: self._names(paths.nearest_nic),
            "numa_node": lambda: self._names(paths.numa_node),
            "links": lambda: list(self.links),
            "matrix": lambda: paths.matrix(self),
        }

    def _names(self, find: Callable[[Graph, int], Device | None]) -> _ByGpu:
        """The name of the device that ``find`` gives for each GPU."""
        found = {gpu.index: find(self, gpu.index) for gpu in self.gpus}
        return _ByGpu(
            {gpu: device and (device.name or device.id) for gpu, device in found.items()}, repr(self)
        )

    def __getitem__(self, key: str) -> Any:
        try:
            view = self._views[key]
        except (KeyError, TypeError):
            raise KeyError(f"{key!r} is not known; the keys are {', '.join(self._views)}") from None
        return view()

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __rich__(self) -> Any:
        return render.rich_table(self)

    def _repr_html_(self) -> str:
        return render.html_table(self)
