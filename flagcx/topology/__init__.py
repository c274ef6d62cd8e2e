"""Machines and clusters as graphs: read them, detect them, plan over them, draw them.

Files are NCCL's XML and the text of ``nvidia-smi topo -m``, which may have prose, prompts or quote marks
around it. What makes no sense in it is a note and an assumption; only a text that holds no machine is
refused (``python -m tests.topology.mutants 20000`` tries it). Each plan says how near it is to the bound:
the best all-reduce bandwidth that any schedule can have on that graph without multicast and reduction in
switches; with both (NVLS) NVSwitches from Hopper on allow more, which is told beside it. Rings and trees on
GPUs follow the planned order.

Example:
    >>> from flagcx import topology
    >>> machine = topology.preset("dgx-1v")
    >>> machine["nvlink_peers"][0]
    [3, 4, 1, 2]
    >>> topology.make_plan(machine).method
    'ring|ring'
"""

from __future__ import annotations

from flagcx.topology.bounds import Bound, bound
from flagcx.topology.clusters import cluster
from flagcx.topology.detect import detect
from flagcx.topology.draw import plot_topology
from flagcx.topology.files import read
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind, Port
from flagcx.topology.join import join
from flagcx.topology.named import machine_for
from flagcx.topology.orders import best_order, order_bandwidth
from flagcx.topology.paths import Path, matrix, nearest_nic, numa_node, path_class, shortest, widest
from flagcx.topology.plan import Plan, Ring, make_plan, plan_rings
from flagcx.topology.presets import preset, preset_names
from flagcx.topology.topology import Topology

__all__ = [
    "Bound",
    "Device",
    "DeviceKind",
    "Link",
    "LinkKind",
    "Path",
    "Plan",
    "Port",
    "Ring",
    "Topology",
    "best_order",
    "bound",
    "cluster",
    "detect",
    "join",
    "machine_for",
    "make_plan",
    "matrix",
    "nearest_nic",
    "numa_node",
    "order_bandwidth",
    "path_class",
    "plan_rings",
    "plot_topology",
    "preset",
    "preset_names",
    "read",
    "shortest",
    "widest",
]
