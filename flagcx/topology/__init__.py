"""Machines and clusters as graphs: read them, detect them, plan over them, draw them.

Example:
    >>> from flagcx import topology
    >>> machine = topology.preset("dgx-1v")
    >>> machine["nvlink_peers"][0]
    [3, 4, 1, 2]
    >>> topology.make_plan(machine).method
    'rings'
"""

from __future__ import annotations

from flagcx.topology.detect import detect
from flagcx.topology.draw import plot_topology
from flagcx.topology.files import read
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind, Port, Topology
from flagcx.topology.join import join
from flagcx.topology.paths import Path, matrix, nearest_nic, numa_node, path_class, shortest, widest
from flagcx.topology.plan import (
    Bound,
    Hierarchy,
    Plan,
    Ring,
    Tree,
    best_order,
    bound,
    make_plan,
    order_bandwidth,
    plan_rings,
    plan_trees,
)
from flagcx.topology.presets import cluster, preset, preset_names

__all__ = [
    "Bound",
    "Device",
    "DeviceKind",
    "Hierarchy",
    "Link",
    "LinkKind",
    "Path",
    "Plan",
    "Port",
    "Ring",
    "Topology",
    "Tree",
    "best_order",
    "bound",
    "cluster",
    "detect",
    "join",
    "make_plan",
    "matrix",
    "nearest_nic",
    "numa_node",
    "order_bandwidth",
    "path_class",
    "plan_rings",
    "plan_trees",
    "plot_topology",
    "preset",
    "preset_names",
    "read",
    "shortest",
    "widest",
]
